"""`hf-zero config`: the table, JSON for machines, all errors at once; and the page that is made from the code."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hf_zero import cli
from hf_zero.config import explain, reference
from hf_zero.config.options import OPTIONS
from tests.support.harness import LIMIT


ROOT = Path(__file__).parents[2]
ZERO3 = ROOT / "recipes/accelerate_configs/zero3.yaml"


def _explain(*argv):
    return cli.main(["config", *map(str, argv)])


def _json(capsys, *argv):
    status = _explain("--json", *argv)
    return status, json.loads(capsys.readouterr().out)


def test_the_table_names_key_value_source_and_effect(capsys):
    assert _explain(ZERO3, "--all", "--hidden_size", 64, "--args", "--gradient_accumulation_steps", 4) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in OPTIONS:
        assert sum(line.split(" ")[0] == name for line in lines) == 1
    (line,) = [line for line in lines if line.startswith("gradient_accumulation_steps")]
    assert " 4 " in line and f"{ZERO3}:11 (auto: command line (gradient_accumulation_steps))" in line


def test_only_what_was_set_is_shown(capsys, tmp_path):
    file = tmp_path / "zero.yaml"
    file.write_text("zero_stage: 3\ngradient_clipping: auto\n")
    assert _explain(file, "--args", "--zero_async_save", "true") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[1:-1]] == ["zero_stage", "gradient_clipping", "async_save"]
    assert lines[-1] == f"{len(OPTIONS) - 3} more settings that nobody has set: --all shows them"


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_of_any_width_shows_whole_words(columns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero.yaml").write_text("zero_stage: 3\nstage3_param_persistence_threshold: 1e4\n")
    text = io.StringIO()
    explain.print_table(
        explain.explain(["zero.yaml"], {}),
        True,
        Console(file=text, width=columns, force_terminal=True, color_system=None),
    )
    out = text.getvalue()
    assert max(map(len, out.splitlines())) <= columns
    words = set(out.split())
    for name, option in OPTIONS.items():
        assert name in words and set(option.help.split()) <= words, name
    assert {"zero.yaml:1", "10000"} <= {word.strip(",") for word in words}


def test_json_for_machines(capsys):
    status, shown = _json(capsys, ZERO3, "--world_size", 2, "--args", "--per_device_train_batch_size=3", "--bf16")
    rows = {row["key"]: row for row in shown["config"]}
    assert status == 0
    assert list(rows) == list(OPTIONS)
    assert rows["zero_stage"]["value"] == 3
    assert rows["train_batch_size"]["value"] == 6
    assert rows["overlap_comm"]["source"] == f"{ZERO3}:13"
    assert rows["no_sync"]["source"] == "default"
    assert shown["notes"] == []


def test_a_training_file_owns_its_values_and_the_command_line_wins_over_it(capsys, tmp_path):
    training = tmp_path / "train.yaml"
    training.write_text("output_dir: out\ngradient_accumulation_steps: 2\nper_device_train_batch_size: 4\n")
    _, shown = _json(capsys, ZERO3, training, "--world_size", 2)
    values = {row["key"]: row["value"] for row in shown["config"]}
    assert (values["gradient_accumulation_steps"], values["train_batch_size"]) == (2, 16)
    _, shown = _json(capsys, ZERO3, training, "--args", "--gradient_accumulation_steps", 8)
    assert {row["key"]: row["value"] for row in shown["config"]}["gradient_accumulation_steps"] == 8


def test_arguments_of_hf_zero_set_what_they_set_in_a_run(capsys, tmp_path):
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text('{"zero_optimization": {"stage": 3, "overlap_comm": false}, "gradient_clipping": 0.5}')
    _, shown = _json(
        capsys, ZERO3, "--args", "--zero-stage", 1, "--zero_param_access=raise", "--zero_no_sync", "local"
    )
    rows = {row["key"]: (row["value"], row["source"]) for row in shown["config"]}
    assert rows["zero_stage"] == (1, "command line")
    assert (rows["param_access"][0], rows["no_sync"][0]) == ("raise", "local")
    for name in ("--zero_config", "--deepspeed"):
        _, shown = _json(capsys, ZERO3, "--args", name, deepspeed)
        rows = {row["key"]: (row["value"], row["source"]) for row in shown["config"]}
        assert rows["overlap_comm"] == (False, f"{deepspeed}:1")
    assert _explain(ZERO3, "--args", "--deepspeed", deepspeed, "--max_grad_norm", 1.0) == 2
    assert "gradient_clipping differs" in capsys.readouterr().err
    assert _explain(ZERO3, "--args", "--deepspeed", deepspeed, "--zero_config", deepspeed) == 2
    assert "both --deepspeed and --zero_config" in capsys.readouterr().err


def test_a_training_file_may_name_the_stage(capsys, tmp_path):
    training = tmp_path / "train.yaml"
    training.write_text("output_dir: out\nzero_stage: 1\n")
    _, shown = _json(capsys, ZERO3, training)
    assert {row["key"]: row["source"] for row in shown["config"]}["zero_stage"] == f"{training}:2"
    _, shown = _json(capsys, ZERO3, training, "--args", "--zero_stage", 2)
    assert {row["key"]: row["value"] for row in shown["config"]}["zero_stage"] == 2


def test_a_training_file_may_stand_among_the_arguments_as_trl_takes_it(capsys, tmp_path):
    training = tmp_path / "train.yaml"
    training.write_text("output_dir: out\nzero_stage: 1\n")
    _, shown = _json(capsys, ZERO3, "--args", "--config", training, "--bf16")
    assert {row["key"]: row["source"] for row in shown["config"]}["zero_stage"] == f"{training}:2"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--zero_stage", 7], "zero_stage is 7 (command line): expected 0 (nothing sharded)"),
        (["--zero_stage", "two"], "command line: zero_stage is 'two': expected a number"),
        (["--zero_stages", 3], "command line: unknown argument --zero_stages; did you mean --zero_stage?"),
        (
            ["--gradient_accumlation_steps", 3],
            "unknown argument --gradient_accumlation_steps; did you mean --gradient_accumulation_steps?",
        ),
        (["--my_own_thing"], "unknown argument --my_own_thing: no training arguments of transformers, TRL or hf_zero"),
        (["--deepspeed", "none.json"], "command line (deepspeed): none.json: there is no such file"),
    ],
)
def test_wrong_arguments_are_errors(words, says, capsys):
    assert _explain(ZERO3, "--args", "--learning_rate", 1e-4, *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error, error


def test_arguments_of_transformers_and_trl_are_known(capsys):
    pytest.importorskip("trl")
    known = ["--learning_rate", 1e-4, "--no_dataloader_pin_memory", "--max_length", 8, "--model_name_or_path", "m"]
    assert _explain(ZERO3, "--args", *known, "--zero_memory_report", "--gather_for_generation", "all") == 0
    capsys.readouterr()


def test_the_arguments_of_hf_zero_are_those_of_its_classes():
    from hf_zero.config import arguments
    from hf_zero.integrations.transformers import ZeroArgumentsMixin

    fields = {field.name for field in dataclasses.fields(ZeroArgumentsMixin)}
    assert fields <= {*arguments.ZERO_ARGUMENTS, *arguments._NAMES_A_FILE, *arguments._WITHOUT_EFFECT}
    assert set(arguments.ZERO_ARGUMENTS) <= fields
    trl = pytest.importorskip("hf_zero.trl")
    for ours in (trl.ZeroSFTConfig, trl.ZeroGRPOConfig):
        own = {name for name in ours.__annotations__ if not name.startswith("_")}
        assert own <= set(arguments._WITHOUT_EFFECT), ours


def test_all_problems_of_all_files_at_once(capsys, tmp_path):
    bad = tmp_path / "ds.json"
    bad.write_text('{"zero_optimization": {"stage": 5, "overlap_com": true}}')
    none = tmp_path / "none.yaml"
    assert _explain(bad, none, "--args", "--gradient_accumulation_steps", "x") == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-zero config: 4 problems in the configuration:")
    for words in (f"{bad}:1: unknown key", "zero_stage is 5", f"{none}: there is no such file", "steps is 'x'"):
        assert words in error
    status, shown = _json(capsys, bad)
    assert (status, len(shown["problems"])) == (2, 2)


def test_a_conflict_names_file_and_line(capsys, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n")
    assert _explain(file, "--args", "--gradient_accumulation_steps", "8") == 2
    assert f"{file}:3" in capsys.readouterr().err


def test_notes_follow_the_table(capsys, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2,\n "contiguous_gradients": false}}')
    assert _explain(file) == 0
    assert f"note: {file}:2: zero_optimization.contiguous_gradients has no effect here" in capsys.readouterr().out


def test_keys_lists_every_table(capsys):
    assert _explain("--keys") == 0
    assert "| `zero_optimization.stage` | honoured |" in capsys.readouterr().out


def test_a_file_is_needed(capsys):
    with pytest.raises(SystemExit) as caught:
        _explain()
    assert caught.value.code == 2


def test_the_page_in_docs_is_up_to_date():
    assert (ROOT / "docs/configuration.md").read_text() == reference.page()


def test_the_check_mode_finds_a_stale_page(tmp_path, capsys, monkeypatch):
    page = tmp_path / "configuration.md"
    monkeypatch.setattr(sys, "argv", ["reference", str(page)])
    assert reference.main() == 0
    monkeypatch.setattr(sys, "argv", ["reference", str(page), "--check"])
    assert reference.main() == 0
    page.write_text(page.read_text() + "more")
    assert reference.main() == 1
    assert "stale" in capsys.readouterr().err


def test_the_command_needs_no_torch():
    code = (
        "import sys; from hf_zero import cli;"
        f"status = cli.main(['config', '--json', {str(ZERO3)!r}, '--args', '--zero_stage', '2', '--bf16']);"
        "sys.exit(status or ('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "name, ranks, expected",
    [
        ("zero2", [], {"parameters": ("none: whole on every rank", "8"), "gradients": ("all 8 ranks", "1")}),
        ("zero3", ["--world-size", "4"], {"states of the optimizer": ("all 4 ranks", "1")}),
        (
            "zero3_hpz",
            [],
            {"parameters": ("8 ranks of a node", "2"), "states of the optimizer": ("all 16 ranks", "1")},
        ),
        ("fsdp_hybrid", [], {"parameters": ("8 ranks of a replica", "2"), "gradients": ("8 ranks of a replica", "2")}),
    ],
)
def test_it_says_over_which_ranks_state_is_shared_out(capsys, name, ranks, expected):
    file = ZERO3.with_stem(name)
    assert _explain(file, "--json", *ranks) == 0
    found = {row["state"]: row for row in json.loads(capsys.readouterr().out)["extents"]}
    for state, (shared, copies) in expected.items():
        assert (found[state]["shared out over"], found[state]["copies"]) == (shared, copies), found
    assert _explain(file, *ranks) == 0
    assert "shared out over" in capsys.readouterr().out


def test_ranks_that_cannot_be_arranged_are_a_problem(capsys, tmp_path):
    file = tmp_path / "nodes.json"
    file.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}')
    assert _explain(file, "--world-size", 4) == 2
    assert "zero_hpz_partition_size is 3" in capsys.readouterr().err
