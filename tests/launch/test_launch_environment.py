"""What a rank finds of its launcher, and when the stand-in for `accelerate launch` acts; nothing is started here."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from hf_zero import cli
from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroConfigError, ZeroLaunchError
from hf_zero.launcher import hook
from hf_zero.launcher.environment import (
    CommandLine,
    check_ranks_started,
    launch_arguments,
    prepare_rank_environment,
    resolve_from_environment,
)


RECIPES = Path(__file__).parents[2] / "recipes/accelerate_configs"
CONFIGS = Path(__file__).parents[1] / "data/configs"


# --- what a rank finds -------------------------------------------------------------------------------------------


def _command(*words, folder=None):
    return CommandLine(argv=("python", "/bin/accelerate", "launch", *map(str, words)), folder=folder)


def test_resolution_order(monkeypatch, tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text("zero_stage: 2\n")
    environ = {
        "HF_ZERO_CONFIG": ZeroConfig.from_any({"zero_stage": 3}).to_json(),
        "HF_ZERO_CONFIG_FILE": str(file),
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    }
    commands = [_command("--config_file", RECIPES / "zero3.yaml", "x.py")]
    sources = []
    for variable in (*environ, None):
        found = resolve_from_environment(environ=environ, commands=commands)
        sources.append((found.config.zero_stage, found.source.split("=")[0].split(" (")[0]))
        environ.pop(variable, None)
    assert sources == [
        (3, "HF_ZERO_CONFIG"),
        (2, "HF_ZERO_CONFIG_FILE"),
        (1, "ACCELERATE_DEEPSPEED_*"),
        (3, "the launcher's command line"),
        (3, "the launcher's command line"),
    ]
    nothing = resolve_from_environment(environ={}, commands=[])
    assert (nothing.source, nothing.launched, nothing.config) == ("defaults", None, ZeroConfig())


def test_explicit_values_win_key_by_key():
    launched = ZeroConfig.from_any(RECIPES / "zero2.yaml")
    found = resolve_from_environment(
        ZeroConfig(zero_stage=3), environ={"HF_ZERO_CONFIG": launched.to_json()}, commands=[]
    )
    assert found.config.zero_stage == 3
    assert found.config.mixed_precision == "bf16"
    assert found.launched == launched
    assert found.source == "arguments, then HF_ZERO_CONFIG"
    assert found.describe() == "hf_zero: ZeRO stage 3, configured by arguments, then HF_ZERO_CONFIG"
    noted = resolve_from_environment({"zero_stage": 2, "contiguous_gradients": False}, environ={}, commands=[])
    assert noted.describe().endswith("configured by arguments (1 note: see `hf-zero config FILE`)")


def test_a_rank_of_a_stock_launcher_reads_its_command_line(tmp_path):
    for words, stage in (
        (["--config_file", "zero3.yaml", "--multi_gpu", "x.py"], 3),
        (["--config_file=zero2.yaml", "--zero_stage", 1, "x.py", "--config_file", "other.yaml"], 1),
        (["--config-file", RECIPES / "ddp.yaml", "x.py"], 0),
    ):
        commands = [CommandLine(argv=("bash",)), _command(*words, folder=str(RECIPES))]
        assert resolve_from_environment(environ={}, commands=commands).config.zero_stage == stage


def test_deepspeed_variables_with_a_json(tmp_path):
    environ = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(CONFIGS / "zero3_auto.json")}
    config = resolve_from_environment(environ=environ, commands=[]).config
    assert (config.zero_stage, config.steps_per_print) == (3, 10)


def test_a_damaged_variable_names_itself():
    for text in ("{", "[]", '{"values": {}}', '{"values": {"zero_stage": 9}, "origins": {}, "notes": []}'):
        with pytest.raises(ZeroConfigError, match="HF_ZERO_CONFIG|zero_stage is 9"):
            resolve_from_environment(environ={"HF_ZERO_CONFIG": text}, commands=[])


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["/v/bin/accelerate", "launch", "x.py"], ["x.py"]),
        (["python3", "/v/bin/accelerate", "launch", "-q", "x.py"], ["-q", "x.py"]),
        (["python", "-m", "accelerate.commands.launch", "x.py"], ["x.py"]),
        (["python", "/s/accelerate/commands/launch.py", "x.py"], ["x.py"]),
        (["accelerate-launch", "x.py"], ["x.py"]),
        (["hf-zero", "launch", "x.py"], ["x.py"]),
        (["accelerate", "config"], None),
        (["python", "launch.py", "x.py"], None),
        (["bash", "-c", "accelerate launch x.py"], None),
        (["torchrun", "x.py"], None),
        ([], None),
    ],
)
def test_launch_commands_are_recognised(argv, arguments):
    assert launch_arguments(argv) == arguments


def test_one_silent_process_is_an_error(tmp_path):
    file = tmp_path / "cpu.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    for words in (["--config_file", file, "x.py"], ["--cpu", "--num_processes", 2, "x.py"]):
        with pytest.raises(ZeroLaunchError, match="asked for 2 processes and started one.*hf-zero launch"):
            check_ranks_started({}, [_command(*words)])
        check_ranks_started({"WORLD_SIZE": "2"}, [_command(*words)])
    check_ranks_started({}, [])
    check_ranks_started({}, [_command("--num_processes", 1, "x.py")])


@pytest.mark.parametrize("other", ["DEEPSPEED", "FSDP"])
def test_rank_environment_takes_over_and_names_the_cpu(monkeypatch, other):
    monkeypatch.setattr("hf_zero.launcher.environment.has_accelerator", lambda: False)
    environ = {f"ACCELERATE_USE_{other}": "true", "LOCAL_RANK": "0"}
    said = prepare_rank_environment(environ)
    assert environ == {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    assert len(said) == 2 and f"from {other}".lower() in said[0].lower()
    assert prepare_rank_environment(environ) == []
    monkeypatch.setattr("hf_zero.launcher.environment.has_accelerator", lambda: True)
    environ = {"LOCAL_RANK": "0"}
    assert prepare_rank_environment(environ) == []
    assert environ == {"LOCAL_RANK": "0"}


# --- the hook ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "variable", "deepspeed", "wanted"),
    [
        (["/v/bin/accelerate", "launch", "x.py"], None, False, True),
        (["/v/bin/accelerate-launch", "x.py"], None, False, True),
        (["/v/bin/trl", "sft", "--accelerate_config", "zero3"], None, False, True),
        (["/v/bin/accelerate", "launch"], "HF_ZERO_LAUNCH_HOOK=0", False, False),
        (["/v/bin/accelerate", "launch"], None, True, False),
        (["/v/bin/accelerate", "launch"], "HF_ZERO_ADOPT=1", True, True),
        (["/v/bin/accelerate", "env"], None, False, False),
        (["train.py", "launch"], None, False, False),
        ([], None, False, False),
    ],
)
def test_the_hook_acts_only_inside_accelerate_launch(monkeypatch, argv, variable, deepspeed, wanted):
    for name in ("HF_ZERO_LAUNCH_HOOK", "HF_ZERO_ADOPT"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "accelerate.commands.launch", raising=False)
    real = importlib.metadata.distribution

    def distribution(name):
        if name != "deepspeed":
            return real(name)
        if deepspeed:
            return object()
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    before = len(sys.meta_path)
    hook.install()
    assert (len(sys.meta_path) == before + 1) is wanted


def test_the_hook_never_raises(monkeypatch):
    def broken():
        raise RuntimeError("broken")

    monkeypatch.setattr(hook, "_is_accelerate_launch", broken)
    hook.install()


def test_usage_and_unknown_commands(capsys):
    assert cli.main(["--help"]) == 0
    assert "launch" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["lunch"]) == 2
    assert "unknown command 'lunch'" in capsys.readouterr().err
