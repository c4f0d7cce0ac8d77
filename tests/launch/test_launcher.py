"""What the launcher starts: ranks, environment, refusals. No process is started here; see test_launcher_ranks.py."""

import os
from pathlib import Path

import pytest

from hf_zero import cli
from hf_zero.config import ZeroConfig
from hf_zero.launcher.arguments import parse_command
from hf_zero.launcher.environment import (
    exported,
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
