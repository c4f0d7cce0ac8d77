"""Exchanges between the parts of a sequence and the heads of its attention, with their gradients and their bytes."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from hf_zero.comm.communicator import Communicator
from hf_zero.comm.mesh import Mesh
from hf_zero.comm.work import Tag
from hf_zero.core.sequence import SequenceGroup, shares_of_heads
from tests.support.happens_before import problems
from tests.support.harness import distributed
from tests.support.nets import WIDTH as WIDTH_OF_NETS
from tests.support.nets import Block, Net, batches, micro
from tests.support.networks import diverge
from tests.support.recorder import record


TAG = Tag("the heads of layer 0")
BATCH, TOKENS, WIDTH = 2, 8, 3
HEADS = [(4, 4), (4, 2), (4, 1), (6, 3), (6, 2), (5, 5), (9, 3)]


def test_each_rank_has_the_keys_that_its_queries_need():
    for heads, keys in HEADS:
        for size in range(1, heads + 1):
            shares = shares_of_heads(heads, keys, size)
            assert [head for (first, last), _ in shares for head in range(first, last)] == list(range(heads))
            for (first, last), (low, high) in shares:
                needed = {head // (heads // keys) for head in range(first, last)}
                assert needed == set(range(low, high)), (heads, keys, size)


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ValueError, match="8 ranks share each sequence.*4 head.*sp_size to 4"):
        shares_of_heads(4, 2, 8)


def _draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 4])
@distributed(world_size=4)
def test_exchanges_and_their_gradients_are_those_of_whole_sequences(size):
    group = SequenceGroup(Mesh(Communicator.connect()), size)
    for heads, keys in HEADS:
        _check_exchanges(group, heads, keys, size)


def _check_exchanges(group, heads, keys, size):
    shares = shares_of_heads(heads, keys, size)
    of_queries, of_keys = [query for query, _ in shares], [key for _, key in shares]
    assert (group.rank, group.size) == (dist.get_rank() % size, size)

    query, key = _draw(BATCH, heads, TOKENS, WIDTH), _draw(BATCH, keys, TOKENS, WIDTH + 1)
    mine = [tensor.chunk(size, 2)[group.rank].clone().requires_grad_() for tensor in (query, key)]
    got_query, got_key = group.to_heads(mine, [of_queries, of_keys], TAG)
    torch.testing.assert_close(got_query, query[:, slice(*of_queries[group.rank])], rtol=0, atol=0)
    torch.testing.assert_close(got_key, key[:, slice(*of_keys[group.rank])], rtol=0, atol=0)

    back = group.to_parts(got_query * 2, of_queries, TAG)
    torch.testing.assert_close(back, mine[0] * 2, rtol=0, atol=0)
    (back.square().sum() + got_key.square().sum()).backward()
    torch.testing.assert_close(mine[0].grad, 8 * mine[0], rtol=1e-12, atol=1e-12)
    # Each rank that was given a head of keys has squared it.
    times = torch.tensor([sum(low <= head < high for low, high in of_keys) for head in range(keys)])
    torch.testing.assert_close(mine[1].grad, 2 * mine[1] * times.view(-1, 1, 1), rtol=1e-12, atol=1e-12)


@distributed(world_size=4)
def test_exchanges_are_counted_and_named():
    mesh = Mesh(Communicator.connect(hang_timeout_s=60))
    group = SequenceGroup(mesh, 2)
    tensor = torch.zeros(BATCH, 4, TOKENS // 2, WIDTH)
    group.to_heads([tensor, tensor], [[(0, 2), (2, 4)]] * 2, TAG)
    traffic = mesh.world.traffic
    assert traffic.calls["hand_over"] == 1, traffic.calls  # both tensors in one message
    assert traffic.bytes_sent["hand_over"] == tensor.nbytes, traffic.bytes_sent  # half of two tensors
    assert traffic.bytes_between_nodes == 0
    assert traffic.waited["exchange"] > 0
    waits, watch = [], group.comm.watchdog.wait
    group.comm.watchdog.wait = lambda label, action: (waits.append(label), watch(label, action))
    whole = group.whole(torch.full((1, 2), group.rank), TAG)
    assert whole.tolist() == [[0, 0, 1, 1]], whole
    assert waits == ["exchange of the heads of layer 0 of a sequence"], waits  # what a hang is reported by


@distributed(world_size=2)
def test_tensors_of_different_dtypes_go_separately():
    group = SequenceGroup(Mesh(Communicator.connect()), 2)
    parts = [torch.ones(1, 2, 1, 1, dtype=dtype) * group.rank for dtype in (torch.float32, torch.bfloat16)]
    found = group.to_heads(parts, [[(0, 1), (1, 2)]] * 2, TAG)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16]
    assert all(tensor.flatten().tolist() == [0, 1] for tensor in found), found


class _Attending(Block):
    """Exchanges tokens for heads in the middle, as attention does."""

    group: SequenceGroup

    def forward(self, x):
        (heads,) = self.group.to_heads([x.T[None, :, :, None]], [SHARES], TAG)
        mixed = self.group.to_parts(heads.cumsum(2), SHARES, TAG)
        return super().forward(x + mixed[0, :, :, 0].T)


SHARES = [(0, WIDTH_OF_NETS // 2), (WIDTH_OF_NETS // 2, WIDTH_OF_NETS)]


def _train_sharing(stage, transport, reentrant, recording):
    torch.manual_seed(0)
    model = Net(depth=4, block=_Attending)
    if reentrant is not None:
        model.route = functools.partial(_checkpointed, model.layers, reentrant)
    diverge(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = recording.shard(model, optimizer, zero_stage=stage, transport=transport)
    _Attending.group = SequenceGroup(engine.mesh, 2)
    for number in range(4):
        with engine.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            micro(model, batches(dist.get_rank(), number), engine.backward)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def _checkpointed(layers, reentrant, x):
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("transport", ["nccl", "messages", "reads"])
def test_no_interleaving_of_exchanges_and_gathers_hangs(transport, reentrant):
    """Heads are exchanged while weights are gathered ahead, and while gradients are reduced."""
    for stage in range(4):
        found = problems(record(functools.partial(_train_sharing, stage, transport, reentrant), 4))
        assert not found, "\n".join([f"stage {stage}", *found])
