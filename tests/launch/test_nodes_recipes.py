"""The launcher files for several machines train the demo, here with two launches of two ranks for two machines."""

import math
import re
import socket
import sys

import pytest
from safetensors import safe_open

from tests.arithmetic.test_demo_data import ROOT
from tests.support.demo_recipe import write_small_recipe
from tests.support.launches import ACCELERATE, RECIPES, run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's model with little data, and three steps of two micro-batches to be made with it."""
    folder = tmp_path_factory.mktemp("demo")
    path = write_small_recipe(folder, gradient_accumulation_steps=2, per_device_train_batch_size=2, do_eval=False)
    (output,), (status,) = run((sys.executable, ROOT / "scripts/prepare_demo.py", "--config", path), folder=folder)
    assert status == 0, output
    return path


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
# Bytes from one node to the other for each parameter and step, by each of four ranks: w and g of bf16 weights and fp32
# gradients; replicas send every micro-batch, and all of it to and fro over the two of them.
@pytest.mark.parametrize(
    "name, sent",
    [
        ("zeropp", 2 * (1 + 2 / 256) / 4),
        pytest.param("zero3_hpz", (2 + 4) / 4, marks=pytest.mark.exhaustive),
        pytest.param("fsdp_hybrid", 2 * 4 / 2, marks=pytest.mark.exhaustive),
    ],
)
def test_two_machines_of_two_ranks_train_the_demo(demo, tmp_path, name, sent):
    launch = (*ACCELERATE, "--config_file", RECIPES / f"{name}.yaml", "--num_processes", 4)
    launch += ("--main_process_port", _free_port())
    script = (ROOT / "scripts/sft.py", "--config", demo, "--output_dir", tmp_path / "sft")
    outputs, statuses = run(*((*launch, "--machine_rank", rank, *script) for rank in (0, 1)), folder=tmp_path)
    assert statuses == [0, 0], "\n".join(outputs)
    assert "train_loss" in outputs[0], outputs[0]
    with safe_open(tmp_path / "sft/model.safetensors", "pt") as file:
        numel = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118

    def logged(what):
        return [float(found) for found in re.findall(rf"zero/{what}'?: '?([\d.e+-]+)", outputs[0])]

    traffic = logged("bytes_between_nodes_per_step")
    assert traffic, outputs[0]
    for found in traffic:
        assert found == pytest.approx(sent * numel, rel=0.02), (found / numel, sent)
    errors = {kind: logged(f"quantised_{kind}_error") for kind in ("weights", "gradients")}
    if name != "zeropp":
        assert not any(errors.values())
        return
    assert errors["weights"] and max(errors["weights"]) <= 0.01, errors
    assert errors["gradients"] and max(errors["gradients"]) <= 0.02, errors
