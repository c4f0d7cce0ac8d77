"""The flags of DeepSpeed's launcher start the same ranks here, and those that cannot are answered with a command."""

import re

import pytest

from hf_zero.config import ZeroConfig
from tests.launch.test_launcher import launched  # noqa: F401 (a fixture)
from tests.support import launches
from tests.support.launches import HF_ZERO, ROOT


EXAMPLE = ROOT / "examples/deepspeed_loop"


def test_flags_of_deepspeed_mean_what_they_mean_there(launched):  # noqa: F811
    json = EXAMPLE / "ds_config.json"
    status, args, environ = launched("--num_gpus=3", "--deepspeed_config", json, "train.py", "--deepspeed", "--lr", 1)
    assert (status, args.num_processes, args.training_script) == (0, 3, "hf_zero.run")
    assert args.training_script_args == ["train.py", "--deepspeed", "--lr", "1"]
    assert ZeroConfig.from_json(environ["HF_ZERO_CONFIG"]).zero_stage == 3
    words = ("--num_gpus", 4, "--num_nodes", 2, "--node_rank", 1, "--master_addr", "node0", "--master_port=29511")
    _, args, environ = launched(*words, "train.py", "--deepspeed", "--deepspeed_config", json)
    assert (args.num_processes, args.num_machines, args.machine_rank) == (8, 2, 1)
    assert (args.main_process_ip, args.main_process_port) == ("node0", 29511)
    assert ZeroConfig.from_json(environ["HF_ZERO_CONFIG"]).zero_stage == 0, "the script names the file itself"
    _, args, _ = launched("--include", "localhost:1,3", "train.py")
    assert (args.gpu_ids, args.num_processes) == ("1,3", 2)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--hostfile", "hosts"], r"--hostfile hosts is for DeepSpeed's own launcher(.|\n)*srun (.|\n)*torchrun "),
        (["--include", "worker-1:0@worker-2:0,1"], r"expected GPUs of this machine, such as localhost:0,1"),
        (["--include", "localhost:0", "--num_gpus", 2], "leave out --num_gpus"),
        (["--num_gpus", 2, "--num_processes", 2], "both say how many ranks"),
        (["--num_gpus", 2, "--num_nodes", 2], "main_process_ip and main_process_port and machine_rank not set"),
    ],
)
def test_what_cannot_start_says_what_to_type(launched, capsys, words, said):  # noqa: F811
    assert launched(*words, "train.py")[:2] == (2, None)
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.slow
def test_the_example_runs_as_its_first_lines_say(tmp_path):
    command = (*HF_ZERO, "--num_gpus", 2, EXAMPLE / "train.py", "--samples", 32, "--deepspeed", "--deepspeed_config")
    (output,), (status,) = launches.run((*command, EXAMPLE / "ds_config.json"), folder=tmp_path)
    assert status == 0, output
    assert re.search(r"epoch 1: step 4, loss \d", output) and "after training: host" in output, output
