"""Sets what a rank has measured beside what the plan says for the same model, batch and configuration."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from hf_zero.core.engine import engine_of
from hf_zero.planning.model import BatchShape, skeleton
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


def compare(model: nn.Module, inputs: dict[str, Tensor], *, measured_peak: int, accumulation: int) -> Comparison:
    """Plan for a model that has trained with such inputs (on meta), between two of its steps. No communication.

    Raises PlanError where the model cannot be traced.
    """
    engine = engine_of(model)
    assert engine is not None
    states = max((_flat_states(state) for o in engine.optimizers for state in o.state.items()), default=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23
        checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
    scenario = Scenario(
        config=engine.config,
        world_size=engine.comm.world_size,
        batch=BatchShape(rows=0, length=0),
        checkpointing=checkpointing,
        accumulation=accumulation,
        optimizer_states=states,
        backend="nccl" if engine.device.type == "cuda" else "gloo",
    )
    footprint = trace(skeleton(model), scenario, inputs)
    return Comparison(
        stage=engine.config.zero_stage,
        world_size=engine.comm.world_size,
        predicted_resident=footprint.resident_bytes,
        measured_resident=memory_report(model).state_bytes,
        predicted_peak=footprint.peak_bytes,
        measured_peak=measured_peak,
    )


def _flat_states(entry: tuple[Tensor, dict]) -> int:
    weight, state = entry
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in state.values())
