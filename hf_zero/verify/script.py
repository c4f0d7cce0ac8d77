"""Compares two traced runs of one script: as it is configured, and under plain data parallelism."""

from __future__ import annotations

import functools
import json
import math
import operator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from hf_zero.errors import ZeroLaunchError
from hf_zero.verify import causes
from hf_zero.verify.audit import Finding
from hf_zero.verify.certificate import Certificate, Verdict
from hf_zero.verify.measures import KERNEL, ROUNDING, Measure


_GROWTH = 1e-3  # of a gradient, of its largest element, once weights have begun to differ


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """What `traced` has written of one run."""

    folder: Path
    ranks: list[dict]

    @classmethod
    def read(cls, folder: Path) -> TracedRun:
        """Raises ZeroLaunchError where the script has trained nothing that could be seen."""
        files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
        found = cls(folder=folder, ranks=[json.loads(file.read_text()) for file in files])
        if not found.ranks or not found.ranks[0]["steps"]:
            raise ZeroLaunchError(
                "the script has made no optimizer step on a model of transformers that returns its loss: look above "
                "for its messages, or give its model by --model"
            )
        return found

    def tensors(self, step: int, kind: str) -> dict[str, Tensor]:
        values = load_file(self.folder / f"{step}.safetensors")
        return {name.partition(":")[2]: value for name, value in values.items() if name.startswith(kind)}


def compare_traces(mine: TracedRun, right: TracedRun, *, script: str, settings: dict) -> Certificate:
    """The certificate of a script. Raises ZeroLaunchError where the second run was no plain data parallelism."""
    if right.ranks[0]["stage"]:
        raise ZeroLaunchError(
            f"the script was started for stage 0, and trained by {right.ranks[0]['system']}: it names a configuration "
            "itself (--deepspeed or zero_stage=); leave that out, and give the file by --config"
        )
    comparison = _Comparison(mine, right, ROUNDING[mine.ranks[0]["precision"]])
    finding = comparison.run()
    return Certificate(
        system=f"{mine.ranks[0]['system']}, beside {right.ranks[0]['system']}",
        model=script,
        settings=settings,
        ranks=len(mine.ranks),
        steps=mine.ranks[0]["steps"],
        micro_batches=comparison.micro_batches,
        how="both runs start from the same weights and are compared step by step",
        verdicts=[Verdict.of(measure, finding) for measure in comparison.measures],
        finding=finding,
        losses=[loss for _, loss in mine.ranks[0]["losses"]],
    )


