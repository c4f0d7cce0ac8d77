"""After a pass that failed, training goes on with the same gradients at every stage."""

import logging

import pytest
import torch
import torch.distributed as dist

import hf_zero
from tests.support.harness import distributed
from tests.support.nets import Block, Net, batches, micro, seeded
from tests.support.reference import SGD, STAGES, average_gradients, whole_weights


def fail(grad):
    raise torch.OutOfMemoryError("no memory left")


class Failing(Block):
    """Raises in forward while `fails` is set."""

    fails = False

    def forward(self, x):
        if Failing.fails:
            fail(x)
        return super().forward(x)


def prepared(stage):
    model = seeded(lambda: Net(block=Failing))()
    optimizer = SGD(model.parameters())
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage})


def after_micro_batches(numbers):
    """The weights that one step on the sum of these micro-batches gives, without hf_zero."""
    model = seeded(lambda: Net(block=Failing))()
    optimizer = SGD(model.parameters())
    for number in numbers:
        micro(model, batches(dist.get_rank(), number), torch.Tensor.backward)
    average_gradients(model)
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(model, numbers, what):
    for name, weight in after_micro_batches(numbers).items():
        torch.testing.assert_close(whole_weights(model)[name], weight, rtol=0, atol=1e-6, msg=f"{what}: {name}")


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("plain", [False, True])
@distributed(world_size=2)
def test_a_failed_backward_drops_its_window_at_every_stage_and_says_so(plain):
    """`plain`: by `loss.backward()`, of which the engine hears only when the next forward begins."""
    handler = Lines()
    logging.getLogger("hf_zero").addHandler(handler)
    for stage in STAGES:
        model, optimizer, engine = prepared(stage)
        with engine.no_sync():
            micro(model, batches(dist.get_rank(), 0), engine.backward)
            hidden = []
            watch = model.layers[0].register_forward_hook(lambda *args, seen=hidden: seen.append(args[-1]))
            x, y = batches(dist.get_rank(), 1)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            watch.remove()
            hidden[0].register_hook(fail)
            with pytest.raises(torch.OutOfMemoryError):
                (torch.Tensor.backward if plain else engine.backward)(loss)
        if not plain:
            assert not engine.has_gradients, f"stage {stage} keeps the first micro-batch"
        micro(model, batches(dist.get_rank(), 2), engine.backward)
        optimizer.step()
        check(model, [2], f"stage {stage}")
        assert len(handler.lines) == 1 and "hf_zero: a backward pass failed" in handler.lines[0], handler.lines
        handler.lines.clear()


@distributed(world_size=2)
def test_a_failed_forward_keeps_what_was_collected_at_every_stage():
    for stage in STAGES:
        model, optimizer, engine = prepared(stage)
        with engine.no_sync():
            micro(model, batches(dist.get_rank(), 0), engine.backward)
            Failing.fails = True
            with pytest.raises(torch.OutOfMemoryError):
                model(batches(dist.get_rank(), 1)[0])
            Failing.fails = False
        micro(model, batches(dist.get_rank(), 2), engine.backward)
        optimizer.step()
        check(model, [0, 2], f"stage {stage}")


@distributed(world_size=2)
def test_a_backward_that_does_not_begin_keeps_what_was_collected():
    for stage in STAGES:
        model, optimizer, engine = prepared(stage)
        with engine.no_sync():
            micro(model, batches(dist.get_rank(), 0), engine.backward)
            with pytest.raises(RuntimeError, match="does not require grad"):
                engine.backward(torch.ones(()))
        micro(model, batches(dist.get_rank(), 2), engine.backward)
        optimizer.step()
        check(model, [0, 2], f"stage {stage}")
