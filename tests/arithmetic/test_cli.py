"""The `hf-zero` command: what all of its subcommands have in common."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import hf_zero
from hf_zero import cli
from hf_zero.command_line import CommandParser
from hf_zero.config import values
from tests.support.harness import LIMIT


def test_the_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-zero {hf_zero.__version__}\n"


def test_help_names_every_command_and_a_wrong_one_is_an_error(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS) and "--version" in out
    assert cli.main(["plann"]) == 2
    assert "unknown command 'plann'" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_is_headed_by_its_name(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: hf-zero {command} ")
    assert command != "launch" or "ZeRO: --zero_stage, " in out


@pytest.mark.parametrize(
    "words",
    [["--help"], ["config", "--help"], ["config", "--all", "recipes/accelerate_configs/zero3.yaml"]],
    ids=" ".join,
)
def test_nothing_is_said_where_nobody_reads(words):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "hf_zero.cli", *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    os.close(writes)
    assert done.stderr == ""


def test_options_take_dashes_and_underscores_and_the_rest_is_left_alone():
    parser = CommandParser(rest="--args")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--a-b", action="store_true")
    parser.add_argument("--args", nargs="...", default=[])
    found = parser.parse_args(["--world_size=2", "--a_b", "--args", "--x_y", "--x-y", "x_y"])
    assert (found.world_size, found.a_b, found.args) == (2, True, ["--x_y", "--x-y", "x_y"])
    assert parser.parse_args(["--world-size", "3", "--a-b"]).world_size == 3
    assert parser.parse_args(["--world-size", "3"]).args == []


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--gpu{}memory", "lots", "/nonexistent"],
        ["doctor", "--num{}processes", "1", "--folder", "/nonexistent"],
        ["config", "--world{}size", "2", "/nonexistent.yaml"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("mark", "-_")
def test_every_command_takes_both_spellings(words, mark, capsys):
    assert cli.main([word.format(mark) for word in words]) == 2
    assert "/nonexistent" in capsys.readouterr().err


MISTAKES = {
    "config": ["/nonexistent.yaml"],
    "plan": ["/nonexistent/model"],
    "verify": ["--output", "/dev/null/folder"],
    "doctor": ["--folder", "/nonexistent"],
    "convert": ["/nonexistent/checkpoint", "/nonexistent/target"],
    "launch": ["--config_file", "/nonexistent.yaml", "x.py"],
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_mistake_is_one_message_and_status_2(command, monkeypatch, capsys):
    monkeypatch.delenv("HF_ZERO_TRACEBACK", raising=False)
    assert cli.main([command, *MISTAKES[command]]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"hf-zero {command}: ") and "Traceback" not in error
    assert len(error.splitlines()) == 1 and any(word in error for word in MISTAKES[command])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_word_that_no_command_takes_is_status_2(command):
    with pytest.raises(SystemExit) as left:
        raise SystemExit(cli.main([command, "--no-such-option"]))
    assert left.value.code == 2


def test_a_variable_adds_the_traceback_of_a_mistake_and_bugs_keep_theirs(monkeypatch, capsys):
    command = SimpleNamespace(main=lambda words: values.to_bool("perhaps"))
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: command)
    assert cli.main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("hf-zero plan: ")
    monkeypatch.setenv("HF_ZERO_TRACEBACK", "1")
    assert cli.main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")
    command.main = lambda words: int(words)
    with pytest.raises(TypeError):
        cli.main(["plan"])


def test_a_folder_that_does_not_exist_is_told_before_torch_is_imported():
    code = (
        "import sys; from hf_zero import cli;"
        "status = cli.main(['plan', '/nonexistent']);"
        "sys.exit(10 * status + ('torch' in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], timeout=LIMIT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (20, "hf-zero plan: '/nonexistent' does not exist\n")
