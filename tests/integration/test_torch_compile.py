"""TrainingArguments' torch_compile and accelerate's dynamo_backend compile layers, and train what eager DDP does."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

import hf_zero
from hf_zero.errors import ZeroConfigError
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.reference import SGD
from tests.support.trainers import compare_weights, forget_accelerate, train


# Compilation takes its time on a busy machine.
TIMEOUT = 1200
NEEDS_CXX = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for CPU with g++")


class _Graphs(TrainerCallback):
    """How many graphs there are after each step."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, args, state, control, **kwargs):
        self.counts.append(counters["stats"]["unique_graphs"])


def _run(folder, stage, **arguments):
    torch.compiler.reset()
    counters.clear()
    graphs = _Graphs()
    log, weights = train("llama", stage, folder, others={"callbacks": [graphs]}, **arguments)
    return log, weights, graphs.counts, dict(counters["graph_break"])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_CXX)])
def test_the_trainer_compiles_layers_once_and_without_breaks(tmp_path, backend):
    stages = (2, 3) if backend == "aot_eager" else (3,)
    stock, stock_weights, *_ = run_ranks(_run, tmp_path / "stock", None)[0]
    for stage in stages:
        arguments = {"torch_compile": True, "torch_compile_backend": backend}
        log, weights, graphs, breaks = run_ranks(_run, tmp_path / str(stage), stage, timeout=TIMEOUT, **arguments)[0]
        losses = [[entry["loss"] for entry in one if "loss" in entry] for one in (log, stock)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5, rel=0), f"stage {stage}"
        compare_weights(weights, stock_weights, f"stage {stage}", tolerance=1e-4)  # Adam on what rounds otherwise
        assert not breaks, breaks
        assert len(graphs) > 3 and graphs[0] > 0 and set(graphs[1:]) == {graphs[1]}, graphs


def _accelerator():
    forget_accelerate()
    plugin = hf_zero.ZeroPlugin(zero_stage=3)
    return hf_zero.ZeroAccelerator(cpu=True, dynamo_backend="aot_eager", zero_plugin=plugin)


@distributed(world_size=2, timeout=TIMEOUT)
def test_accelerates_setting_compiles_layers_in_place():
    accelerator = _accelerator()
    model = zoo.build("llama")
    names = [name for name, _ in model.named_parameters()]
    prepared, optimizer = accelerator.prepare(model, SGD(model.parameters()))
    assert prepared is model and [name for name, _ in model.named_parameters()] == names
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert {"model.layers.0", "model.layers.1"} <= compiled and "" not in compiled, compiled
    counters.clear()
    accelerator.backward(model(**zoo.batch("llama", 0, 0)).loss)
    optimizer.step()
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]


@distributed(world_size=2)
def test_a_model_without_layers_is_refused_before_anything_is_compiled():
    accelerator = _accelerator()
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ZeroConfigError, match="Linear has none: leave the setting out"):
        accelerator.prepare(model, SGD(model.parameters()))
    assert not counters["stats"]["unique_graphs"]
    assert type(model.weight) is torch.nn.Parameter and model._compiled_call_impl is None
