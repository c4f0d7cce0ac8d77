"""The examples run as they stand, and what they promise about restarts holds when a rank is killed."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import transformers
import yaml

from tests.support.harness import LIMIT
from tests.support.launches import ROOT, environment, run, start


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LOOP = ROOT / "examples/plain_loop.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "accelerate_loop"])
def test_the_short_examples_train_as_they_stand(tmp_path, name):
    launch = (sys.executable, "-m", "hf_zero.cli", "launch", "--num_processes", 2)
    ((output,), (status,)) = run((*launch, ROOT / "examples" / f"{name}.py"), folder=tmp_path)
    assert status == 0 and "Writing model shards" not in output, output  # a bar of transformers over no files
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", output)]
    assert losses and losses[-1] < math.log(64), output  # of guessing among 64 tokens
    model = transformers.LlamaForCausalLM
    if name == "trainer":
        assert model.from_pretrained(tmp_path / "outputs/trainer").config.hidden_size == 64
    assert (tmp_path / "outputs" / name / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_cells_of_the_notebook_train_on_two_ranks_and_load_what_was_saved(tmp_path):
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    ((output,), (status,)) = run((sys.executable, script), folder=tmp_path)
    assert status == 0 and "stage 3 on 2 ranks: " in output, output
    trained, loaded = (float(loss) for loss in re.findall(r": loss ([\d.]+)", output))
    assert loaded < trained < math.log(64), output  # the last loss is that before the last step


def test_the_short_examples_are_short():
    for name in ("trainer", "accelerate_loop"):
        code = (ROOT / "examples" / f"{name}.py").read_text().split('"""')[2]
        lines = [line for line in code.splitlines() if line.strip()]
        assert len([line for line in lines if not line.startswith(("import ", "from "))]) <= 12


def _model(folder):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _losses(output):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", output)}


def _is_there(path):
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        if path.exists():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.exhaustive
def test_the_plain_loop_goes_on_at_another_number_of_ranks(tmp_path):
    model, steps = _model(tmp_path / "model"), ("--steps", 40, "--save_steps", 5)
    loop = (*TORCHRUN, "--standalone", "--nproc-per-node")
    ((whole,), (status,)) = run((*loop, 2, LOOP, model, tmp_path / "whole", *steps), folder=tmp_path)
    assert status == 0, whole
    half = (*loop, 2, LOOP, model, tmp_path / "parts", "--steps", 20, "--save_steps", 5)
    assert run(half, folder=tmp_path)[1] == [0]
    ((rest,), (status,)) = run((*loop, 1, LOOP, model, tmp_path / "parts", *steps), folder=tmp_path)
    assert status == 0, rest
    assert _losses(rest)[40] == pytest.approx(_losses(whole)[40], abs=1e-5) and min(_losses(rest)) == 25


@pytest.mark.slow
def test_the_plain_loop_goes_on_after_a_killed_rank(tmp_path):
    model, killed = _model(tmp_path / "model"), tmp_path / "killed"
    loop = (*TORCHRUN, "--standalone", "--nproc-per-node")
    steps = ("--steps", 200, "--save_steps", 5)
    process = start(*loop, 2, LOOP, model, killed, *steps, folder=tmp_path)
    try:
        assert _is_there(killed), "no checkpoint"
        ranks = [child for child in psutil.Process(process.pid).children() if "plain_loop.py" in str(child.cmdline())]
        os.kill(ranks[-1].pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode != 0
    ((rest,), (status,)) = run((*loop, 2, LOOP, model, killed, *steps), folder=tmp_path)
    assert status == 0, rest
    assert 5 < min(_losses(rest)) <= max(_losses(rest)) == 200, rest


@pytest.mark.parametrize("name", ["slurm_torchrun.sh", "slurm_accelerate.sh"])
def test_the_scripts_for_slurm_start_what_is_there(tmp_path, name):
    """With a Slurm of one node that is this machine; the trainer is a script that tells where it runs."""
    (tmp_path / "train.py").write_text(
        "import os\nfrom accelerate import PartialState\n"
        "state = PartialState(cpu=True)\nprint(f'rank {state.process_index} of {state.num_processes}')\n"
    )
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1\n")
    (fake / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    for tool in fake.iterdir():
        tool.chmod(0o755)
    script = (ROOT / "examples/cluster" / name).read_text()
    script = re.sub(r"nproc-per-node 8", "nproc-per-node 2", script).replace("SLURM_NNODES * 8", "SLURM_NNODES * 2")
    script = script.replace("29500", "0").replace("--rdzv-endpoint", "--standalone --rdzv-endpoint")
    script = script.replace("recipes/", f"{ROOT}/recipes/")
    (tmp_path / "job.sh").write_text(script)
    slurm = {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    path = os.pathsep.join([str(fake), os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env=environment(tmp_path) | slurm | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout, done.stdout + done.stderr


# The fields of these types in Kubeflow Trainer's API v1alpha1 (trainjob_types.go) that a user sets.
_TRAIN_JOB = {
    "spec": {
        "runtimeRef",
        "initializer",
        "trainer",
        "runtimePatches",
        "suspend",
        "activeDeadlineSeconds",
        "managedBy",
    },
    "spec.trainer": {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"},
    "patch": {"manager", "trainingRuntimeSpec"},
    "pod": {"serviceAccountName", "volumes", "initContainers", "containers", "imagePullSecrets", "nodeSelector"},
    "container": {"name", "env", "volumeMounts", "securityContext"},
}


def test_the_kubernetes_example_is_a_train_job():
    job = yaml.safe_load((ROOT / "examples/cluster/kubeflow_trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer, (patch,) = job["spec"]["trainer"], job["spec"]["runtimePatches"]
    assert trainer["command"][:3] == ["torchrun", "-m", "hf_zero.run"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = {"spec": job["spec"], "spec.trainer": trainer, "patch": patch, "pod": pod, "container": container}
    assert {name: set(fields) - _TRAIN_JOB[name] for name, fields in found.items()} == dict.fromkeys(found, set())
    assert (node["name"], container["name"]) == ("node", "node"), "of the runtime torch-distributed"
    assert pod["volumes"][0]["name"] == container["volumeMounts"][0]["name"]
    assert trainer["command"][-1].startswith(container["volumeMounts"][0]["mountPath"])
