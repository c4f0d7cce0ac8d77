"""torch.compile of layers, in both ways in which people write it, trains as DDP does; whole models are refused."""

import functools
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import WIDTH, Block, Net, batches, micro, seeded
from tests.support.reference import ADAMW, SGD, Plan, check_stages, train_zero
from tests.support.trainers import forget_accelerate


# Compilation takes its time on a busy machine.
TIMEOUT = 600


def _by_module(layer, backend):
    layer.compile(backend=backend)


def _by_forward(layer, backend):
    layer.forward = torch.compile(layer.forward, backend=backend)


def _by_wrapping(layer, backend):
    return torch.compile(layer, backend=backend)


WAYS = pytest.mark.parametrize("compile_layer", [_by_module, _by_forward])


def _compiling(build, compile_layer, backend="eager"):
    """The network with compiled layers, before it is prepared."""

    def compiled():
        torch.compiler.reset()
        model = build()
        for index, layer in enumerate(model.layers):
            replaced = compile_layer(layer, backend)
            model.layers[index] = layer if replaced is None else replaced
        return model

    return compiled


@pytest.mark.parametrize("compile_layer", [_by_module, _by_forward, _by_wrapping])
@distributed(world_size=2, timeout=TIMEOUT)
def test_layers_compiled_before_prepare(compile_layer):
    build = _compiling(seeded(Net), compile_layer)
    check_stages(build, batches, Plan(accumulation=2), micro=micro, optimizer=ADAMW)


@WAYS
@distributed(world_size=2, timeout=TIMEOUT)
def test_layers_compiled_after_prepare(compile_layer):
    def compile_once(step, model):
        if step == 0:
            torch.compiler.reset()
            for layer in model.layers:
                compile_layer(layer, "eager")

    check_stages(seeded(Net), batches, micro=micro, optimizer=ADAMW, before_step=compile_once)


@WAYS
@distributed(world_size=2, timeout=TIMEOUT)
def test_a_layer_is_one_graph_and_is_compiled_once(compile_layer):
    """Neither hooks nor released weights are compiled, and the first step sees all that later ones do."""
    torch.compiler.reset()
    graphs = []

    def count(step, model):
        graphs.append(counters["stats"]["unique_graphs"])

    model = _compiling(seeded(functools.partial(Net, 4)), compile_layer)()
    counters.clear()
    config = hf_zero.ZeroConfig(zero_stage=3)
    train_zero(model, SGD, functools.partial(batches, 0), Plan(steps=4), config=config, micro=micro, before_step=count)
    assert not counters["graph_break"], dict(counters["graph_break"])
    # The first graph is of a layer in general; torch may make one more when it sees a second layer.
    assert graphs[0] == 0 and graphs[1] in (1, 2) and set(graphs[1:]) == {graphs[1]}, graphs


@pytest.mark.parametrize("compile_layer", [_by_module, _by_wrapping])
@distributed(world_size=2, timeout=TIMEOUT)
def test_a_decoder_layer_of_transformers_is_one_graph(compile_layer):
    """Those have a forward pass by keyword, and a class of their own for gradient checkpointing."""
    torch.compiler.reset()
    model = zoo.build("llama")
    for index, layer in enumerate(model.model.layers):
        replaced = compile_layer(layer, "aot_eager")
        model.model.layers[index] = layer if replaced is None else replaced
    graphs = []

    def count(step, model):
        graphs.append(counters["stats"]["unique_graphs"])

    counters.clear()
    draw = functools.partial(zoo.batch, "llama", 0)
    train_zero(model, SGD, draw, Plan(steps=4), config=hf_zero.ZeroConfig(zero_stage=3), before_step=count)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert graphs[1] in (1, 2) and set(graphs[2:]) == {graphs[2]}, graphs


class _Borrower(Block):
    def forward(self, x):
        if hasattr(self, "lender"):
            x = x + nn.functional.linear(x, self.lender[0].down.weight[:, :WIDTH])
        return super().forward(x)


def _net_with_a_borrower():
    """The last layer uses the matrix of the first one, too, which is released by then."""
    net = Net(block=_Borrower)
    net.layers[-1].lender = [net.layers[0]]
    return net


@distributed(world_size=2, timeout=TIMEOUT)
def test_a_compiled_layer_reads_the_released_weight_of_another():
    check_stages(_compiling(seeded(_net_with_a_borrower), _by_module), batches, micro=micro)


NEEDS_CXX = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for CPU with g++")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_CXX)])
@distributed(world_size=2, timeout=TIMEOUT)
def test_compilers_that_make_a_backward_of_their_own(backend):
    """Their graphs save the weights, and may sum in another order."""
    build = _compiling(seeded(Net), _by_module, backend)
    check_stages(build, batches, micro=micro, stages=(2, 3), exact=False)


@pytest.mark.parametrize("checkpointing", [False, True])
@distributed(world_size=2, timeout=TIMEOUT)
def test_decoder_layers_of_transformers(checkpointing):
    def build():
        torch.compiler.reset()
        model = zoo.build("llama")
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        return model

    check_stages(build, functools.partial(zoo.batch, "llama"), stages=(1, 3), exact=False)


REFUSAL = r"whole model is not supported.*layer\.compile\(\).*pass the model itself"


def _compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compile_model", [functools.partial(torch.compile, backend="eager"), _compiled_in_place])
@distributed(world_size=2)
def test_a_compiled_model_is_refused_before_anything_is_compiled(compile_model):
    counters.clear()
    for stage in (0, 3):
        with pytest.raises(ValueError, match=REFUSAL):
            hf_zero.shard(compile_model(seeded(Net)()), None, {"zero_stage": stage})
        forget_accelerate()
        accelerator = hf_zero.ZeroAccelerator(cpu=True, zero_plugin=hf_zero.ZeroPlugin(zero_stage=stage))
        model = seeded(Net)()
        with pytest.raises(ValueError, match=REFUSAL):
            accelerator.prepare(compile_model(model), SGD(model.parameters()))
    assert not counters["stats"]["unique_graphs"]


@distributed(world_size=2)
def test_a_prepared_model_refuses_to_be_compiled():
    model = seeded(Net)()
    hf_zero.shard(model, None, {"zero_stage": 3})
    with pytest.raises(ValueError, match=r"whole model is not supported.*layer\.compile\(\)"):
        model.compile(backend="eager")
    model.layers[0].compile(backend="eager")
