"""Sets what a rank has measured beside what the plan says for the same model, batch and configuration."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from hf_zero.core.engine import engine_of
from hf_zero.planning.model import BatchShape, skeleton
from hf_zero.planning.trace import Scenario, trace
from hf_zero.planning.units import BYTES, unit_for
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


def draw_memory(lines: Sequence[Mapping], comparison: Comparison, path: Path) -> None:
    """What a rank held after each step, by kind, as areas; the peak of one step; and what the plan says of both.

    `lines` are the steps of one rank, as `MemoryReport.to_dict` has them, with their `step`. Needs matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [line["step"] for line in lines]
    peaks = {line["step"]: line["peak"] for line in lines if line["peak"] is not None}
    unit = unit_for(max(comparison.measured_peak, comparison.predicted_peak))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    kinds = [kind for kind in lines[0]["categories"] if any(line["categories"][kind] for line in lines)]
    held = [[line["categories"][kind] / BYTES[unit] for line in lines] for kind in kinds]
    axes.stackplot(steps, held, labels=kinds, step="mid", alpha=0.7)
    axes.plot(list(peaks), [peak / BYTES[unit] for peak in peaks.values()], "kx", label="peak of the step, measured")
    for name, nbytes, style in (
        ("at rest, predicted", comparison.predicted_resident, ":"),
        ("peak, predicted", comparison.predicted_peak, "--"),
    ):
        axes.axhline(nbytes / BYTES[unit], color="black", linestyle=style, linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"{unit} on rank 0")
    axes.set_title(f"ZeRO stage {comparison.stage}, {comparison.world_size} ranks: state after each step")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def _flat_states(entry: tuple[Tensor, dict]) -> int:
    weight, state = entry
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in state.values())
