"""`memory_report` adds up to what the process holds; the callback writes it and compares it with the plan."""

import functools
import json
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.integrations.callbacks import ZeroMemoryCallback
from hf_zero.tools.memory import CATEGORIES
from tests.ranks.test_memory import batch, build, live_bytes
from tests.support.harness import distributed
from tests.support.trainers import make_trainer


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_the_report_is_all_that_lives(stage):
    before = live_bytes()
    model = build(hidden=64)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": "bf16"})
    engine.backward(model(**batch(model)).loss)
    optimizer.step()
    report = hf_zero.memory_report(model)
    held = live_bytes() - before
    assert abs(report.state_bytes / held - 1) < 0.01, (report.categories, held)
    assert sum(report.categories.values()) == report.state_bytes
    assert set(report.categories) == set(CATEGORIES)
    # Unit by unit it is the same but for the optimizer's step counts.
    by_unit = sum(u.parameters + u.unsharded + u.gradients + u.optimizer for u in report.units)
    assert 0 <= report.state_bytes - by_unit <= 64, (report.state_bytes, by_unit)
    assert [unit.name for unit in report.units] == [unit.name for unit in engine.units]
    assert report.host_rss > report.state_bytes
    assert "model state" in str(report) and json.dumps(report.to_dict())


def test_an_ordinary_model_has_no_report():
    with pytest.raises(ValueError, match="Linear is not prepared by hf_zero"):
        hf_zero.memory_report(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_the_trainer_compares_with_the_plan(tmp_path, stage):
    trainer = make_trainer("llama", stage, tmp_path, model=build(hidden=128), zero_memory_report=True)
    trainer.train()
    folder, rank = tmp_path / "zero_memory", dist.get_rank()
    lines = [json.loads(line) for line in (folder / f"memory_rank{rank}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["rank"] == rank and line["state_bytes"] > 0 and line["host_rss"] > 0 for line in lines)
    assert lines[1]["peak"] > lines[1]["state_bytes"] and [line["peak"] is None for line in lines].count(False) == 1
    if rank == 0:
        found = json.loads((folder / "memory_comparison.json").read_text())
        assert abs(found["measured_resident"] / found["predicted_resident"] - 1) < 0.01, found
        assert abs(found["measured_peak"] / found["predicted_peak"] - 1) < 0.10, found
        assert (found["stage"], found["world_size"]) == (stage, 2)
    # Planning has left the model as it was.
    trainer.evaluate()


@pytest.mark.parametrize("calls_the_original", [False, True])
@distributed(world_size=2)
def test_a_model_whose_forward_was_replaced_is_compared_or_left_out_and_never_called(tmp_path, calls_the_original):
    """TRL's trainers put a function around `forward` that knows the model: a copy of it calls the original."""
    model = build(hidden=128)
    original = model.forward

    @functools.wraps(type(model).forward)
    def replaced(self, *args, fused=False, **kwargs):
        if fused and not calls_the_original:
            return type(self).forward(self, *args, **kwargs)
        return original(*args, **kwargs)

    model.forward = types.MethodType(replaced, model)
    trainer = make_trainer("llama", 3, tmp_path, model=model, zero_memory_report=True, max_steps=2)
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *args, **kwargs: compute_loss(
        model, {**inputs, "fused": True}, *args, **kwargs
    )
    trainer.train()
    (report,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ZeroMemoryCallback))
    assert (report.comparison is None) == (calls_the_original or dist.get_rank() > 0)


def test_measuring_a_peak_writes_nothing_to_stderr():
    code = """
import torch
from hf_zero.tools.memory import measure_peak

older = torch.ones(1 << 20)
with measure_peak(torch.nn.Linear(2, 2)) as peak:
    new = torch.ones(1 << 20)
    del older
assert peak.value >= 1 << 22, peak.value
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
