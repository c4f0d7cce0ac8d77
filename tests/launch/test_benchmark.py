"""The benchmark measures what it says: formulas, ratios, tables, and one real round of every kind of system."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.harness import LIMIT, run_ranks


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import benchmark  # noqa: E402
import benchmark_measure  # noqa: E402
import benchmark_report  # noqa: E402
import benchmark_systems  # noqa: E402
from benchmark_formulas import Traffic, resident_bytes, wire_bytes  # noqa: E402
from benchmark_systems import Case  # noqa: E402


@pytest.mark.parametrize(
    "stage, accumulation, local, expected",
    # Bytes per parameter times N/(N-1), for bf16 weights and fp32 gradients, without units that are kept.
    [(1, 1, False, 6), (1, 4, False, 6), (2, 4, False, 18), (2, 4, True, 6), (3, 1, False, 8), (3, 4, False, 32)],
)
def test_wire_formula(stage, accumulation, local, expected):
    traffic = Traffic(units=[1000], ranks=4, accumulation=accumulation, weight_bytes=2, local=local)
    assert wire_bytes(stage, traffic) == expected * 750


def test_wire_formula_of_ddp_and_of_units_that_are_gathered_once():
    assert wire_bytes(0, Traffic(units=[1000], ranks=2)) == 4000
    kept = Traffic(units=[400, 600], kept=[400], ranks=2)
    assert wire_bytes(3, kept) == (2 * 1000 - 400 + 1000) * 4 // 2


def test_resident_formula():
    assert [resident_bytes(stage, 100, 4, 2) for stage in (0, 1, 2, 3)] == [1400, 500, 500, 300]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--fake_ranks", "-2"], "--fake_ranks must be at least 1"),
        (["--accumulation", "1", "0"], "--accumulation must be at least 1"),
        (["--length", "1"], "--length must be at least 2"),
        (["--size", "7b"], "invalid choice: '7b'"),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(argv)
    assert message in capsys.readouterr().err


def test_unknown_systems_are_named_and_missing_ones_are_left_out(monkeypatch):
    with pytest.raises(SystemExit, match="no system is called 'zero4'"):
        benchmark.choose_systems(benchmark.parse_arguments(["--systems", "ddp", "zero4"]))
    monkeypatch.setattr(benchmark_systems, "DEEPSPEED", "a_module_that_is_not_installed")
    args = benchmark.parse_arguments(["--systems", "ddp", "zero2-local", "deepspeed2"])
    chosen, skipped = benchmark.choose_systems(args)
    assert chosen == ["ddp"]
    assert skipped["deepspeed2"] == "DeepSpeed is not installed"
    assert "one micro-batch" in skipped["zero2-local"]


def record(system, round_, seconds, losses=(2.0, 1.0)):
    phases = dict.fromkeys(benchmark_measure.PHASES, 0.0)
    phases.update({"forward": seconds / 2, "backward": seconds / 2, "step": seconds})
    case = {"system": system, "size": "tiny", "precision": "fp32", "accumulation": 1}
    return {
        "case": {**case, "rows": 1, "length": 10, "device": "cpu"},
        "round": round_,
        "wall": phases,
        "cpu": phases,
        "losses": list(losses),
        "wire_loopback": 500.0,
        "wire_counted": 500.0 if system.startswith("zero") else None,
        "calls": None,
        "elements": 1000,
        "optimizer_floor": None,
        "resident": 6000,
        "transient": 100 if system == "zero3" else 200,
    }


def summary():
    # A busy moment in round 1 slows both systems down: the ratio within the round stays what it is.
    times = {"fsdp2": (2.0, 20.0, 4.0), "zero3": (1.0, 12.0, 1.0), "ddp": (1.0, 1.0, 1.0)}
    records = [record(system, i, t) for system, rounds in times.items() for i, t in enumerate(rounds)]
    for one in records:
        one["losses"][1] += 0.25 if one["case"]["system"] == "zero3" else 0.0
    return benchmark_report.summarise(records, ranks=2)


def test_ratios_are_medians_of_rounds():
    rows = {row["system"]: row for row in summary()}
    assert rows["fsdp2"]["cpu_step"] == 4.0 and rows["fsdp2"]["tokens_per_second"] == 2.5
    assert rows["zero3"]["loss_difference"] == 0.25 and rows["ddp"]["loss_difference"] == 0.0
    assert rows["zero3"]["resident_over_formula"] == 1.0 and rows["fsdp2"]["resident_over_formula"] is None
    reached = {goal["what"]: goal for goal in benchmark_report.goals(summary(), {"fake_ranks": None})}
    assert reached["step CPU time, zero3 over fsdp2"]["ratio"] == 0.5
    assert reached["transient peak, zero3 over fsdp2"]["ratio"] == 0.5
    assert reached["step CPU time, zero3 over fsdp2"]["met"]
    assert not any("deepspeed" in what for what in reached)


def test_tables_and_picture(tmp_path):
    from rich.console import Console

    results = {
        "settings": {"fake_ranks": None, "ranks": 2, "size": "tiny", "rows": 1, "length": 10},
        "summary": summary(),
        "skipped": {"deepspeed3": "DeepSpeed is not installed"},
        "machine": benchmark_report.describe_machine(private_loopback=True),
    }
    console = Console(width=200, file=io.StringIO())
    for table in benchmark_report.tables(results):
        console.print(table)
    text = console.file.getvalue()
    assert "4000.0" in text, "the median step of fsdp2, in ms"
    assert "step CPU time, zero3 over fsdp2" in text and "DeepSpeed is not installed" in text
    benchmark_report.draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def measure_systems(systems, accumulation):
    base, found = benchmark_systems.build_model("tiny"), {}
    for system in systems:
        settings = {"size": "tiny", "precision": "fp32", "accumulation": accumulation, "rows": 1, "length": 8}
        figures = benchmark_measure.measure(base, Case(system=system, **settings), steps=1, with_memory=True)
        found[system] = benchmark_measure.over_ranks(figures)
    return found if dist.get_rank() == 0 else None


def test_a_round_of_every_kind_of_system():
    systems = ("ddp", "zero1", "zero3-local", "zero3-sent", "fsdp2", "fsdp2-keep-local")
    found = run_ranks(measure_systems, systems, 2)[0]
    units = benchmark_report.unit_elements("tiny")
    for system in systems:
        figures = found[system]
        assert figures["losses"] == pytest.approx(found["ddp"]["losses"], abs=1e-5), system
        assert figures["cpu"]["step"] > 0 and figures["transient"] > 0, system
    for system, stage, local in (("zero1", 1, False), ("zero3-local", 3, True), ("zero3-sent", 3, False)):
        traffic = Traffic(units=units[0], kept=units[1], ranks=2, accumulation=2, local=local)
        assert found[system]["wire_counted"] == pytest.approx(wire_bytes(stage, traffic), rel=0.01), system
        held = resident_bytes(stage, found[system]["elements"], 2, 4)
        assert found[system]["resident"] == pytest.approx(held, rel=0.02), system


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "benchmarks/benchmark.py", "--size", "tiny", "--rounds", "1", "--steps", "1"]
    systems = ["ddp", "zero2", *(["zero3-compiled"] if shutil.which("g++") else [])]
    command += ["--length", "8", "--systems", *systems, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["system"] for row in results["summary"]] == systems
    assert {"date", "processor", "cores", "versions", "wire"} <= set(results["machine"])
    assert "zero2" in (tmp_path / "table.txt").read_text() and (tmp_path / "plot.png").exists()
