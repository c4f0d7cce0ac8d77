"""Sets what a rank has measured beside what the plan says for the same model, batch and configuration."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from hf_zero.core.binding import Binding
from hf_zero.core.engine import engine_of
from hf_zero.planning.enqueued import Enqueued
from hf_zero.planning.model import BatchShape, PlanError, skeleton
from hf_zero.planning.optimizers import Kept, tried
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.memory import memory_report


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Bytes of one rank, predicted and measured, between steps and at the worst moment of one."""

    stage: int
    world_size: int
    predicted_resident: int
    measured_resident: int
    predicted_peak: int
    measured_peak: int
    predicted_kinds: dict[str, int]  # between steps
    measured_kinds: dict[str, int]
    predicted_peak_kinds: dict[str, int]

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"hf_zero: memory of rank 0 at stage {self.stage}, {self.world_size} rank(s), against the plan:"]
        pairs = {
            "at rest": (self.predicted_resident, self.measured_resident),
            "peak": (self.predicted_peak, self.measured_peak),
        }
        for name, (predicted, measured) in pairs.items():
            lines.append(
                f"  {name:<8}predicted {predicted / 1e6:>12.2f} MB   measured {measured / 1e6:>12.2f} MB   "
                f"{measured / predicted - 1:+.2%}"
            )
        return "\n".join(lines)


def compare(
    model: nn.Module, inputs: dict[str, Any], *, measured_peak: int, accumulation: int, log: Enqueued | None = None
) -> Comparison:
    """Plan for a model that has trained with such inputs (tensors on meta), between two steps. No communication.

    What a rank enqueues goes to `log`. Raises PlanError where the model cannot be traced.
    """
    engine = engine_of(model)
    assert engine is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23
        checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
    if engine.config.tp_size > 1:
        raise PlanError("a rank of tensor parallelism is not planned for while it trains: see `hf-zero plan --tp`")
    scenario = Scenario(
        config=engine.config.replace(sp_size=1, cp_size=1),  # these inputs are a part already
        world_size=engine.comm.world_size,
        batch=BatchShape(rows=0, length=0),
        checkpointing=checkpointing,
        accumulation=accumulation,
        kept=_kept(engine.bindings),
        backend="nccl" if engine.device.type == "cuda" else "gloo",
    )
    bare = skeleton(model)
    with _left_alone(model):
        footprint = trace(bare, scenario, inputs, log)
    measured = memory_report(model)
    return Comparison(
        stage=engine.config.zero_stage,
        world_size=engine.comm.world_size,
        predicted_resident=footprint.resident_bytes,
        measured_resident=measured.state_bytes,
        predicted_peak=footprint.peak_bytes,
        measured_peak=measured_peak,
        predicted_kinds=footprint.resident,
        measured_kinds=measured.categories,
        predicted_peak_kinds=footprint.peak,
    )


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Have calls of the model itself fail inside: it would communicate, and other ranks would not.

    A function that somebody has put around its `forward` stands in the copy as well, and may know the original.
    """

    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError("its forward was replaced by a function that calls the model that was copied")

    hooks = [module.register_forward_pre_hook(fail, prepend=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kept(bindings: Iterable[Binding]) -> Kept:
    """What the optimizers of a run keep; those that step whole matrices are tried."""
    flat, whole, vectors = 0, None, False
    for binding in bindings:
        optimizer = binding.optimizer
        described = zip(optimizer.param_groups, binding.groups, binding.shards, binding.owned, strict=True)
        for options, params, shards, is_whole in described:
            if not is_whole:
                flat = max(
                    [flat, *(_flat_states(each.weight, optimizer.state.get(each.weight, {})) for each in shards)]
                )
                continue
            vectors = vectors or any(param.dim() <= 1 for param in params)
            if whole is None or any(param.dim() > 1 for param in params):
                whole = tried(optimizer, options)
    return Kept(flat=flat, whole=whole, vectors=vectors)


def _flat_states(weight: Tensor, state: Mapping[str, object]) -> int:
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in state.values())