class _Comparison:
    def __init__(self, mine: TracedRun, right: TracedRun, rounding: float) -> None:
        self.mine, self.right, self.rounding = mine, right, rounding
        self.cutting = mine.ranks[0]["cutting"] > 1
        self.width = mine.ranks[0]["sharing"] * mine.ranks[0]["cutting"]  # neighbours that share a batch
        self.codec = mine.ranks[0]["codec"]  # relative error (2-norm) of quantised messages, at most
        self.micro_batches = len(right.ranks[0]["losses"]) // right.ranks[0]["steps"]
        explained = "order of sums and the precision computed in; it grows from step to step"
        explained += "; the codec's error" if self.codec else ""
        self.structure = Measure(promise="structure", explained="the same parameters, frozen alike")
        self.data = Measure(promise="data", explained="every rank is given its own micro-batches")
        self.options = Measure(promise="optimizer settings", explained="the same rates and weight decays")
        self.losses = Measure(promise="losses", explained=explained)
        self.gradients = Measure(promise="gradients, clipped", explained=explained)
        self.weights = Measure(promise="weights", explained="at most what the learning rates allow Adam to turn")

    @property
    def measures(self) -> list[Measure]:
        return [self.structure, self.data, self.options, self.losses, self.gradients, self.weights]

    def run(self) -> Finding | None:
        """Step by step, until something differs."""
        names, others = self.mine.ranks[0]["trained"], self.right.ranks[0]["trained"]
        for name in dict.fromkeys([*others, *names]):
            self.structure.numbers(float(names.get(name) == others.get(name)), 1.0, 0.0, name)
        if self.structure.mismatch is not None:
            name = self.structure.mismatch.where
            trained = names.get(name) and not others.get(name)
            cause = f"frozen parameter trained: '{name}'" if trained else f"'{name}' is in one of the runs only"
            return self._finding(self.structure, 0, 0, cause)
        rates = 0.0
        for step in range(min(self.mine.ranks[0]["steps"], self.right.ranks[0]["steps"])):
            rates += self._rate(step)
            found = self._forward(step) or self._optimizer(step, rates)
            if found is not None:
                return found
        return None

    def _finding(self, measure: Measure, step: int, rank: int, cause: str) -> Finding:
        seen = measure.mismatch
        assert seen is not None
        return Finding(
            promise=measure.promise,
            step=step,
            rank=rank,
            where=seen.where,
            difference=seen.difference,
            bound=seen.bound,
            cause=cause,
        )

    def _rate(self, step: int) -> float:
        options = self.right.ranks[0]["options"]
        return max((said["lr"] for key, said in options.items() if key.startswith(f"{step}:")), default=0.0)

    def _forward(self, step: int) -> Finding | None:
        assert len(self.mine.ranks) == self.width * len(self.right.ranks)
        for rank, mine in enumerate(self.mine.ranks):
            right = self.right.ranks[rank // self.width]
            pairs = zip(_of_step(mine["inputs"], step), _of_step(right["inputs"], step), strict=False)
            for number, (given, expected) in enumerate(() if self.cutting else pairs):  # parts are other data
                self.data.numbers(float(given == expected), 1.0, 0.0, f"micro-batch {number}")
            if self.data.mismatch is not None:
                cause = f"rank {rank} computes with other data: {self.data.mismatch.where}"
                return self._finding(self.data, step, rank, cause)
            losses = self._losses(rank, step), _of_step(right["losses"], step)
            if len(losses[0]) != len(losses[1]):
                self.losses.numbers(len(losses[0]), len(losses[1]), 0.0, "number of micro-batches")
                cause = f"{len(losses[0])} micro-batches in a step, and not {len(losses[1])}"
                return self._finding(self.losses, step, rank, cause)
            for number, (loss, expected) in enumerate(zip(*losses, strict=True)):
                bound = (4 * self.rounding + self.codec) * (1 + step) * max(1.0, abs(expected))
                self.losses.numbers(loss, expected, bound, f"micro-batch {number}")
            if self.losses.mismatch is not None:
                since = "from the first weights on" if step == 0 else "though the weights before it agree"
                cause = f"the loss of {self.losses.mismatch.where} of rank {rank} differs {since}"
                return self._finding(self.losses, step, rank, cause)
        return None

    def _losses(self, rank: int, step: int) -> list[float]:
        """Of the micro-batches of a rank: where ranks have shares of a sequence's loss, the sums of these."""
        ranks = self.mine.ranks
        if not (self.cutting and ranks[rank]["parts"]):
            return _of_step(ranks[rank]["losses"], step)
        first = rank - rank % self.width
        each = [_of_step(one["losses"], step) for one in ranks[first : first + self.width]]
        return [sum(shares) for shares in zip(*each, strict=True)]

    def _optimizer(self, step: int, rates: float) -> Finding | None:
        for name in self.right.ranks[0]["trained"]:
            key = f"{step}:{name}"
            mine, right = (run.ranks[0]["options"].get(key, {}) for run in (self.mine, self.right))
            for what in dict.fromkeys([*right, *mine]):
                self.options.numbers(mine.get(what, math.nan), right.get(what, math.nan), 0.0, f"{what} of '{name}'")
            if self.options.mismatch is not None:
                cause = f"{self.options.mismatch.where}: {mine} where {right} is asked for"
                return self._finding(self.options, step, 0, cause)
        mine, right = self.mine.tensors(step, "gradient"), self.right.tensors(step, "gradient")
        largest = {name: grad.abs().max().item() for name, grad in right.items() if grad.numel()}
        relative = 64 * self.rounding if step == 0 else max(_GROWTH, 64 * self.rounding)
        floor = relative / 64 * max(largest.values(), default=0.0)
        if self.codec:
            self.gradients.apart(mine, right, self.codec * (1 + step) + relative)
        else:
            self.gradients.tensors(mine, right, {name: relative * value + floor for name, value in largest.items()})
        if self.gradients.mismatch is not None:
            return self._finding(self.gradients, step, 0, self._gradient_cause(mine, right))
        bounds = dict.fromkeys(right, 2 * rates)
        mine, right = self.mine.tensors(step, "weight"), self.right.tensors(step, "weight")
        if self.codec:  # the peak of a block may be another parameter's
            peak = max((value.abs().max().item() for value in right.values() if value.numel()), default=0.0)
            bounds = {name: bounds.get(name, 0.0) + self.codec * peak for name in right}
        bounds |= {name: self._cast(value, bounds.get(name, 0.0)) for name, value in right.items()}
        self.weights.tensors(mine, right, bounds)
        if self.weights.mismatch is not None:
            frozen = not self.right.ranks[0]["trained"][self.weights.mismatch.where]
            what = "frozen parameter trained" if frozen else "the optimizer makes something else of its gradient"
            return self._finding(self.weights, step, 0, f"{what}: '{self.weights.mismatch.where}'")
        return None

    def _cast(self, weight: Tensor, bound: float) -> float:
        """A 16-bit run shows casts of its weights."""
        largest = weight.abs().max().item() if weight.numel() else 0.0
        return bound + (self.rounding * largest if self.rounding > KERNEL else KERNEL / 8 * largest)

    def _gradient_cause(self, mine: dict[str, Tensor], right: dict[str, Tensor]) -> str:
        """A factor of all gradients, or the parameter that differs most."""
        products = []
        for name, grad in right.items():
            row = grad.double().flatten()[None]
            made = mine[name].double().flatten() if name in mine else 0 * row[0]
            products.append(causes.Products(row @ row.T, row @ made, made.square().sum().item()))
        (factor,) = functools.reduce(operator.add, products).shares() or (1.0,)
        if abs(factor - 1) <= causes.FIT:
            assert self.gradients.mismatch is not None
            return f"the gradient of '{self.gradients.mismatch.where}' is another one"
        why = causes.factor_cause(factor, len(self.mine.ranks), self.micro_batches)
        return f"every gradient is {factor:.4g} times what it should be{why}"


def _of_step(noted: list, step: int) -> list:
    return [value for number, value in noted if number == step]
