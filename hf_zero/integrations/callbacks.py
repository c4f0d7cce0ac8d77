"""What a Trainer reports of ZeRO: memory per step and against the plan, and one account of every optimizer step."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_zero.core.engine import ZeroEngine, engine_of
from hf_zero.tools.memory import FORWARD, measure_peak, memory_report


if TYPE_CHECKING:
    from hf_zero.planning.compare import Comparison
    from hf_zero.planning.costs import Machine
    from hf_zero.planning.enqueued import Enqueued

logger = logging.getLogger(__name__)

TIMELINE = "timeline.json"
_MEASURED_STEP = 2  # the first one makes the optimizer states and records the order of units


class ZeroMemoryCallback(TrainerCallback):
    """Writes what every rank holds after each step, and at the end compares with what `hf-zero plan` predicts.

    `folder` gets `memory_rank<r>.jsonl` (one line per step) and `memory_comparison.json`. On CPU ranks the peak is
    measured in the second step only, as that takes torch's profiler. With a `machine` (a name or a YAML file) it also
    gets `timeline.json`, a step as it is predicted there, and `timeline_trace.json`, the same for Perfetto.

    Raises MachineError where there is no such machine.
    """

    def __init__(self, folder: str | Path, machine: str | None = None) -> None:
        self.folder = Path(folder)
        self.machine = None if machine is None else _machine(machine)
        self.comparison: Comparison | None = None
        self._inputs: dict[str, Any] = {}
        self._peak: Any = None
        self._peak_bytes: int | None = None
        self._hooks: list[Any] = []
        self._forward: Any = None  # the open range of the trace in which the peak is measured
        self.categories: dict[str, int] = {}  # bytes by kind after the last step

    def on_train_begin(self, args: TrainingArguments, *_: Any, model: nn.Module, **__: Any) -> None:
        if self.machine is not None:
            self.machine.check_ranks(on_cpu=args.device.type == "cpu")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(args.process_index).write_text("")
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def _path(self, rank: int) -> Path:
        return self.folder / f"memory_rank{rank}.jsonl"

    def _begin_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._peak is not None:  # of the step whose peak is measured
            self._forward = torch.profiler.record_function(FORWARD)
            self._forward.__enter__()
            self._inputs = {
                name: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
                for name, value in kwargs.items()
            }

    def _end_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._forward is not None:
            self._forward.__exit__(None, None, None)
            self._forward = None

    def on_step_begin(self, _: Any, state: TrainerState, *__: Any, model: nn.Module, **___: Any) -> None:
        if state.global_step == _MEASURED_STEP - 1 and engine_of(model) is not None:
            self._peak = measure_peak(model)
            self._result = self._peak.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **__: Any) -> None:
        if engine_of(model) is None:
            return
        measured = {}
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
            self._peak, self._peak_bytes = None, self._result.value
            measured = {"peak": self._peak_bytes, "moment": self._result.moment}
        found = memory_report(model)
        self.categories = found.categories
        report = found.to_dict() | measured
        report |= {"step": state.global_step, "rank": args.process_index}
        if state.global_step > 1:
            del report["units"]  # the same at every step: said once
        with self._path(args.process_index).open("a") as file:
            file.write(json.dumps(report) + "\n")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **__: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        engine = engine_of(model)
        if engine is None or self._peak_bytes is None or not state.is_world_process_zero:
            return
        from hf_zero.planning.compare import compare
        from hf_zero.planning.enqueued import Enqueued
        from hf_zero.planning.model import PlanError

        steps, log = args.gradient_accumulation_steps, None if self.machine is None else Enqueued()
        try:
            self.comparison = compare(model, self._inputs, measured_peak=self._peak_bytes, accumulation=steps, log=log)
        except PlanError as error:  # training has ended well
            logger.warning("hf_zero: memory was measured, and is not compared with the plan: %s", error)
            return
        text = json.dumps(self.comparison.to_dict(), indent=2)
        (self.folder / "memory_comparison.json").write_text(text)
        logger.warning("%s", self.comparison)
        if log is not None:
            topology = engine.mesh.topology
            self._write_timeline(log, topology.machine or topology.size)

    def _write_timeline(self, log: Enqueued, ranks: int) -> None:
        """A step of one of so many ranks on each machine."""
        from hf_zero.planning.timeline import replay

        timeline = replay(log.events, self.machine.shared_by(ranks))
        timeline.write_trace(self.folder / "timeline_trace.json")
        found = timeline.to_dict() | {"machine": self.machine.name, "error": self.machine.error}
        (self.folder / TIMELINE).write_text(json.dumps(found))


def _machine(name: str) -> Machine:
    from hf_zero.planning.costs import read_machine  # most runs predict nothing, and the planner is long to import

    return read_machine(name)


class ZeroStepReport(TrainerCallback):
    """Accounts for every optimizer step; `logs` gives what has gathered since the last call.

    Args:
        details: log tokens, bytes and clipping too, not only skipped steps.
        times: how long steps take and where they wait (`wall_clock_breakdown`); on a GPU this waits for the device.
        steps_per_print: print a line of every so many steps; None for never.
        each: is called after every step with its number, what it took, and the first bad parameter if it was skipped.
    """

    def __init__(
        self,
        *,
        details: bool,
        times: bool,
        steps_per_print: int | None,
        each: Callable[[int, Mapping[str, float], str | None], None] | None = None,
    ) -> None:
        self.details, self.times, self.steps_per_print, self.each = details, times, steps_per_print, each
        self.skipped_steps = 0
        self.last: dict[str, Any] = {}
        self._tokens = 0
        self._window: Counter[str] = Counter()
        self._norm: Tensor | None = None
        self._before: dict[str, float] = {}
        self._errors: dict[str, float] = {}  # of quantised messages, by what they carry

    def count_tokens(self, inputs: object) -> None:
        """Note the tokens of a micro-batch (or what it has for labels)."""
        if not isinstance(inputs, Mapping):  # prompts that are still to be answered
            return
        found = inputs.get("input_ids", inputs.get("labels"))
        self._tokens += found.numel() if isinstance(found, Tensor) else 0

    def _now(self, engine: ZeroEngine) -> float:
        if self.times and engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        return time.perf_counter()

    def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        engine = engine_of(model)
        if engine is not None:
            self._tokens = 0
            self._before = {
                "start": self._now(engine),
                "sent": engine.comm.traffic.bytes_sent.total(),
                "far": engine.comm.traffic.bytes_between_nodes,
                "gather": engine.comm.traffic.waited["all-gather"],
                "reduce": engine.comm.traffic.waited["reduce-scatter"] + engine.comm.traffic.waited["all-reduce"],
                **_elsewhere(engine),
            }

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        engine = engine_of(model)
        if engine is not None:
            self._norm = engine.control.norm
            self._before["optimizer"] = self._now(engine)

    def on_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        engine = engine_of(model)
        if engine is not None:
            self._before["stepped"] = self._now(engine)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **__: Any) -> None:
        engine = engine_of(model)
        if engine is None or "stepped" not in self._before:
            return
        before, waited = self._before, engine.comm.traffic.waited
        skipped = engine.step_was_skipped
        self.skipped_steps += skipped
        taken = {
            "skipped": int(skipped),
            "seconds": self._now(engine) - before["start"],
            "tokens": self._tokens,
            "sent": engine.comm.traffic.bytes_sent.total() - before["sent"],
            "far": engine.comm.traffic.bytes_between_nodes - before["far"],
            "gather": waited["all-gather"] - before["gather"],
            "reduce": waited["reduce-scatter"] + waited["all-reduce"] - before["reduce"],
            "optimizer": before["stepped"] - before["optimizer"],
            **{name: value - before[name] for name, value in _elsewhere(engine).items()},
        }
        self._window.update(taken, steps=1)
        self._errors = {each.kind: each.error for each in engine.mesh.quantised if each.error is not None}
        self.last = {"first_bad": engine.control.first_bad if skipped else None, "max_norm": args.max_grad_norm}
        if self.each is not None:
            self.each(state.global_step, taken, self.last["first_bad"])
        if self.steps_per_print and state.global_step % self.steps_per_print == 0 and state.is_world_process_zero:
            print(self.line(state.global_step), flush=True)

    def clip_factor(self) -> float | None:
        """What the last gradients were multiplied with, None where nothing clips."""
        limit = self.last.get("max_norm")
        if self._norm is None or not limit:
            return None
        norm = float(self._norm)
        return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else None

    def values(self) -> dict[str, float]:
        """The means over the steps since the last `logs`, by the names that they are logged under."""
        window = self._window
        steps, seconds = window["steps"], window["seconds"]
        if not steps:
            return {}
        found: dict[str, float] = {"zero/skipped_steps": self.skipped_steps} if self.skipped_steps else {}
        found |= {f"zero/quantised_{kind}_error": error for kind, error in self._errors.items()}
        if window["far"]:
            found["zero/bytes_between_nodes_per_step"] = window["far"] / steps
        if self.details:
            factor = self.clip_factor()
            found |= {} if factor is None else {"zero/clip_factor": factor}
            found |= {
                "zero/applied_steps": steps - window["skipped"],
                "zero/skipped_steps": self.skipped_steps,
                "zero/tokens_per_second_per_rank": window["tokens"] / seconds,
                "zero/bytes_sent_per_step": window["sent"] / steps,
            }
            found |= {f"zero/{kind}_bytes_per_step": window[kind] / steps for kind in ("disk", "bus") if window[kind]}
        if self.times:
            stall = window["gather"] + window["reduce"]
            rest = seconds - window["optimizer"]
            parts = {"step": seconds, "optimizer": window["optimizer"], "forward_backward": rest}
            parts |= {"wait_gather": window["gather"], "wait_reduce": window["reduce"], "stall": stall}
            parts |= {"wait_disk": window["disk_waited"]} if window["disk"] else {}
            found |= {f"zero_seconds/{name}": value / steps for name, value in parts.items()}
        return found

    def logs(self) -> dict[str, float]:
        """The same, rounded for people; the next window begins."""
        found = {name: float(f"{value:.6g}") for name, value in self.values().items()}
        self._window.clear()
        return found

    def line(self, step: int) -> str:
        """The last steps in one line."""
        words = [f"step {step}"]
        if self.last.get("first_bad"):
            words.append(f"skipped: inf or nan first in '{self.last['first_bad']}'")
        words += [f"{name.partition('/')[2]} {value:.4g}" for name, value in self.values().items()]
        if self._norm is not None:
            words.insert(1, f"grad_norm {float(self._norm):.4g}")
        return ", ".join(words)


def _elsewhere(engine: ZeroEngine) -> dict[str, float]:
    """What went to disk and back, how long this rank waited for it, and what crossed the bus to the host and back."""
    files, couriers = engine.homes.files, engine.homes.couriers
    return {
        "disk": sum(file.moved.total() for file in files),
        "disk_waited": sum(file.waited for file in files),
        "bus": sum(courier.moved.total() for courier in couriers if courier.crosses),
    }
