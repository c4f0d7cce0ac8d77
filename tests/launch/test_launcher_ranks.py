"""Real launches on CPU: every command in which a user may start ranks, and two machines simulated on one.

The exhaustive ones have short forms without ranks in test_launcher.py and test_launch_environment.py, and that of two
machines in test_nodes_recipes.py.
"""

import configparser
import json
import socket
import subprocess
import sys

import pytest

from tests.support import launches
from tests.support.harness import LIMIT
from tests.support.launches import ACCELERATE, HF_ZERO, HOOKS, RECIPES, ROOT, TORCHRUN


pytestmark = pytest.mark.slow

RANK_SCRIPT = """
import json, os, sys
from pathlib import Path
from hf_zero.launcher.environment import check_ranks_started, prepare_rank_environment, resolve_from_environment

check_ranks_started()
prepare_rank_environment()
found = resolve_from_environment()
from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator()
state = accelerator.state
report = {
    "adopted": hasattr(accelerator, "zero_plugin"),
    "rank": state.process_index,
    "world_size": state.num_processes,
    "seen": gather_object([state.process_index]),
    "backend": state.backend,
    "device": state.device.type,
    "stage": found.config.zero_stage,
    "source": found.source,
    "precision": os.environ.get("ACCELERATE_MIXED_PRECISION"),
    "deepspeed": os.environ.get("ACCELERATE_USE_DEEPSPEED"),
    "arguments": sys.argv[2:],
}
Path(sys.argv[1], f"{state.process_index}.json").write_text(json.dumps(report))
state.destroy_process_group()
"""


@pytest.fixture
def launch(tmp_path):
    """Starts commands at the same time, waits, and returns (outputs, exit statuses, the ranks' reports)."""
    script, reports = tmp_path / "rank.py", tmp_path / "reports"
    script.write_text(RANK_SCRIPT)
    reports.mkdir()

    def run(*commands, **variables):
        commands = [(*command, script, reports, "--flag", 1) for command in commands]
        outputs, statuses = launches.run(*commands, folder=tmp_path, **variables)
        return outputs, statuses, [json.loads(file.read_text()) for file in sorted(reports.glob("*.json"))]

    return run


def _check(result, *, stage, ranks=2, source=None):
    outputs, statuses, found = result
    assert statuses == [0] * len(statuses), "\n".join(outputs)
    assert [report["rank"] for report in found] == list(range(ranks))
    for report in found:
        assert report["world_size"] == ranks
        assert report["seen"] == list(range(ranks))
        assert (report["backend"], report["device"]) == ("gloo", "cpu")
        assert report["stage"] == stage
        assert report["adopted"] == ((source or "").startswith("HF_ZERO") and stage > 0)
        assert report["deepspeed"] is None
        assert report["arguments"] == ["--flag", "1"]
        if source is not None:
            assert report["source"].startswith(source)
    return "\n".join(outputs)


def test_the_package_declares_the_hook_and_the_command():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    points = setup["options.entry_points"]
    assert all(f"{name} = {value}" in points["torch.backends"] for name, value in HOOKS.items())
    assert "hf-zero = hf_zero.cli:main" in points["console_scripts"]


@pytest.mark.parametrize("kind", ["MULTI_CPU", pytest.param("MULTI_GPU", marks=pytest.mark.exhaustive)])
def test_hf_zero_launch_starts_ranks_where_stock_lets_them_train_alone(launch, tmp_path, kind):
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: {kind}\nnum_processes: 2\nmixed_precision: bf16\n")
    _check(launch((*HF_ZERO, "--config_file", file)), stage=0, source="HF_ZERO_CONFIG")


def test_the_literal_accelerate_launch_runs_a_deepspeed_yaml(launch):
    command = (*ACCELERATE, "--config_file", RECIPES / "zero3.yaml", "--num_processes", 2)
    output = _check(launch(command), stage=3, source="HF_ZERO_CONFIG")
    assert output.count("DeepSpeed is not installed, hf_zero runs this ZeRO stage 3 job") == 1


