"""What the launcher starts: ranks, environment, refusals. No process is started here; see test_launcher_ranks.py."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from hf_zero import cli
from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroConfigError, ZeroLaunchError
from hf_zero.launcher import hook
from hf_zero.launcher.arguments import parse_command
from hf_zero.launcher.environment import (
    CommandLine,
    check_ranks_started,
    exported,
    launch_arguments,
    prepare_rank_environment,
    resolve_from_environment,
)
from hf_zero.launcher.start import launch_from_accelerate


RECIPES = Path(__file__).parents[2] / "recipes/accelerate_configs"
CONFIGS = Path(__file__).parents[1] / "data/configs"


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Runs `hf-zero launch`; returns (exit status, what Accelerate's launcher would have started, its environment)."""
    import accelerate.commands.config.config_args as config_args
    import accelerate.commands.launch as accelerate_launch

    started = {}
    monkeypatch.setattr(
        accelerate_launch, "multi_gpu_launcher", lambda args: started.update(args=args, environ=dict(os.environ))
    )
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "HF_ZERO_")):
            monkeypatch.delenv(name)
    for module in (config_args, accelerate_launch):
        monkeypatch.setattr(module, "default_config_file", str(tmp_path / "default_config.yaml"))

    def run(*argv):
        started.clear()
        status = cli.main(["launch", *map(str, argv)])
        return status, started.get("args"), started.get("environ", {})

    return run


def _config(environ):
    return ZeroConfig.from_json(environ["HF_ZERO_CONFIG"])


