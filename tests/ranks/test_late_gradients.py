"""Gradients that come late in backward: of parameters read early, of old graphs, of what a checkpoint borrows."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.errors import ZeroRuntimeError
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import Plan, check_stages


def prepare(make, **config):
    model = seeded(make)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, hf_zero.shard(model, optimizer, config)


def _penalty_before_forward(model, batch, backward):
    """Backward comes to what was read before forward after everything else."""
    x, y = batch
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    loss = F.cross_entropy(model(x), y) + 0.1 * penalty
    backward(loss)
    return loss


def _a_weight_read_early(model, batch, backward):
    x, y = batch
    scale = model.layers[2].gain * 2
    loss = F.cross_entropy(model(x) * scale, y)
    backward(loss)
    return loss


def _two_forwards_and_an_old_graph(model, batch, backward):
    """The graph of the first forward outlives a backward pass through the second."""
    x, y = batch
    first = F.cross_entropy(model(x), y)
    backward(F.cross_entropy(model(x.flip(0)), y))
    loss = first + F.cross_entropy(model(x * 0.5), y)
    backward(loss)
    return loss


@pytest.mark.parametrize("way", [_penalty_before_forward, _a_weight_read_early])
@distributed(world_size=2)
def test_a_parameter_that_is_read_before_its_module_is_called(way):
    check_stages(seeded(Net), batches, Plan(accumulation=2), micro=way)
    check_stages(seeded(Net), batches, micro=way, exact=True)


@pytest.mark.parametrize("kind", ["none", "plain", "reentrant"])
@distributed(world_size=2)
def test_a_graph_that_outlives_a_backward_pass(kind):
    check_stages(seeded(_small_checkpointed(kind)), batches, micro=_two_forwards_and_an_old_graph, exact=False)


@pytest.mark.parametrize("kind", ["none", "plain", "reentrant"])
@distributed(world_size=2)
def test_one_backward_pass_through_two_forwards_reduces_once(kind):
    def siamese(model, batch, backward):
        x, _ = batch
        loss = F.mse_loss(model(x), model(x.flip(0)) * 0.5)
        backward(loss)
        return loss

    make = _small_checkpointed(kind)
    check_stages(seeded(make), batches, micro=siamese, exact=True)
    model, engine = prepare(make, zero_stage=2)
    engine.comm.traffic.clear()
    siamese(model, batches(dist.get_rank(), 0), engine.backward)
    assert engine.comm.traffic.calls["reduce_scatter"] == len(engine.units), engine.comm.traffic.calls


def _small_checkpointed(kind):
    class Again(Net):
        def route(self, x):
            for layer in self.layers:
                x = layer(x) if kind == "none" else checkpoint(layer, x, use_reentrant=kind == "reentrant")
            return x

    return Again


class Borrowing(Net):
    """What is recomputed reads a weight of a block that is called later."""

    reentrant = False

    def route(self, x):
        x = checkpoint(lambda h: h * self.layers[2].down.weight.mean(), x, use_reentrant=self.reentrant)
        return super().route(x)


class BorrowingReentrant(Borrowing):
    reentrant = True


@distributed(world_size=2)
def test_a_parameter_that_is_borrowed_inside_a_checkpoint():
    check_stages(seeded(Borrowing), batches, micro=micro)
    # At stage 3 the read is noticed, as the values have to be gathered.
    check_stages(seeded(BorrowingReentrant), batches, micro=micro, stages=(3,))


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_a_gradient_after_its_reduction_is_an_error(stage):
    """Reentrant checkpointing hides what it will compute; nobody can know that this gradient is still to come."""
    model, engine = prepare(BorrowingReentrant, zero_stage=stage)
    x, y = batches(dist.get_rank(), 0)
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(ZeroRuntimeError, match="layers.2.down.weight.*use_reentrant=False"):
        engine.backward(loss)