def test_the_literal_accelerate_launch_runs_the_ddp_recipe(launch):
    command = (*ACCELERATE, "--config_file", RECIPES / "ddp.yaml", "--num_processes", 2)
    _check(launch(command), stage=0, source="the launcher's command line")


@pytest.mark.parametrize("asked", [pytest.param("0", marks=pytest.mark.exhaustive), "1"])
def test_a_stock_fsdp_launch_is_taken_over_where_it_is_asked_for_and_by_our_classes(launch, tmp_path, asked):
    file = tmp_path / "config.yaml"
    file.write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmain_process_port: 0\n"
        "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    )
    source = "HF_ZERO_CONFIG" if asked == "1" else "the launcher's command line"
    output = _check(launch((*ACCELERATE, "--config_file", file), HF_ZERO_ADOPT=asked), stage=2, source=source)
    assert output.count("hf_zero: HF_ZERO_ADOPT=1, hf_zero runs this ZeRO stage 2 job itself") == int(asked)


@pytest.mark.exhaustive
def test_opting_out_leaves_accelerate_alone(launch):
    command = (*ACCELERATE, "--config_file", RECIPES / "zero3.yaml", "--num_processes", 2)
    (output,), (status,), found = launch(command, HF_ZERO_LAUNCH_HOOK="0")
    assert status != 0 and found == []
    assert "hf_zero runs this" not in output


@pytest.mark.exhaustive
def test_without_the_hook_multi_gpu_on_the_command_line_is_enough(launch):
    command = (*ACCELERATE, "--config_file", RECIPES / "zero2.yaml", "--multi_gpu", "--num_processes", 2)
    _check(launch(command, HF_ZERO_LAUNCH_HOOK="0"), stage=2, source="the launcher's command line")


@pytest.mark.exhaustive
def test_a_stock_launch_that_would_train_alone_is_an_error(launch, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    (output,), (status,), found = launch((*ACCELERATE, "--config_file", file))
    assert status != 0 and found == []
    assert "asked for 2 processes and started one" in output


def test_torchrun_and_python_read_the_file_that_a_variable_names(launch):
    result = launch((*TORCHRUN, "--nproc_per_node", 2), HF_ZERO_CONFIG_FILE=str(RECIPES / "zero1.yaml"))
    _check(result, stage=1, source="HF_ZERO_CONFIG_FILE")


def test_one_process_works(launch):
    _, statuses, (report,) = launch((sys.executable,), HF_ZERO_CONFIG_FILE=str(RECIPES / "zero1.yaml"))
    assert (statuses, report["world_size"], report["stage"]) == ([0], 1, 1)


@pytest.mark.exhaustive
def test_two_machines_on_one(launch):
    """Two launchers, as on two machines, each with two of the four ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = ("--config_file", RECIPES / "zero2.yaml", "--num_processes", 4, "--num_machines", 2)
    meeting = ("--main_process_ip", "127.0.0.1", "--main_process_port", port)
    commands = [(*HF_ZERO, *shared, *meeting, "--machine_rank", rank) for rank in (0, 1)]
    _check(launch(*commands, GLOO_SOCKET_IFNAME="lo"), stage=2, ranks=4, source="HF_ZERO_CONFIG")


@pytest.mark.exhaustive
def test_a_failing_rank_fails_the_launch(launch, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(3)\n")
    (output,), (status,), _ = launch((*HF_ZERO, "--num_processes", 2, script))
    assert status == 1
    assert "hf_zero: rank 0 ended with exit status 3" in output
    assert "Traceback" not in output, output


def test_the_hook_imports_nothing_heavy():
    code = (
        "import sys; import hf_zero.launcher.hook as hook; hook.install();"
        "heavy = {'torch', 'transformers', 'accelerate', 'yaml', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT)
