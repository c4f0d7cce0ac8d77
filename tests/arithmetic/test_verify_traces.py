"""What `hf-zero verify SCRIPT` says of two traced runs: nothing where they agree, the first difference otherwise."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import save_file

from hf_zero.errors import ZeroLaunchError
from hf_zero.verify.script import TracedRun, compare_traces


NAMES = {"embed.weight": (6, 4), "layer.weight": (4, 4), "layer.bias": (4,), "old.weight": (3,)}
RANKS, STEPS, MICRO = 2, 2, 3


def _run():
    """What two ranks note in two steps of three micro-batches; 'old.weight' is frozen."""
    draw = torch.Generator().manual_seed(0)
    rank = {
        "system": "stock classes",
        "stage": None,
        "precision": "no",
        "codec": 0.0,
        "sharing": 1,
        "cutting": 1,
        "parts": False,
        "trained": {name: name != "old.weight" for name in NAMES},
        "steps": STEPS,
        "losses": [[step, 4.0 - step - 0.1 * n] for step in range(STEPS) for n in range(MICRO)],
        "inputs": [[step, f"{step}/{n}"] for step in range(STEPS) for n in range(MICRO)],
        "options": {f"{s}:{n}": {"lr": 1e-3, "weight_decay": 0.0} for s in range(STEPS) for n in list(NAMES)[:3]},
    }
    values = []
    for _ in range(STEPS):
        found = {f"weight:{name}": torch.randn(shape, generator=draw) for name, shape in NAMES.items()}
        found |= {f"gradient:{name}": torch.randn(NAMES[name], generator=draw) for name in list(NAMES)[:3]}
        values.append(found)
    return {"ranks": [copy.deepcopy(rank) for _ in range(RANKS)], "values": values}


def _write(run, folder):
    folder.mkdir()
    for rank, noted in enumerate(run["ranks"]):
        (folder / f"{rank}.json").write_text(json.dumps(noted))
    for step, values in enumerate(run["values"]):
        save_file(values, folder / f"{step}.safetensors")
    return TracedRun.read(folder)


def _compare(mine, right, folder):
    runs = _write(mine, folder / "run"), _write(right, folder / "reference")
    return compare_traces(*runs, script="train.py", settings={"zero_stage": 3})


def _sharded():
    run = _run()
    for noted in run["ranks"]:
        noted["system"], noted["stage"] = "hf_zero, stage 3", 3
    return run


def test_runs_that_agree_but_for_rounding_are_certified(tmp_path):
    run = _sharded()
    run["ranks"][1]["losses"][4][1] += 1e-6
    run["values"][0]["gradient:layer.weight"] *= 1 + 1e-6
    found = _compare(run, _run(), tmp_path)
    assert found.holds and found.micro_batches == MICRO, found.lines()
    assert "hf_zero, stage 3, beside stock classes" in found.page()


def _scale(run, factor):
    for name in list(NAMES)[:3]:
        run["values"][0][f"gradient:{name}"] *= factor


def _set(run, rank, kind, at, value):
    run["ranks"][rank][kind][at][1] = value


FAULTS = {
    "scaled": (lambda run: _scale(run, 2), "gradients, clipped", "2 times what it should be: scaled by N"),
    "accumulation": (lambda run: _scale(run, 3), "gradients, clipped", "not divided by the 3 micro-batches"),
    "data": (lambda run: _set(run, 1, "inputs", 4, "0/0"), "data", "rank 1 computes with other data: micro-batch 1"),
    "forward": (lambda run: _set(run, 0, "losses", 0, 3.0), "losses", "rank 0 differs from the first weights on"),
    "stale": (lambda run: _set(run, 0, "losses", 3, 3.1), "losses", "differs though the weights before it agree"),
    "dropped": (lambda run: run["ranks"][1]["losses"].pop(), "losses", "2 micro-batches in a step, and not 3"),
    "rate": (
        lambda run: run["ranks"][0]["options"]["1:layer.bias"].update(lr=2e-3),
        "optimizer settings",
        "lr of 'la",
    ),
    "unfrozen": (
        lambda run: run["ranks"][0]["trained"].update({"old.weight": True}),
        "structure",
        "frozen parameter trained: 'old.weight'",
    ),
    "moved": (
        lambda run: run["values"][1]["weight:old.weight"].add_(0.1),
        "weights",
        "frozen parameter trained: 'old.weight'",
    ),
    "one": (
        lambda run: run["values"][0]["gradient:layer.bias"].mul_(0),
        "gradients, clipped",
        "the gradient of 'layer.bias' is another one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_is_named(fault, tmp_path):
    plant, promise, words = FAULTS[fault]
    run = _sharded()
    plant(run)
    found = _compare(run, _run(), tmp_path)
    assert not found.holds and found.finding.promise == promise, found.lines()
    assert re.search(words, found.finding.cause), found.finding.cause


def test_half_precision_widens_the_bounds_and_a_factor_is_still_seen(tmp_path):
    run = _sharded()
    for noted in run["ranks"]:
        noted["precision"] = "bf16"
    run["ranks"][0]["losses"][0][1] += 0.02
    run["values"][0]["weight:embed.weight"] *= 1 + 2**-9
    assert _compare(run, _run(), tmp_path).holds
    _scale(run, 2)
    (tmp_path / "again").mkdir()
    assert "scaled by N" in _compare(run, _run(), tmp_path / "again").finding.cause


def test_a_script_that_sets_its_own_stage_or_trains_nothing_is_refused(tmp_path):
    with pytest.raises(ZeroLaunchError, match="trained by hf_zero, stage 3: it names a configuration itself"):
        _compare(_sharded(), _sharded(), tmp_path)
    run = _run()
    for noted in run["ranks"]:
        noted["steps"] = 0
    (tmp_path / "idle").mkdir()
    with pytest.raises(ZeroLaunchError, match="has made no optimizer step"):
        _compare(run, _run(), tmp_path / "idle")


def test_what_a_codec_has_rounded_is_no_fault_and_what_it_has_not_is_one(tmp_path):
    for number, (codec, factor, holds) in enumerate([(0.05, 1.02, True), (0.0, 1.02, False), (0.05, 2.0, False)]):
        mine = _sharded()
        for noted in mine["ranks"]:
            noted["codec"] = codec
        mine["values"][0]["gradient:layer.weight"] *= factor
        folder = tmp_path / str(number)
        folder.mkdir()
        found = _compare(mine, _run(), folder)
        assert found.holds == holds, found.lines()
        assert holds or found.finding.where == "layer.weight", found.finding


@pytest.mark.parametrize(("sharing", "cutting"), [(2, 1), (1, 2)])
def test_ranks_that_share_batches_are_compared_with_the_rank_that_has_them_alone(tmp_path, sharing, cutting):
    """Shares of a sequence's loss are added up; parts of a sequence are other data, and no fault."""
    shared, alone = _run(), _run()
    for rank, noted in enumerate(alone["ranks"]):
        noted["losses"] = [[step, loss + rank] for step, loss in noted["losses"]]
        noted["inputs"] = [[step, f"{rank}:{value}"] for step, value in noted["inputs"]]
    shared["ranks"] = [copy.deepcopy(alone["ranks"][rank // 2]) for rank in range(2 * RANKS)]
    for rank, noted in enumerate(shared["ranks"]):
        noted |= {"stage": 3, "sharing": sharing, "cutting": cutting, "parts": cutting > 1}
        if cutting > 1:
            noted["losses"] = [[step, loss * (0.25, 0.75)[rank % 2]] for step, loss in noted["losses"]]
            noted["inputs"] = [[step, f"part {rank % 2} of {value}"] for step, value in noted["inputs"]]
    (tmp_path / "again").mkdir()
    assert _compare(shared, alone, tmp_path).holds
    shared["ranks"][3]["losses"][0][1] += 0.5
    found = _compare(shared, alone, tmp_path / "again")
    assert not found.holds and found.finding.promise == "losses"
