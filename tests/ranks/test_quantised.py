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
PLAIN = {"peer_memory": False}  # ranks that read each other's memory send nothing that could be quantised
WAYS = [NODES, PLAIN, {**NODES, "no_sync": "node"}, {**NODES, "quantized_gradient_bits": 4}]


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
    for each in engine.mesh.meter.kinds:
        assert 0 < each.error <= limits[each.kind], (each.kind, each.error)
        assert each.codec is not None
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


def _save(folder, **config):
    loop = Loop(3, **config)
    loop.train(3)
    loop.save(folder)
    return loop.train(3)


@pytest.mark.parametrize("config", [NODES, PLAIN])
def test_an_interrupted_run_goes_on_as_the_uninterrupted_one(tmp_path, config):
    whole = run_ranks(_save, tmp_path / "saved", world_size=4, **BOTH, **config)[0]
    assert run_ranks(_go_on, tmp_path / "saved", 3, world_size=4, **BOTH, **config)[0] == whole


@pytest.mark.parametrize("config", [NODES, PLAIN])
@distributed(world_size=4)
def test_too_large_an_error_ends_quantisation_on_all_ranks_at_the_same_step(config):
    steps, told = 8, []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hf_zero.comm.meter").addHandler(handler)
    losses, _, engine = _llama(steps, **BOTH, **config, quantized_error_limit=1e-5)
    assert all(loss == loss for loss in losses)
    assert all(each.codec is None for each in engine.mesh.meter.kinds)
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
        ({"zero_stage": 3, "mics_shard_size": 2, **BOTH}, "zero_hpz_partition_size instead"),
    ]:
        with pytest.raises(ZeroConfigError, match=says):
            hf_zero.shard(torch.nn.Linear(2, 2), config=config)
