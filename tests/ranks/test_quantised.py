"""Quantised messages cost what they say: few bytes, a measured error, and never the masters or a checkpoint."""

import contextlib
import functools
import logging

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.codec import Codec
from hf_zero.comm.topology import Link
from hf_zero.errors import ZeroConfigError
from tests.ranks.test_plain_checkpoints import Loop, _go_on
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import SGD, whole_weights


BOTH = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
NODES = {"zero_hpz_partition_size": 2, "node_size": 2}
REPLICAS = {"mics_shard_size": 2, "node_size": 2}
FROZEN = {"zero_quantized_nontrainable_weights": True}
PLAIN = {"peer_memory": False}  # ranks that read each other's memory send nothing that could be quantised
FOUR = {**NODES, "quantized_gradient_bits": 4}
FEEDBACK = {**FOUR, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
WAYS = [NODES, PLAIN, REPLICAS, {**NODES, "no_sync": "node"}, FOUR, FEEDBACK]


def _llama(steps=3, accumulation=1, **config):
    """The losses, the weights and the engine after some steps."""
    model = zoo.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, **config})
    engine.comm.traffic.clear()
    losses = []
    for step in range(steps):
        for number in range(accumulation):
            with engine.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                loss = model(**zoo.batch("llama", dist.get_rank(), step * accumulation + number)).loss
                engine.backward(loss)
            losses.append(loss.item())
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole_weights(model), engine


@pytest.mark.parametrize("config", WAYS)
@distributed(world_size=4)
def test_ranks_agree_and_the_error_is_small_and_known(config):
    plain, exact, _ = _llama()
    losses, weights, engine = _llama(**BOTH, **config)
    assert plain == pytest.approx(losses, abs=2e-2) and plain[1:] != losses[1:]
    flat = torch.cat([weight.reshape(-1) for weight in weights.values()])
    others = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(others, flat)
    assert all(torch.equal(other, flat) for other in others)
    limits = {"weights": 0.01, "gradients": 0.18 if "quantized_gradient_bits" in config else 0.02}
    for each in engine.mesh.quantised:
        assert 0 < each.error <= limits[each.kind], (each.kind, each.error)
        assert each.codec is not None
    errors = [None] * 4  # by which each rank decides whether to go on quantising
    dist.all_gather_object(errors, [each.error for each in engine.mesh.quantised])
    assert all(each == errors[0] for each in errors), errors
    # What moved away from the exact run is of the size of a few rounding errors, not of the weights.
    whole = torch.cat([weight.reshape(-1) for weight in exact.values()])
    assert (flat - whole).norm() / whole.norm() <= 0.02


@pytest.mark.parametrize("accumulation", [1, 3])
@distributed(world_size=4)
def test_bytes_between_nodes_are_those_of_the_payloads(accumulation):
    steps, nodes, codec = 2, 2, Codec(8)
    _, _, engine = _llama(steps, accumulation, **BOTH, **NODES, no_sync="node")
    sent = engine.comm.traffic.sent
    payloads = sum(codec.nbytes(buffer.layout.slice_numel) for buffer in engine.buffers)
    assert sent["all_gather", Link.NET] == steps * payloads * (nodes - 1)
    assert sent["reduce_scatter", Link.NET] == steps * payloads * (nodes - 1)
    numel = sum(param.numel() for param in engine.model.parameters())
    padded = sum(buffer.layout.padded_numel for buffer in engine.buffers)
    assert engine.comm.traffic.sent["all_gather", Link.NET] * 4 == pytest.approx(
        steps * 1.0078125 * padded * (nodes - 1)
    )
    assert padded >= numel


@pytest.mark.parametrize("config", [NODES, PLAIN])
@distributed(world_size=4)
def test_masters_are_touched_by_what_people_write_and_not_by_what_was_sent(config):
    def train(look):
        model = seeded(functools.partial(Net, depth=2))()
        optimizer = SGD(model.parameters())
        engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, "zero_quantized_weights": True, **config})
        for step in range(3):
            micro(model, batches(dist.get_rank(), step), engine.backward)
            optimizer.step()
            optimizer.zero_grad()
            if look:
                with hf_zero.gathered_parameters(model):
                    assert all(param.data.isfinite().all() for param in model.parameters())
                assert model.head.weight.data.isfinite().all()
        before = [master.detach().clone() for master in engine.masters]
        with hf_zero.gathered_parameters(model.head, write=True):
            model.head.bias.data.fill_(0.25)
        changed = sum(int((a != b).sum()) for a, b in zip(before, engine.masters, strict=True))
        total = torch.tensor(changed)
        dist.all_reduce(total)
        with hf_zero.gathered_parameters(model.head):
            torch.testing.assert_close(model.head.bias.data, torch.full((3,), 0.25), rtol=0.01, atol=0)
        return before, total.item()

    plain, _ = train(look=False)
    looked, changed = train(look=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))
    assert changed == 3


