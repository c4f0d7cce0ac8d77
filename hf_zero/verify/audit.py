"""Trains a system and its reference side by side, each step from the same weights, and finds the first difference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.verify import causes
from hf_zero.verify.measures import KERNEL, ROUNDING, Measure, Mismatch, gradient_bounds, update_bounds
from hf_zero.verify.probes import fingerprint, random_state, recorded, set_random_state, watched_entry
from hf_zero.verify.systems import Named, Reference, System
from hf_zero.verify.task import Batch, Task


# What is promised, in the order in which faults show: a later one may only follow from an earlier one.
PROMISES = {
    "structure": "the same parameters, tied and frozen alike",
    "quantised weights": "the codec's error: 2-norm of the difference over that of the weights, in 8 bits",
    "data": "every rank is given its own micro-batches",
    "random numbers": "generators stand where those of one process stand",
    "losses": "the same kernels on the same weights; a few roundings where tensors lie elsewhere in memory",
    "gradients": "the same summands in another order: one rounding for each of them",
    "gradient norms": "summed in fp64 here, in parts there",
    "clipping": "one multiplication by min(1, limit / norm)",
    "updates": "the optimizer's own arithmetic on the same gradients, element by element",
    "frozen parameters": "bitwise: nothing may change them",
    "replicas": "bitwise: what ranks have in common is made once",
}
_WIRE = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A promise that does not hold, where and why."""

    promise: str
    step: int
    rank: int
    where: str
    difference: float
    bound: float
    cause: str

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(kw_only=True)
class Audit:
    """What a system did, step by step, beside the reference."""

    measures: dict[str, Measure] = field(
        default_factory=lambda: {name: Measure(promise=name, explained=why) for name, why in PROMISES.items()}
    )
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    random: list[tuple[Tensor, ...]] = field(default_factory=list)
    limit: float = math.inf
    wire: float = 0.0  # relative rounding of the gradients that ranks send
    codec: float = 0.0  # relative error (2-norm) of quantised messages, at most
    leaves_out: bool = False  # whether some micro-batch on some rank gave a trained parameter no gradient
    finding: Finding | None = None


