"""What rests on a rank between passes is what the ZeRO formulas say, counted over every live tensor of the process."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hf_zero
from hf_zero.core.engine import engine_of
from hf_zero.core.unit import UnitState
from tests.support.harness import distributed


# Bytes per parameter at rest after a step, of w bytes per weight: whole weights, fp32 masters and two Adam states. A
# whole fp32 weight has its master in it; a fully sharded one is cast from its master when it is gathered. Between
# backward and step there are fp32 gradients besides.
FORMULAS = {
    0: lambda w, n: {4: 4 + 8, 2: 2 + 12}[w],
    1: lambda w, n: {4: 4 + 8 / n, 2: 2 + 12 / n}[w],
    2: lambda w, n: {4: 4 + 8 / n, 2: 2 + 12 / n}[w],
    3: lambda w, n: 12 / n,
}


def build(hidden=256, layers=4, vocab=512, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def live_bytes():
    """The bytes of all tensor storages that this process holds; what has none (on meta, around others) has a size."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and not candidate.is_meta:
            with torch._C.DisableTorchFunctionSubclass():
                storage = candidate.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def batch(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def check_resident_bytes(stage, precision):
    before = live_bytes()
    model = build()
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": precision})
    width, ranks = 2 if precision == "bf16" else 4, dist.get_world_size()
    for step in range(2):
        engine.backward(model(**batch(model, step)).loss)
        if step == 1:
            dist.barrier()  # the other ranks have read this one's gradients...
            engine.comm.fence()  # ...and this one has heard of it
            gradients = 4 / (ranks if stage else 1)
            expected = (FORMULAS[stage](width, ranks) + gradients) * numel
            check_bytes(live_bytes() - before, expected, "after backward")
        optimizer.step()
        optimizer.zero_grad()
    check_bytes(live_bytes() - before, FORMULAS[stage](width, ranks) * numel, "after the step")


def check_bytes(found, expected, when):
    assert abs(found / expected - 1) <= 0.01, f"{when}: {found} bytes, the formula says {expected:.0f}"


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_resident_bytes_on_two_ranks(stage, precision):
    check_resident_bytes(stage, precision)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=4)
def test_resident_bytes_on_four_ranks(stage):
    check_resident_bytes(stage, "no")


@pytest.mark.parametrize("tied", [False, True])
@distributed(world_size=2)
def test_stage_3_keeps_few_units_unsharded(tied):
    model = build(hidden=64, layers=6, tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3})
    root, *others = engine.units if engine.units[0].name == "(root)" else [None, *engine.units]
    peak = 0

    def count(*_):
        nonlocal peak
        peak = max(peak, sum(unit.state is not UnitState.RESTING for unit in others))

    for module in model.modules():
        module.register_forward_pre_hook(count)
        module.register_forward_hook(count)
    for step in range(3):
        loss = model(**batch(model, step)).loss
        assert peak <= 2, f"{peak} units were unsharded in forward {step}"
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        held = [unit.name for unit in engine.units if unit.state is not UnitState.RESTING]
        assert not held, f"still unsharded after step {step}: {held}"
        full = [buffer.unsharded.untyped_storage().nbytes() for buffer in engine.buffers]
        assert not any(full), f"bytes left in released storages: {full}"
    assert peak == 2, "nothing was gathered ahead"


@distributed(world_size=2)
def test_collectives_and_bytes_per_step_match_the_formula():
    """ZeRO-3 with one micro-batch: every unit is gathered twice, but the embedding (its backward needs no weight) and
    the head (kept from forward to backward) once, and every unit is reduced once."""
    model = build(layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3})
    for step in range(3):
        engine.comm.traffic.clear()
        engine.backward(model(**batch(model, step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert len(engine.units) == 6, [unit.name for unit in engine.units]  # embedding, layers (the last with norm), head
    assert dict(engine.comm.traffic.calls) == {"all_gather": 2 * 6 - 2, "reduce_scatter": 6}
    total = sum(p.numel() for p in model.parameters())
    once = model.model.embed_tokens.weight.numel() + model.lm_head.weight.numel()
    expected = ((2 * total - once) + total) * 4 // 2
    assert abs(sum(engine.comm.traffic.bytes_sent.values()) / expected - 1) < 0.01, (
        engine.comm.traffic.bytes_sent,
        expected,
    )


@distributed(world_size=2)
def test_a_stage_1_window_reduces_once():
    model = build(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 1})
    for micro in range(4):
        if micro < 3:
            with engine.no_sync():
                engine.backward(model(**batch(model, micro)).loss)
            assert not engine.comm.traffic.calls["reduce_scatter"]
        else:
            engine.backward(model(**batch(model, micro)).loss)
    optimizer.step()
    optimizer.zero_grad()
    model(**batch(model))
    buffers = len(list(engine_of(model).buffers))
    assert engine.comm.traffic.calls["reduce_scatter"] == buffers
    assert engine.comm.traffic.calls["all_gather"] == buffers


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_masters_of_whole_fp32_weights_are_parts_of_them(stage):
    """Also after they were laid out anew, cast and cast back; what is written in a scope and dropped is dropped."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})

    def shared():
        storages = {buffer.unsharded.untyped_storage()._cdata for buffer in engine.buffers}
        return {master.untyped_storage()._cdata in storages for master in engine.masters}

    def values():
        with hf_zero.gathered_parameters(model):
            return [param.detach().clone() for param in model.parameters()]

    for _ in range(2):
        engine.backward(model(torch.ones(2, 8)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert shared() == {True}
    before = values()
    with hf_zero.gathered_parameters(model), torch.no_grad():
        model[0].weight.zero_()
        with hf_zero.gathered_parameters(model[0], write=True):
            model[0].bias.fill_(3.0)
            model[0].weight.fill_(dist.get_rank() + 1.0)
        model[2].weight.fill_(5.0)
    after = values()
    assert (after[0] == 1.0).all() and (after[1] == 3.0).all() and torch.equal(after[2], before[2])
    model.bfloat16()
    assert shared() == {False} and all(master.dtype == torch.float32 for master in engine.masters)
    model.float()
    assert shared() == {True}
    assert all(torch.equal(one, other) for one, other in zip(values(), after, strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
    assert shared() == {True}
