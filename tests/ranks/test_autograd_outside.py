"""Losses that read weights outside of the modules that own them: fused heads, penalties, borrowed weights."""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import ADAMW, Plan, check_stages


def _fused_head(model, batch, backward):
    """What fused losses do: run the body, then multiply by the weight of the head without calling the head."""
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1]
    logits = hidden @ model.lm_head.weight.t()
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    backward(loss)
    return loss


def _fused_head_in_chunks(model, batch, backward):
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1]
    labels = batch["labels"][:, 1:]

    def part(h, y):
        return F.cross_entropy(F.linear(h, model.lm_head.weight), y, reduction="sum")

    pieces = [checkpoint(part, h, y, use_reentrant=False) for h, y in zip(hidden, labels, strict=True)]
    loss = torch.stack(pieces).sum() / labels.numel()
    backward(loss)
    return loss


class _LateRead(torch.autograd.Function):
    """Multiplies by a weight, and reads the weight again in backward by way of its own saved alias."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ hidden.flatten(0, 1)


def _fused_head_of_its_own(model, batch, backward):
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1]
    logits = _LateRead.apply(hidden, model.lm_head.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    backward(loss)
    return loss


@pytest.mark.parametrize("head", [_fused_head, _fused_head_in_chunks, _fused_head_of_its_own])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@distributed(world_size=2)
def test_a_loss_reads_the_head_outside_its_module(name, head):
    build, draw = functools.partial(zoo.build, name), functools.partial(zoo.batch, name)
    check_stages(build, draw, Plan(accumulation=2), optimizer=ADAMW, micro=head)


@distributed(world_size=2)
def test_a_loss_reads_every_parameter():
    def decayed(model, batch, backward):
        x, y = batch
        loss = F.cross_entropy(model(x), y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
        backward(loss)
        return loss

    check_stages(seeded(Net), batches, micro=decayed)


@distributed(world_size=2)
def test_a_layer_borrows_the_weight_of_another():
    class Borrowing(Net):
        def route(self, x):
            x = super().route(x)
            return x + F.linear(x, self.layers[0].down.weight @ self.layers[2].up.weight)

    check_stages(seeded(Borrowing), batches, micro=micro)
