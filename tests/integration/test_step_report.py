"""The Trainer's account of each optimizer step: exact where it counts, silent where nobody asked."""

import json
import math

import pytest
import torch
import torch.distributed as dist

from hf_zero.core import homes
from hf_zero.core.direct_file import PAGE
from hf_zero.integrations.callbacks import ZeroStepReport
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.trainers import make_trainer


REPORTED = {"steps_per_print": 1, "wall_clock_breakdown": True}


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_every_step_is_accounted_for(tmp_path, stage):
    options = {"zero_config": {"zero_optimization": {"stage": stage}, **REPORTED}, "max_grad_norm": 0.1}
    trainer = make_trainer("llama", None, tmp_path, **make_zero(options))
    trainer.train()
    entries = logged(trainer)
    assert len(entries) == 6, entries
    numel = sum(p.numel() for p in trainer.model.parameters())
    for entry in entries:
        assert entry["zero/applied_steps"] == 1 and entry["zero/skipped_steps"] == 0, entry
        expected = min(1.0, 0.1 / (entry["grad_norm"] + 1e-6))
        assert math.isclose(entry["zero/clip_factor"], expected, rel_tol=1e-3), entry
        assert entry["zero/tokens_per_second_per_rank"] > 0
        parts = {name: entry[f"zero_seconds/{name}"] for name in ("step", "optimizer", "forward_backward", "stall")}
        assert math.isclose(parts["optimizer"] + parts["forward_backward"], parts["step"], rel_tol=1e-3), parts
        assert parts["stall"] <= parts["step"], parts
        assert entry["zero_seconds/stall"] > 0, "ranks have waited for each other"
    # Half of the fp32 gradients and, at stage 1, of the fp32 weights; at stage 3 most weights travel twice.
    sent = entries[-1]["zero/bytes_sent_per_step"]
    low, high = (1.0, 1.1) if stage == 1 else (1.1, 1.6)
    assert low <= sent / (2 * numel * 4 // 2) <= high, (sent, numel)


def make_zero(options):
    import hf_zero

    return {
        "trainer_class": hf_zero.ZeroTrainer,
        "arguments_class": hf_zero.ZeroTrainingArguments,
        **options,
    }


@distributed(world_size=2)
def test_what_goes_to_disk_and_back_is_accounted_for(tmp_path):
    homes.LEAST_ON_DISK = 1  # the model is tiny
    options = {"zero_config": {"zero_optimization": {"stage": 3}, **REPORTED}}
    disk = {"zero_offload_optimizer_device": "nvme", "zero_offload_optimizer_nvme_path": str(tmp_path)}
    trainer = make_trainer("llama", None, tmp_path, **make_zero({**options, **disk}))
    trainer.train()
    entry, numel = logged(trainer)[-2], sum(p.numel() for p in trainer.model.parameters()) / 2
    # Weight and two moments of all that is not read again from a buffer, and every one of them written in whole pages.
    assert 12 * numel <= entry["zero/disk_bytes_per_step"] <= 24 * numel + 60 * PAGE, (entry, numel)
    assert 0 < entry["zero_seconds/wait_disk"] <= entry["zero_seconds/step"], entry
    assert "zero/bus_bytes_per_step" not in entry, "a CPU rank is its own host"


@distributed(world_size=2)
def test_nothing_is_added_unasked(tmp_path):
    trainer = make_trainer("llama", 2, tmp_path)
    trainer.train()
    assert not [key for entry in trainer.state.log_history for key in entry if key.startswith("zero")]


class _Poisoned(torch.nn.Module):
    """A gradient hook that makes one step's gradient infinite."""

    def __init__(self):
        super().__init__()
        self.backwards = 0

    def forward(self, grad):
        self.backwards += 1
        return grad * math.inf if self.backwards == 2 else grad


@distributed(world_size=2)
def test_a_skipped_step_is_logged_with_its_parameter(tmp_path):
    model = zoo.build("llama")
    if dist.get_rank() == 1:
        model.lm_head.weight.register_hook(_Poisoned())
    options = {"zero_config": {"zero_optimization": {"stage": 2}}, "bf16": True}
    trainer = make_trainer("llama", None, tmp_path, model=model, **make_zero(options))
    trainer.train()
    skipped = [entry.get("zero/skipped_steps", 0) for entry in logged(trainer)]
    assert skipped == [0, 1, 1, 1, 1, 1], skipped
    assert trainer.model._zero_engine.control.first_bad == "lm_head.weight"


@distributed(world_size=2)
def test_lines_are_printed_as_often_as_asked(tmp_path):
    options = {"zero_config": {"zero_optimization": {"stage": 2}, "steps_per_print": 2}}
    trainer = make_trainer("llama", None, tmp_path, **make_zero(options))
    lines = []
    line = trainer.zero_step_report.line
    trainer.zero_step_report.line = lambda step: lines.append(line(step)) or lines[-1]
    trainer.train()
    if dist.get_rank() == 0:
        assert [text.split(",")[0] for text in lines] == ["step 2", "step 4", "step 6"], lines
        assert all("grad_norm" in text and "bytes_sent_per_step" in text for text in lines), lines
    else:
        assert not lines


def test_a_line_names_why_a_step_was_skipped():
    report = ZeroStepReport(details=True, times=False, steps_per_print=1)
    report._window.update(steps=1, skipped=1, seconds=1.0, tokens=8, sent=4)
    report.skipped_steps, report.last = 1, {"first_bad": "lm_head.weight", "max_norm": 1.0}
    report._norm = torch.tensor(math.inf)
    assert report.clip_factor() is None
    line = report.line(7)
    assert line.startswith("step 7, grad_norm inf, skipped: inf or nan first in 'lm_head.weight'"), line
    assert json.dumps(report.logs()) and not report.values(), "a window is logged once"


@distributed(world_size=2)
def test_profiling_labels_the_collectives(tmp_path):
    import hf_zero

    model = zoo.build("llama")
    engine = hf_zero.shard(model, config={"zero_stage": 3})
    with hf_zero.profiling(tmp_path / "traces"):
        engine.backward(model(**zoo.batch("llama", dist.get_rank(), 0)).loss)
    events = json.loads((tmp_path / "traces" / f"trace_rank{dist.get_rank()}.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    for kind in ("all-gather", "reduce-scatter"):
        assert any(name.startswith(f"hf_zero::{kind} of ") for name in names), sorted(names)[:20]