def _told_by(name):
    """What a logger says on this rank from here on."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return told


def _save(folder, **config):
    loop = Loop(3, **config)
    loop.train(3)
    loop.save(folder)
    return loop.train(3)


@pytest.mark.parametrize("config", [NODES, PLAIN, REPLICAS, FEEDBACK])
def test_an_interrupted_run_goes_on_as_the_uninterrupted_one(tmp_path, config):
    whole = run_ranks(_save, tmp_path / "saved", world_size=4, **BOTH, **config)[0]
    assert run_ranks(_go_on, tmp_path / "saved", 3, world_size=4, **BOTH, **config)[0] == whole


@pytest.mark.parametrize("config", [NODES, PLAIN])
@distributed(world_size=4)
def test_too_large_an_error_ends_quantisation_on_all_ranks_at_the_same_step(config):
    steps, told = 8, _told_by("hf_zero.comm.meter")
    losses, _, engine = _llama(steps, **BOTH, **config, quantized_error_limit=1e-5)
    assert all(loss == loss for loss in losses)
    assert all(each.codec is None for each in engine.mesh.quantised)
    assert sum("quantised gradients were off by" in message for message in told) == 1, told
    sent = [None] * 4
    dist.all_gather_object(sent, engine.comm.traffic.bytes_sent)
    assert all(each == sent[0] for each in sent)
    again, _, _ = _llama(steps, **config)
    assert losses == pytest.approx(again, abs=5e-2)


@distributed(world_size=4)
def test_what_cannot_be_quantised_is_refused():
    for config, says in [
        ({"zero_stage": 0, "zero_quantized_gradients": True}, "set zero_stage to 1, 2 or 3"),
        ({**FEEDBACK, **BOTH, "zero_hpz_partition_size": 1}, "all ranks are on one node"),
        ({**FEEDBACK, **BOTH, "mixed_precision": "fp16"}, "train in bf16"),
        ({**FROZEN, "offload_param_device": "cpu"}, "not available together"),
    ]:
        with pytest.raises(ZeroConfigError, match=says):
            hf_zero.shard(torch.nn.Linear(2, 2), config={"zero_stage": 3, **config})


# -- frozen weights ---------------------------------------------------------------------------------------------------


def _head_only(seed=0, dtype=torch.float32):
    model = zoo.build("llama", seed).to(dtype)
    model.requires_grad_(False).lm_head.requires_grad_(True)
    return model


@pytest.mark.parametrize("config, ranks_of_a_copy", [(NODES, 2), ({}, 4), (PLAIN, 4), (REPLICAS, 2)])
@distributed(world_size=4)
def test_frozen_weights_rest_and_travel_in_eight_bits(config, ranks_of_a_copy):
    plain = _head_only()
    exact = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = _head_only()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, **FROZEN, **config})
    packed = [buffer for buffer in engine.buffers if buffer.codec is not None]
    assert {name for buffer in packed for name in buffer.names} == {
        name for name, param in plain.named_parameters() if not param.requires_grad and param.dim() > 1
    }
    kept = sum(tensor.nbytes for buffer in packed for tensor in buffer.kept_weights)
    padded = sum(buffer.layout.padded_numel for buffer in packed)
    assert kept == padded * (1 + 2 / 256) / ranks_of_a_copy
    engine.comm.traffic.clear()
    batch = zoo.batch("llama", dist.get_rank(), 0)
    loss = model(**batch).loss
    sent = engine.comm.traffic.sent
    if config is NODES:
        assert sent["all_gather", Link.NET] == 0
    engine.backward(loss)
    optimizer.step()
    assert loss.item() == pytest.approx(plain(**batch).loss.item(), abs=1e-2)
    for name, found in whole_weights(model).items():
        if exact[name].dim() > 1 and name != "lm_head.weight":
            error = ((found - exact[name]).norm() / exact[name].norm()).item()
            assert 0 < error <= 0.01, (name, error)
        elif name != "lm_head.weight":
            assert torch.equal(found, exact[name]), name


def _frozen_run(folder, *, resume, **config):
    loop = Loop(3, functools.partial(_head_only, dtype=torch.bfloat16), **FROZEN, **config)
    if resume:
        loop.load(folder)
    else:
        loop.train(2)
        loop.save(folder)
    return loop.train(2), {name: value.tolist() for name, value in whole_weights(loop.model).items()}


def test_a_run_with_frozen_weights_in_eight_bits_saves_what_it_uses_and_goes_on_bit_for_bit(tmp_path):
    run = functools.partial(run_ranks, _frozen_run, tmp_path / "saved", world_size=4)
    whole = run(resume=False, **NODES)[0]
    assert run(resume=True, **NODES)[0] == whole


def _save_frozen(folder):
    told = _told_by("hf_zero.checkpoint.saving")
    model = _head_only()
    hf_zero.shard(model, config={"zero_stage": 3, **FROZEN})
    model.save_pretrained(folder)
    return told


def test_a_save_says_that_frozen_weights_are_not_what_was_loaded(tmp_path):
    first, second = run_ranks(_save_frozen, tmp_path / "saved", world_size=2)
    assert len(first) == 1 and "not as they were loaded" in first[0], first
    assert second == []


@distributed(world_size=2)
def test_what_is_written_to_quantised_frozen_weights_stays_and_the_rest_keeps_its_bits():
    model = _head_only()
    hf_zero.shard(model, config={"zero_stage": 3, **FROZEN, **PLAIN})
    before = whole_weights(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with hf_zero.gathered_parameters(weight, write=True):
        weight.data[0].fill_(0.5)
    for name, found in whole_weights(model).items():
        if name == "model.layers.0.mlp.up_proj.weight":
            torch.testing.assert_close(found[0], torch.full_like(found[0], 0.5))
        else:
            assert torch.equal(found, before[name]), name


# -- replicas and feedback --------------------------------------------------------------------------------------------


@distributed(world_size=4)
def test_sums_over_replicas_are_sent_as_payloads_and_equal_on_all():
    steps, replicas = 2, 2
    _, weights, engine = _llama(steps, zero_quantized_gradients=True, **REPLICAS)
    payloads = sum(Codec(8).nbytes(buffer.layout.slice_numel // replicas) for buffer in engine.buffers)
    sent = engine.comm.traffic.sent
    assert sent["reduce_scatter", Link.NET] == sent["all_gather", Link.NET] == steps * payloads * (replicas - 1)
    assert not any(nbytes for (kind, _), nbytes in sent.items() if kind == "all_reduce")
    found = [None] * 4
    dist.all_gather_object(found, {name: value.tolist() for name, value in weights.items()})
    assert all(each == found[0] for each in found)


@distributed(world_size=4)
def test_error_feedback_keeps_a_byte_for_each_sum_that_leaves_the_node_and_forgets_at_a_save():
    _, _, engine = _llama(2, zero_quantized_gradients=True, **FEEDBACK)
    sums = sum(2 * buffer.layout.slice_numel for buffer in engine.buffers)
    assert sum(tensor.nbytes for tensor in engine.mesh.errors) == Codec(8).nbytes(sums)
    _, plain, _ = _llama(2, zero_quantized_gradients=True, **FOUR)
    assert any(not torch.equal(value, plain[name]) for name, value in whole_weights(engine.model).items())
    engine.anchor()
    assert engine.mesh.errors == []


# -- an outlier -------------------------------------------------------------------------------------------------------


@distributed(world_size=4)
def test_an_outlier_column_ends_quantisation_on_all_ranks_at_the_same_step_and_nothing_is_lost():
    model = zoo.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3, **BOTH, **NODES})
    weights, gradients = engine.mesh.quantised

    def train(step):
        loss = model(**zoo.batch("llama", dist.get_rank(), step)).loss
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite()

    def column(scale):
        """From here on one feature of every layer's input is much larger, and so is its part of the gradients."""
        for layer in model.model.layers:
            with hf_zero.gathered_parameters(layer.input_layernorm, write=True):
                layer.input_layernorm.weight.data[3] *= scale

    for step in range(3):
        train(step)
    before = gradients.error
    assert gradients.codec is not None and before <= 0.02
    column(1e4)
    ended, errors = [], []
    for step in range(3, 14):
        train(step)
        errors.append(gradients.error)
        ended.append((weights.codec is None, gradients.codec is None))
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, ended)
    assert all(each == ended for each in everywhere)
    assert max(errors) > 3 * before, errors
    assert ended[-1][1] and not ended[0][1], errors
    # The masters are as exact as ever, and the nodes' weights never far from them.
    masters, used = [master.detach().clone() for master in engine.masters], whole_weights(model)
    engine.anchor()
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(masters, engine.masters, strict=True))
    for name, exact in whole_weights(model).items():
        assert (used[name] - exact).norm() <= 0.0025 * exact.norm(), name
