"""The checkpoint benchmark measures what it says: whole states are saved and loaded, ratios and goals follow."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import LIMIT, run_ranks


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import benchmark_checkpoint  # noqa: E402
import benchmark_checkpoint_systems as systems  # noqa: E402
from benchmark_checkpoint import Figures, goals, parse_arguments, tables  # noqa: E402
from benchmark_systems import Case, build_model  # noqa: E402


STATE, WEIGHTS = systems.STATE, systems.WEIGHTS
CASE = Case(system="", size="tiny", precision="fp32", accumulation=1, rows=1, length=16)


def figures(*seconds, nbytes=1000, **more):
    """Rounds of these lengths, and the one that measures memory."""
    timed = [Figures(seconds=one, nbytes=nbytes, **more) for one in seconds]
    return [*timed, Figures(seconds=99.0, nbytes=nbytes, read=10**6)]


def made_up():
    """Round 1 is disturbed; the ratios within rounds are what they are."""
    found = {
        (STATE, "hf_zero"): {"save": figures(1.0, 9.0, 1.0), "load": figures(2.0, 2.0, 2.0, read=255)},
        (STATE, "slow"): {"save": figures(9.0, 81.0, 9.0), "load": figures(1.0, 1.0, 1.0)},
        (STATE, "fast"): {"save": figures(4.0, 36.0, 4.0)},
        (STATE, "raw, O_DIRECT"): {"save": figures(0.5, 4.5, 0.5), "load": figures(1.0, 1.0, 1.0, nbytes=500)},
        (STATE, "raw, page cache"): {"save": figures(0.9, 8.1, 0.9), "load": figures(1.9, 1.9, 1.9)},
        (WEIGHTS, "hf_zero"): {"save": figures(1.0), "load": figures(1.0, read=256)},
        (WEIGHTS, "raw, O_DIRECT"): {"save": figures(0.85), "load": figures(0.5)},
    }
    return {key: dict(value) for key, value in found.items()}


def test_goals_compare_with_the_fastest():
    reached = {name: (round(value, 3), met) for name, value, _, met in goals(made_up(), ranks=4)}
    assert reached == {
        "save, training state: share of the raw rate": (0.5, False),
        "save, training state: times as fast as the fastest peer": (4.0, True),
        # The bare read took half the time for half the bytes: the same rate. The other one was a little faster.
        "load, training state: share of the raw rate": (0.95, True),
        "load, training state: times the fastest peer's time": (2.0, False),
        "load, training state: bytes read by a rank, times N": (1.02, True),
        "save, weights only: share of the raw rate": (0.85, True),
        "load, weights only: share of the raw rate": (0.5, False),
        "load, weights only: bytes read by a rank, times N": (1.024, False),
    }


def test_tables_show_medians_and_leave_the_round_of_memory_out():
    text = "\n".join(tables(made_up(), ranks=4))
    saves = text.split("save, training state:\n")[1].split("\n\n")[0]
    assert "| slow | 9.00 | 0 | 0 | 0.11 |" in saves, saves
    assert "fast |" not in text.split("load, training state:\n")[1].split("\n\n")[0], "it has no way to load"
    assert "99.00" not in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--systems", "fsdp2"], "must name hf_zero"),
        (["--size", "7b"], "invalid choice: '7b'"),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        parse_arguments([*argv, "--folder", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_left_alone(capsys, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(SystemExit):
        parse_arguments(["--folder", str(tmp_path)])
    assert "exists already" in capsys.readouterr().err


def test_deepspeed_is_left_out_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(systems, "DEEPSPEED", "a_module_that_is_not_installed")
    assert systems.missing("deepspeed") == "DeepSpeed is not installed"
    assert systems.missing("fsdp2") is None


def measure_all(folder):
    options = argparse.Namespace(size="tiny", systems=["hf_zero", "fsdp2"], rounds=1, folder=folder)
    found = benchmark_checkpoint.run(options)
    assert list(folder.iterdir()) == [], "everything is removed"
    return {key: dict(kinds) for key, kinds in found.items()}


def test_a_round_of_every_way(tmp_path):
    found = run_ranks(measure_all, tmp_path)[0]
    numel = sum(param.numel() for param in build_model("tiny").parameters())
    kinds = {key: sorted(value) for key, value in found.items()}
    both = ["hf_zero", "FSDP2 gathered on rank 0", "raw, O_DIRECT", "raw, page cache"]
    ways = [(STATE, "FSDP2 sharded (DCP)"), *((what, name) for what in (STATE, WEIGHTS) for name in both)]
    assert kinds == dict.fromkeys(ways, ["load", "save"])
    for (what, system), rounds in found.items():
        wanted = (12 if what == STATE else 4) * numel
        for kind, measured in rounds.items():
            assert len(measured) == 2 and all(one.seconds > 0 for one in measured)
            # Headers, step counts, and torch's container formats, which are a lot beside so small a model.
            assert wanted <= measured[0].nbytes < wanted + 700_000, (what, system, kind)
        # Python's own reading (modules, configurations) counts too.
        assert rounds["load"][0].read > wanted / 2, (what, system)


def restore(folder):
    """For each way that holds a training state: the change that training makes is undone by loading."""
    differences = {}
    for name in ("hf_zero", "fsdp2"):
        model = build_model("tiny")
        for way in systems.SYSTEMS[name](model, CASE):
            if way.what != STATE:
                continue
            target = folder / way.system.replace(" ", "-")
            if dist.get_rank() == 0:
                target.mkdir()
            dist.barrier()
            before = _own(name, model)
            way.save(target)
            with torch.no_grad():
                for tensor in _own(name, model, copy=False):
                    tensor.mul_(3)
            changed = _difference(before, _own(name, model))
            way.load(target)
            differences[way.system] = (changed, _difference(before, _own(name, model)))
    return differences


def _own(name, model, copy=True):
    """What this rank keeps of the model's weights."""
    if name == "hf_zero":
        from hf_zero.core.engine import engine_of

        groups = [group for optimizer in engine_of(model).optimizers for group in optimizer.param_groups]
        own = [weight for group in groups for weight in group["params"]]
    else:
        own = [param.to_local() for param in model.parameters()]
    return [tensor.detach().clone() if copy else tensor.detach() for tensor in own]


def _difference(left, right):
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True) if one.numel())


def test_what_is_timed_is_a_whole_load(tmp_path):
    for rank in run_ranks(restore, tmp_path):
        assert len(rank) == 3
        for system, (changed, after) in rank.items():
            assert changed > 0.01 and after == 0, (system, changed, after)


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += ["benchmarks/benchmark_checkpoint.py", "--size", "tiny", "--rounds", "1", "--folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()  # torchrun ends its ranks then; a kill would leave them behind
    assert process.returncode == 0, err
    assert "tiny, 2 ranks" in out and "| FSDP2 sharded (DCP) |" in out
    assert "| hf_zero, stage 3, zero_init |" in out and "save_pretrained, hf_zero, stage 2: times stage 3" in out
    assert "share of the raw rate" in out and "load average before" in out
