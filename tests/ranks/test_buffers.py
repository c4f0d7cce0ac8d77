"""Buffers that change in training (running statistics) are DDP's: rank 0's, before the first forward of a step."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import WIDTH, Block, Net, batches, seeded
from tests.support.reference import SGD, STAGES, whole_weights


class Normalised(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class Counting(Net):
    """Besides running statistics: buffers of other dtypes, one of its own kind, one that can be made again."""

    def __init__(self):
        super().__init__(block=Normalised)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("moved", torch.tensor([True, False]))
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)

    def route(self, x):
        if self.training:
            self.seen += len(x) + dist.get_rank()
            self.moved.logical_not_()
            self.average.lerp_(x.detach().double().mean(0), 0.3)
            self.scratch += 1
        return super().route(x + self.average.float())


build = seeded(Counting)


def state_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name != "scratch"}


def run(model, forward, backward, no_sync, step):
    """Training with accumulation, evaluations in between: what each forward gave, and the buffers after it."""
    seen = []

    def call(number, train=True):
        model.train(train)
        x, y = batches(dist.get_rank(), number)
        with contextlib.nullcontext() if train else torch.no_grad():
            loss = F.cross_entropy(forward(x), y)
        if train:
            backward(loss)
        seen.append((loss.item(), state_of(model)))

    for window in range(3):
        with no_sync():
            call(3 * window)
            call(3 * window + 1)
        call(3 * window + 2)
        step()
        if window == 1:
            call(20, train=False)
            call(21, train=False)
    call(22, train=False)
    return seen


def stock():
    model = build()
    optimizer = SGD(model.parameters())
    wrapped = DistributedDataParallel(model)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return run(model, wrapped, torch.Tensor.backward, wrapped.no_sync, step), model


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_buffers_and_losses_are_those_of_ddp(stage):
    expected, reference = stock()
    model = build()
    optimizer = SGD(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "no_sync": "local"})

    def step():
        optimizer.step()
        optimizer.zero_grad()

    found = run(model, model, engine.backward, engine.no_sync, step)
    for number, ((loss, buffers), (wanted, wanted_buffers)) in enumerate(zip(found, expected, strict=True)):
        assert loss == wanted, f"call {number}: {loss!r}, not {wanted!r}"
        for name, buffer in wanted_buffers.items():
            assert torch.equal(buffers[name], buffer), f"call {number}: {name} is {buffers[name]}, not {buffer}"
    for name, weight in whole_weights(model).items():
        assert torch.equal(weight, dict(reference.named_parameters())[name]), name


@distributed(world_size=2)
def test_one_message_per_dtype_and_step_and_none_where_nothing_is_kept():
    model = build()
    engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": 3})
    engine.comm.traffic.clear(), engine.comm.traffic.clear()
    x, y = batches(dist.get_rank(), 0)
    for micro_batch in range(4):
        with engine.no_sync() if micro_batch % 2 == 0 else contextlib.nullcontext():
            engine.backward(F.cross_entropy(model(x), y))
    # Two steps; running statistics, counts, flags and the fp64 average have four dtypes.
    assert engine.comm.traffic.calls["broadcast"] == 2 * 4, engine.comm.traffic.calls
    statistics = 3 * 2 * WIDTH * 4 + 3 * 8
    kept = statistics + 8 + 2 + WIDTH * 8
    assert engine.comm.traffic.bytes_sent["broadcast"] == (2 * kept if dist.get_rank() == 0 else 0), (
        engine.comm.traffic.bytes_sent
    )
    with torch.no_grad():
        model(x)
        before = engine.comm.traffic.calls["broadcast"]
        model(x)
    assert engine.comm.traffic.calls["broadcast"] == before, "nothing has changed since the evaluation before"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit"])
@distributed(world_size=2)
def test_models_whose_buffers_are_constants_send_none(name):
    model = zoo.build(name)
    engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": 3})
    engine.comm.traffic.clear()
    for number in range(2):
        engine.backward(model(**zoo.batch(name, dist.get_rank(), number)).loss)
    assert not engine.comm.traffic.calls["broadcast"], [key for key, _ in model.named_buffers()]


@distributed(world_size=2)
def test_the_first_forward_starts_from_rank_0s_buffers():
    model = build()
    model.average.fill_(float(dist.get_rank() + 1))
    model.seen.fill_(dist.get_rank() + 1)
    hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": 1})
    assert (model.average == 1).all() and model.seen == 1, (model.average, model.seen)