class Auditor:
    """Audits one system against one reference; every method is called on all ranks."""

    def __init__(self, task: Task, system: System, config: ZeroConfig, comm: Communicator) -> None:
        self.task, self.system, self.config, self.comm = task, system, config, comm
        self.device = next(system.model.parameters()).device
        self.reference = Reference(task, config, comm)
        sent = config.communication_data_type
        self.audit = Audit(wire=_WIRE[sent])
        if self.audit.wire:
            self.audit.measures["gradients"].explained += f", and one to {sent} where ranks send them"
        self.audit.codec = max(system.codecs.values(), default=0.0)
        if "gradients" in system.codecs:
            self.audit.measures["gradients"].explained += "; the codec's error: 2-norm over that of all gradients"
        self._summands = comm.world_size * task.accumulation + 2
        self._first = self.reference.weights()
        # As they are computed with: in the 16-bit modes nothing keeps their fp32 values.
        computed = self.reference.model.named_parameters()
        self._frozen = {name: param.detach().float().clone() for name, param in computed if not param.requires_grad}
        self._before: Named | None = None

    def run(self) -> Audit:
        """All steps, or those before the first that is not as it should be."""
        self._check_structure()
        for step in range(self.task.steps):
            if self.audit.finding is None:
                self._step(step)
        self.audit.leaves_out = any(self.comm.all_gather_object(self.reference.leaves_out))
        return self.audit

    # -- agreement of ranks ---------------------------------------------------------------------------------------

    def _failed(self, *promises: str) -> tuple[str, int, Mismatch] | None:
        """The first of the promises that some rank has found broken, with that rank and what it saw; a collective."""
        mine = [(name, self.audit.measures[name].mismatch) for name in promises]
        for name, seen in zip(promises, zip(*self.comm.all_gather_object(mine), strict=True), strict=True):
            for rank, (_, mismatch) in enumerate(seen):
                if mismatch is not None:
                    return name, rank, mismatch
        return None

    def _blame(self, found: tuple[str, int, Mismatch], step: int, cause: str) -> None:
        promise, rank, mismatch = found
        self.audit.finding = Finding(promise=promise, step=step, rank=rank, cause=cause, **asdict(mismatch))

    # -- the steps ------------------------------------------------------------------------------------------------

    def _check_structure(self) -> None:
        measure = self.audit.measures["structure"]
        mine, theirs = self.system.model, self.reference.masters
        frozen = {name: param.requires_grad for name, param in theirs.named_parameters()}
        seen = dict(mine.named_parameters())
        for name, trained in frozen.items():
            known = name in seen and seen[name].requires_grad == trained
            measure.numbers(float(known), 1.0, 0.0, name)
        names = dict(theirs.named_parameters(remove_duplicate=False))
        owners = {param: name for name, param in reversed(names.items())}
        for name, param in names.items():
            first = owners[param]
            if first != name:
                tied = _get(mine, name) is not None and _get(mine, name) is _get(mine, first)
                measure.numbers(float(tied), 1.0, 0.0, name)
        found = self._failed("structure")
        if found is not None:
            self._blame(found, 0, self._structure_cause(found[2].where, owners, names, seen))

    def _structure_cause(self, name: str, owners: dict, names: dict, seen: dict) -> str:
        tied_to = owners[names[name]]
        if tied_to != name:
            return f"tied weight untied: '{name}' is '{tied_to}' in the model, and here it is a parameter of its own"
        if name not in seen:
            return f"'{name}' is no parameter of the model that is trained"
        return f"frozen parameter trained: '{name}'" if seen[name].requires_grad else f"'{name}' is not trained"

    def _step(self, step: int) -> None:
        if "weights" in self.system.codecs and not self._take_decoded(step):
            return
        weights = self.task.weights(self.comm.world_size, step)
        batches = [self.task.batch(self.comm.rank, step, number) for number in range(self.task.accumulation)]
        states = self._micro_steps(step, batches, weights[self.comm.rank])
        found = self._failed("data", "random numbers", "losses")
        if found is not None:
            self._blame(found, step, self._entry_cause(found, batches, states))
            return
        mine = self.system.gradients()
        if self._gradients(step, mine, batches, states, weights):
            return
        clipped = self._clips(step, mine)
        if clipped is not None:
            # What no rank has used is not stepped: torch's optimizers leave out what has no gradient.
            self._updates(step, {name: grad for name, grad in clipped.items() if name in self.reference.used})

    def _take_decoded(self, step: int) -> bool:
        """Have the reference compute with what the codec has made of the weights, if that is near them."""
        decoded = self.system.computed()
        self.audit.measures["quantised weights"].apart(
            decoded, self.reference.weights(), self.system.codecs["weights"] + ROUNDING[self.config.mixed_precision]
        )
        found = self._failed("quantised weights")
        if found is not None:
            self._blame(found, step, f"the model computes with other weights than the codec makes: {found[2].where}")
            return False
        self.reference.compute_with(decoded)
        self._frozen = {name: decoded[name] for name in self._frozen}
        return True

    def _micro_steps(self, step: int, batches: list[Batch], weights: list[float]) -> list[tuple[Tensor, ...]]:
        """All micro-batches of a step through both; returns where the generators stood before each."""
        states, measures = [], self.audit.measures
        if self.reference.scaler is not None:
            self.reference.scaler.scale = self.system.loss_scale
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            states.append(random_state(self.device))
            with watched_entry(self.system.model, self.device) as mine:
                loss = self.system.micro_step(batch, weight, number == len(batches) - 1)
            set_random_state(states[-1], self.device)
            with watched_entry(self.reference.model, self.device) as theirs:
                right = self.reference.micro_step(batch, weight)
            where = f"micro-batch {number}"
            measures["data"].numbers(float(mine.inputs == theirs.inputs), 1.0, 0.0, where)
            measures["random numbers"].numbers(float(mine.random == theirs.random), 1.0, 0.0, where)
            measures["losses"].numbers(loss, right, KERNEL * max(1.0, abs(right)), where)
            self.audit.losses.append(loss)
        self.audit.random += states
        return states

    def _entry_cause(self, found: tuple[str, int, Mismatch], batches: list[Batch], states: list) -> str:
        promise, rank, mismatch = found
        if promise == "data":
            return f"rank {rank} computes with other data than it was given: {mismatch.where}"
        if promise == "random numbers":
            return (
                f"random numbers shifted: the generator of rank {rank} stands elsewhere when the model is called "
                f"({mismatch.where})"
            )
        number = int(mismatch.where.split()[-1])
        events = []
        for model, loss in ((self.system.model, None), (self.reference.model, self.reference.loss)):
            set_random_state(states[number], self.device)
            with torch.no_grad(), recorded(model, self.device) as seen:
                loss(batches[number]) if loss else self.task.loss(model, batches[number])
            events.append(seen)
        said = causes.forward_cause(*events, self.reference.weights(), self._before)
        return self.comm.all_gather_object(said)[rank]

    def _gradients(self, step: int, mine: Named, batches: list[Batch], states: list, weights: list) -> bool:
        theirs, sizes = self.reference.gradients()
        measure, codec = self.audit.measures["gradients"], self.system.codecs.get("gradients")
        if codec is None:
            bounds = gradient_bounds(sizes, self._summands, self.audit.wire)
            measure.tensors(mine, theirs, bounds)
            wrong = [name for name in theirs if _apart(mine.get(name), theirs[name]) > bounds[name]]
        else:
            wrong = measure.apart(mine, theirs, codec + self.audit.wire)
        found = self._failed("gradients")
        if found is None:
            return False
        wrong = self.comm.all_gather_object(wrong)[found[1]]
        self._blame(found, step, self._gradient_cause(mine, wrong, len(theirs), batches, states, weights))
        return True

    def _gradient_cause(
        self, mine: Named, wrong: list[str], total: int, batches: list[Batch], states: list, weights: list
    ) -> str:
        """Explain the wrong gradients as a combination of those of all micro-batches."""
        parts = []
        for batch, state in zip(batches, states, strict=True):
            set_random_state(state, self.device)
            parts.append(self.reference.contribution(batch))
        products = {}
        for name in wrong:
            zeros = torch.zeros_like(self._first[name])
            own = [part.get(name, zeros).flatten().cpu() for part in parts]
            everyone = self.comm.all_gather_object(own)
            rows = torch.stack([row for rank in everyone for row in rank]).double()
            target = mine.get(name, zeros).double().flatten().cpu()
            products[name] = causes.Products(rows @ rows.T, rows @ target, target.square().sum().item())
        expected = [[weight / self.comm.world_size for weight in row] for row in weights]
        return causes.gradient_cause(products, expected, everything=len(wrong) > 0.9 * total)

    def _clips(self, step: int, mine: Named) -> Named | None:
        """Have the gradients clipped; returns them, or None where that went wrong."""
        if not self.system.clips:
            return mine
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in mine.values()))
        if self.task.clip == "half" and step == 0:
            self.audit.limit = 0.5 * norm if math.isfinite(norm) else 1.0
        elif self.task.clip not in (None, "half"):
            self.audit.limit = float(self.task.clip)
        said = self.system.clip(self.audit.limit)
        self.audit.norms.append(said)
        measures = self.audit.measures
        measures["gradient norms"].numbers(said, norm, 4 * KERNEL * norm, f"step {step}")
        clipped = self.system.gradients()
        if math.isfinite(norm):
            factor = min(1.0, self.audit.limit / (norm + 1e-6))
            bounds = {name: 4 * KERNEL * grad.abs().max().item() for name, grad in mine.items() if grad.numel()}
            right = {name: grad * factor for name, grad in mine.items()}
            measures["clipping"].tensors(clipped, right, bounds)
        found = self._failed("gradient norms", "clipping")
        if found is None:
            return clipped
        dots = [(clipped[name] * grad).sum().item() for name, grad in mine.items() if name in clipped]
        factor = sum(dots) / norm**2 if norm else 0.0
        self._blame(found, step, causes.clip_cause(self.audit.limit, norm, said, factor))
        return None

    def _updates(self, step: int, gradients: Named) -> None:
        """Step both by the same gradients, and go on from the weights that the system has made."""
        before = self.reference.weights()
        self.reference.step(gradients)
        self.system.step()
        theirs, mine, measures = self.reference.weights(), self.system.weights(), self.audit.measures
        trained = {name for name, param in self.reference.masters.named_parameters() if param.requires_grad}
        bounds = update_bounds(before, theirs)
        made = {name: value for name, value in mine.items() if name in trained}
        right = {name: value for name, value in theirs.items() if name in trained}
        measures["updates"].tensors(made, right, bounds)
        frozen = {name: value for name, value in mine.items() if name not in trained}
        measures["frozen parameters"].tensors(frozen, {name: self._frozen[name] for name in frozen}, {})
        sums = self.comm.all_gather_object(fingerprint(mine))
        same = float(sums[0] == sums[self.comm.rank])
        measures["replicas"].numbers(same, 1.0, 0.0, f"weights after step {step}")
        found = self._failed("frozen parameters", "updates", "replicas")
        if found is not None:
            cause = f"frozen parameter trained: '{found[2].where}' has changed"
            if found[0] == "replicas":
                cause = f"rank {found[1]} has other weights than rank 0"
            elif found[0] == "updates":
                wrong = [name for name in right if _apart(mine.get(name), right[name]) > bounds[name]]
                cause = causes.update_cause(wrong, before, mine, theirs, self.reference.options()) if wrong else ""
            self._blame(found, step, self.comm.all_gather_object(cause)[found[1]])
            return
        self._before = before
        self.reference.take(mine)


def _get(model: torch.nn.Module, name: str) -> Tensor | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


def _apart(mine: Tensor | None, theirs: Tensor) -> float:
    return math.inf if mine is None else (mine - theirs).abs().max().item() if mine.numel() else 0.0
