"""Half precision: compute in bf16 with fp32 masters gives the same bits at every stage, and those of a plain loop."""

import functools

import pytest
import torch
import torch.distributed as dist

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.reference import ADAMW, OPTIMIZERS, SGD, STAGES, Plan, average_gradients, compare, train_zero


def _train_with_masters(name, make_optimizer, batches, plan):
    """The bf16 mode written out: cast fp32 masters, compute under autocast, sum in fp32, step the masters."""
    masters, model = zoo.build(name), zoo.build(name)
    for p in model.parameters():  # not model.to(): buffers such as rotary frequencies stay in fp32
        p.data = p.data.to(torch.bfloat16)
    optimizer = make_optimizer(masters.parameters())
    losses = []
    for window in plan.windows():
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
        for number in window:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batches(number)).loss
            assert loss.dtype == torch.float32, name
            (loss / len(window)).backward()
            losses.append(loss.item())
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                if p.grad is not None:
                    master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
                    p.grad = None
        for master in masters.parameters():
            if master.grad is not None:
                dist.all_reduce(master.grad)
                master.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().to(torch.bfloat16) for name, p in masters.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "mixtral", "t5", "bert", "vit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@distributed(world_size=2)
def test_bf16_stages_equal_the_written_out_definition(name, optimizer):
    mine = functools.partial(zoo.batch, name, dist.get_rank())
    losses, weights = _train_with_masters(name, OPTIMIZERS[optimizer], mine, Plan())
    for stage in STAGES:
        config = hf_zero.ZeroConfig(zero_stage=stage, mixed_precision="bf16")
        trace = train_zero(zoo.build(name), OPTIMIZERS[optimizer], mine, Plan(), config=config)
        assert trace.losses == losses, f"stage {stage}: {trace.losses} {losses}"
        for key, weight in weights.items():
            assert torch.equal(trace.weights[key], weight), f"stage {stage}: {key}"


@pytest.mark.parametrize("name", zoo.NAMES)
@distributed(world_size=2)
def test_bf16_losses_are_near_those_of_the_stock_loop_under_autocast(name):
    """There the weights are fp32 and so is what they are added to; the rest is the same."""
    mine = functools.partial(zoo.batch, name, dist.get_rank())
    stock = zoo.build(name)
    optimizer, losses = SGD(stock.parameters()), []
    for number in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = stock(**mine(number)).loss
        loss.backward()
        average_gradients(stock)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    config = hf_zero.ZeroConfig(zero_stage=3, mixed_precision="bf16")
    trace = train_zero(zoo.build(name), SGD, mine, Plan(), config=config)
    torch.testing.assert_close(trace.losses, losses, rtol=0, atol=2**-6)


@distributed(world_size=4)
def test_bf16_stages_equal_each_other_under_accumulation_and_clipping():
    """Sums over micro-batches and ranks are made in fp32 in another order, which may flip a bf16 rounding."""
    mine = functools.partial(zoo.batch, "llama_tied", dist.get_rank())
    plan = Plan(accumulation=3, clip=0.3, ragged=True)
    traces = [
        train_zero(
            zoo.build("llama_tied"),
            ADAMW,
            mine,
            plan,
            config=hf_zero.ZeroConfig(zero_stage=stage, mixed_precision="bf16"),
        )
        for stage in STAGES
    ]
    for stage in STAGES[1:]:
        assert traces[stage].losses[:3] == traces[0].losses[:3], f"stage {stage} differs before the first step"
        traces[stage].norms = traces[0].norms = traces[0].norms[:1]
        compare(traces[stage], traces[0], f"stage {stage}", tolerance=2**-8)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@distributed(world_size=2)
def test_sent_messages_bring_the_same_bits_as_reads(precision):
    """Between machines gradients are collected in flat tensors and sent; on one they are read where they are."""
    mine = functools.partial(zoo.batch, "mixtral", dist.get_rank())
    plan = Plan(accumulation=3, ragged=True)
    for stage in STAGES[1:]:
        settings = {"zero_stage": stage, "mixed_precision": precision}
        read, sent = (
            train_zero(
                zoo.build("mixtral"), ADAMW, mine, plan, config=hf_zero.ZeroConfig(**settings, peer_memory=peer_memory)
            )
            for peer_memory in (True, False)
        )
        assert read.losses == sent.losses, f"stage {stage}"
        assert all(torch.equal(read.weights[key], weight) for key, weight in sent.weights.items()), f"stage {stage}"
