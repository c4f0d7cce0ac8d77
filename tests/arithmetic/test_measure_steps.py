"""Step times that are taken in parts: which settings come first, what is not taken twice, what is made of rounds."""

import json
import sys
from dataclasses import asdict
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import measure_steps  # noqa: E402
from benchmark_operations import waits  # noqa: E402
from measure_steps import all_settings, step_seconds, take  # noqa: E402

from hf_zero.planning.enqueued import Mark, Move, Wait  # noqa: E402
from tests.support.machines import plain_machine  # noqa: E402


AXES = (["33m", "125m"], [2, 4], ["fp32", "bf16"], [1, 4], ["zero0", "zero1", "zero2", "zero3"])


def test_the_first_settings_are_a_sample_of_all():
    settings = all_settings(*AXES)
    assert len(set(settings)) == 64 and settings == all_settings(*AXES)
    for name, values in zip(("size", "ranks", "precision", "accumulation", "system"), AXES, strict=True):
        assert {getattr(setting, name) for setting in settings[:16]} == set(values)


def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    settings = all_settings(["33m"], [2, 4], ["fp32"], [1], ["zero2", "zero3"])
    file, asked = tmp_path / "steps.jsonl", []

    def spawn(body, args, ranks):
        missing, round_ = args[:2]
        assert {setting.ranks for setting in missing} == {ranks}
        asked.append((ranks, round_, len(missing)))
        with open(file, "a") as records:
            taken = {"setting": asdict(missing[0]), "round": round_, "wall": {"step": 1.0 + round_}}
            disturbed = {"setting": asdict(missing[-1]), "round": round_, "wall": {"step": 9.0}, "others": 0.5}
            records.writelines(json.dumps(record) + "\n" for record in (disturbed, taken))

    monkeypatch.setattr(measure_steps.multiprocessing, "spawn", spawn)
    take(settings, file, rounds=1, steps=1, minutes=0)
    assert not asked
    take(settings, file, rounds=2, steps=1, minutes=60)
    assert asked == [(2, 0, 2), (4, 0, 2), (2, 1, 2), (4, 1, 2)]
    asked.clear()
    take(settings, file, rounds=2, steps=1, minutes=60)
    assert asked == [(2, 0, 1), (4, 0, 1), (2, 1, 1), (4, 1, 1)]
    asked.clear()
    take(settings, file, rounds=2, steps=1, minutes=60)
    assert not asked
    assert set(step_seconds(settings, file).values()) == {1.5}
    assert step_seconds(settings[:1], file) == {settings[0]: 1.5}


def test_what_only_one_side_waits_for_is_named():
    machine = plain_machine()
    move = Move("all-gather", "a layer", 10**9, (0, 1), "gathers", "messages")
    step = Mark("step")
    text = waits({"all-gather of a layer": 2.0, "all-gather of another": 1.0}, [step, move, Wait(move), step], machine)
    assert "| all-gather of a layer | 2000.00 | 1000.00 |" in text
    assert "Only in the profile: all-gather of another." in text
    assert "Only in the prediction: nothing." in text