@pytest.mark.parametrize(("recipe", "stage"), [("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_a_recipe_starts_torchrun_ranks_with_its_configuration(launched, recipe, stage):
    status, args, environ = launched("--config_file", RECIPES / f"{recipe}.yaml", "--num_processes", 2, "x.py", "--a")
    assert status == 0
    assert (args.num_processes, args.multi_gpu, args.use_deepspeed, args.use_fsdp) == (2, True, False, False)
    assert (args.module, args.training_script, args.training_script_args) == (True, "hf_zero.run", ["x.py", "--a"])
    assert _config(environ).zero_stage == stage
    assert _config(environ).where("zero_stage").startswith(f"{RECIPES / recipe}.yaml:")
    assert args.mixed_precision == "bf16"
    assert "ACCELERATE_USE_DEEPSPEED" not in environ
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environ  # auto: the arguments own it
    assert args.main_process_port == 0 and args.standalone  # never a fixed port


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("trl_zero1.yaml", 1),
        ("trl_zero2.yaml", 2),
        ("trl_zero3.yaml", 3),
        ("trl_multi_gpu.yaml", 0),
        ("trl_fsdp1.yaml", 3),
        ("trl_fsdp2.yaml", 2),
        ("tutorial_zero2.yaml", 2),
        ("tutorial_zero3.yaml", 3),
        ("json_zero3.yaml", 3),
    ],
)
def test_public_files_run_unchanged(launched, file, stage):
    status, args, environ = launched("--config_file", CONFIGS / file, "--num_processes", "2", "x.py")
    assert status == 0
    assert _config(environ).zero_stage == stage
    assert args.num_processes == 2
    assert not any(name.startswith("FSDP_") for name in environ)


def test_numbers_are_exported_and_options_win_over_the_file(launched):
    file = CONFIGS / "tutorial_zero2.yaml"
    _, _, environ = launched("--config_file", file, "x.py")
    assert environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    status, args, environ = launched(
        "--config_file", file, "--zero_stage", 1, "--gradient_accumulation_steps=8", "--mixed_precision", "no", "x.py"
    )
    config = _config(environ)
    assert status == 0
    assert (config.zero_stage, config.gradient_accumulation_steps, config.mixed_precision) == (1, 8, "no")
    assert environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "8"
    assert config.where("zero_stage") == "command line"
    assert config.where("gradient_clipping") == f"{file}:9"
    assert args.mixed_precision == "no"


@pytest.mark.parametrize(
    "option, words", [("--module", (True, "hf_zero.run", ["-m", "x", "--a"])), ("--no_python", (None, "x", ["--a"]))]
)
def test_modules_get_the_front_module_too_and_other_programs_do_not(launched, option, words):
    _, args, _ = launched("--config_file", RECIPES / "zero2.yaml", option, "x", "--a")
    assert (args.module, args.training_script, args.training_script_args) == words


def test_the_launchers_own_environment_is_restored(launched):
    launched("--config_file", CONFIGS / "tutorial_zero2.yaml", "x.py")
    assert "HF_ZERO_CONFIG" not in os.environ


@pytest.mark.parametrize("set_by_user", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_a_devices_memory_may_grow_unless_the_user_says_otherwise(set_by_user, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if set_by_user:
        monkeypatch.setenv(set_by_user, "max_split_size_mb:128")
    found = {name for name in exported(ZeroConfig(), use_cpu=False) if "ALLOC_CONF" in name}
    assert found == (set() if set_by_user else {"PYTORCH_ALLOC_CONF"})
    assert not any("ALLOC_CONF" in name for name in exported(ZeroConfig(), use_cpu=True))


def test_a_stale_deepspeed_variable_never_reaches_the_ranks(launched, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    _, _, environ = launched("--config_file", RECIPES / "zero2.yaml", "x.py")
    assert "ACCELERATE_USE_DEEPSPEED" not in environ


def test_multi_cpu_and_cpu_really_start_all_ranks_on_cpu(launched, tmp_path):
    file = tmp_path / "cpu.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n")
    for argv in (["--config_file", file], ["--cpu", "--num_processes", 3]):
        status, args, environ = launched(*argv, "x.py")
        assert status == 0
        assert (args.num_processes, args.multi_gpu, environ["ACCELERATE_USE_CPU"]) == (3, True, "true")
        assert environ["THP_MEM_ALLOC_ENABLE"] == "1", "released and gathered weights want huge pages"


def test_without_a_file_options_decide(launched):
    _, args, environ = launched("--num_processes", 2, "x.py")
    assert _config(environ).zero_stage == 0
    _, args, environ = launched("--use_deepspeed", "--num_processes", 2, "x.py")
    assert _config(environ).zero_stage == 2
    _, args, environ = launched("--zero_stage", 3, "--num_processes", 2, "x.py")
    assert (_config(environ).zero_stage, args.num_processes) == (3, 2)
    _, args, environ = launched(
        "--use_fsdp", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--num_processes", 2, "x.py"
    )
    assert _config(environ).zero_stage == 2
    json_file = CONFIGS / "zero3_auto.json"
    _, args, environ = launched("--use_deepspeed", "--deepspeed_config_file", json_file, "--num_processes", 2, "x.py")
    assert _config(environ).stage3_max_live_parameters == 10**9


def test_accelerate_has_nothing_to_warn_of(launched, caplog):
    for words in (["--num_processes", 2], ["--config_file", RECIPES / "zero2.yaml"], ["--cpu"], []):
        status, args, _ = launched(*words, "x.py")
        assert status == 0
        assert (args.num_machines, args.dynamo_backend) == (1, "no")
    assert "were not passed" not in caplog.text, caplog.text


def test_the_default_file_is_used_without_config_file(launched, tmp_path):
    (tmp_path / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config:\n  zero_stage: 1\n"
    )
    status, args, environ = launched("x.py")
    assert (status, args.num_processes, _config(environ).zero_stage) == (0, 2, 1)


def test_cores_are_shared_unless_the_user_decides(launched, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    _, args, _ = launched("--cpu", "--config_file", RECIPES / "zero2.yaml", "--num_processes", 2, "x.py")
    assert args.num_cpu_threads_per_process == 4
    _, args, _ = launched("--cpu", "--num_cpu_threads_per_process", 3, "--num_processes", 2, "x.py")
    assert args.num_cpu_threads_per_process == 3


def test_two_machines_need_a_meeting_place_and_keep_it(launched):
    file = RECIPES / "zero2.yaml"
    both = ("--config_file", file, "--num_processes", 4, "--num_machines", 2)
    status, args, _ = launched(
        *both, "--machine_rank", 1, "--main_process_ip", "10.0.0.1", "--main_process_port", 29511, "x.py"
    )
    assert status == 0
    assert (args.main_process_ip, args.main_process_port, int(args.machine_rank)) == ("10.0.0.1", 29511, 1)
    assert not getattr(args, "standalone", False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num_machines", 2, "--num_processes", 4], ["main_process_ip and main_process_port not set"]),
        (
            ["--num_machines", 2, "--num_processes", 3, "--main_process_ip", "a", "--main_process_port", 1],
            ["num_processes is 3", "num_machines 2"],
        ),
        (
            ["--num_machines", 2, "--num_processes", 4, "--machine_rank", 2, "--main_process_ip", "a"]
            + ["--main_process_port", 1],
            ["machine_rank is 2: expected 0 to 1"],
        ),
        (
            ["--num_machines", 2, "--num_processes", 4, "--deepspeed_multinode_launcher", "pdsh"],
            ["'pdsh'", "'standard'", "--machine_rank"],
        ),
        (["--mpirun_hostfile", "hosts"], ["mpirun_hostfile", "torchrun"]),
        (["--zero_stage", 7], ["zero_stage is 7 (command line)"]),
        (["--num_processes", 0], ["num_processes is 0"]),
        (["--offload_param_device", "nvme"], ["without offload_param_nvme_path"]),
    ],
)
def test_what_cannot_start_is_refused_with_the_fix(launched, capsys, options, words):
    status, args, _ = launched("--config_file", RECIPES / "zero3.yaml", *options, "x.py")
    assert (status, args) == (2, None)
    error = capsys.readouterr().err
    assert error.startswith("hf-zero launch: ")
    for word in words:
        assert word in error


def test_a_bad_file_is_an_error_before_anything_starts(launched, capsys, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stag: 3\n")
    assert launched("--config_file", file, "x.py")[:2] == (2, None)
    assert f"{file}:4: unknown key 'deepspeed_config.zero_stag'" in capsys.readouterr().err
    assert launched("--config_file", tmp_path / "none.yaml", "x.py")[:2] == (2, None)
    assert "there is no such file" in capsys.readouterr().err


def test_a_deepspeed_json_is_no_config_file(launched, capsys):
    assert launched("--config_file", CONFIGS / "zero3_auto.json", "x.py")[:2] == (2, None)
    assert "--deepspeed_config_file instead of --config_file" in capsys.readouterr().err


def test_the_stand_in_says_one_line_and_starts_the_ranks(launched, capsys):
    from accelerate.commands.launch import _validate_launch_command

    argv = ["--config_file", str(RECIPES / "zero3.yaml"), "--num_processes", "2", "x.py"]
    args, _, _ = _validate_launch_command(parse_command(argv))
    launch_from_accelerate(args, "asked")
    assert capsys.readouterr().out.count("\n") == 1
    args.num_machines, args.deepspeed_multinode_launcher = 2, "pdsh"
    with pytest.raises(SystemExit) as left:
        launch_from_accelerate(args, "asked")
    out, error = capsys.readouterr()
    assert (left.value.code, out) == (2, "") and error.startswith("hf_zero: deepspeed_multinode_launcher is 'pdsh'")


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
