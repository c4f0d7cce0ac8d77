"""Ranks that read each other's memory get what messages would have brought, and never read too early or too late."""

import gc
import itertools
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm import peer_memory
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.peer_memory import MAX_RANGES, PeerMemory
from hf_zero.comm.work import Tag
from tests.support.harness import distributed


WHAT = Tag("a test", 7)


def connect():
    comm = Communicator.connect()
    return PeerMemory.connect(comm.rank, comm.all_gather_object)


def values(numel, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(numel, generator=draw).to(dtype)


# -- the moves ----------------------------------------------------------------------------------------------------


def reduced(comm, parts):
    found = []
    comm.reduce_scatter(parts, lambda at, part: found.append((at, part.clone())), WHAT).wait()
    assert [at for at, _ in found] == [sum(part.numel() for _, part in found[:i]) for i in range(len(found))]
    return torch.cat([part for _, part in found])


def check_moves(dtype, numel):
    world = dist.get_world_size()
    ours, sent = Communicator.connect(), Communicator.connect(peer_memory=False)
    assert ours.takes_parts, "this system does not let ranks read each other"
    assert not sent.takes_parts
    flat = values(numel * world, dtype)
    got, expected = flat.clone(), flat.clone()
    for comm, tensor in ((ours, got), (sent, expected)):
        comm.all_gather(tensor, WHAT).wait()
    assert torch.equal(got, expected)
    expected = reduced(sent, [flat.clone()])
    assert expected.dtype == torch.float32
    cuts = sorted({0, 1, numel, numel * world // 3, numel * world - 1, numel * world})
    parts = [flat[low:high].clone() for low, high in itertools.pairwise(cuts)]
    assert torch.equal(reduced(ours, parts), expected), "the same bits, wherever the gradients lie"
    assert ours.traffic.bytes_sent == sent.traffic.bytes_sent


@pytest.mark.parametrize("numel", [3, 1000, 700_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=2)
def test_the_same_bits_as_messages_bring(dtype, numel):
    check_moves(dtype, numel)


@distributed(world_size=4)
def test_the_same_bits_on_four_ranks():
    check_moves(torch.float32, 5000)
    check_moves(torch.bfloat16, 300_000)


@distributed(world_size=2)
def test_more_pieces_than_an_offer_names():
    comm = Communicator.connect()
    flat = values(4 * (MAX_RANGES + 10))
    whole = reduced(comm, [flat])
    assert torch.equal(reduced(comm, list(flat.split(1))), whole)
    gathered = torch.zeros_like(flat)
    own = gathered.chunk(2)[comm.rank].copy_(values(len(flat) // 2, seed=1))
    comm.all_gather(gathered, WHAT, list(own.clone().split(1))).wait()
    other = Communicator.connect(peer_memory=False)
    expected = torch.zeros_like(flat)
    expected.chunk(2)[comm.rank].copy_(own)
    other.all_gather(expected, WHAT).wait()
    assert torch.equal(gathered, expected)


@pytest.mark.parametrize("peer_memory", [True, False])
@distributed(world_size=2)
def test_the_configuration_decides(peer_memory):
    model = torch.nn.Linear(4, 4)
    engine = hf_zero.shard(model, None, {"zero_stage": 3, "peer_memory": peer_memory})
    assert engine.comm.takes_parts == peer_memory


# -- when memory may be read and changed ---------------------------------------------------------------------------


@distributed(world_size=2)
def test_what_a_slow_peer_has_not_read_stays_alive_and_the_fence_waits_for_it():
    comm = Communicator.connect()
    rest = torch.full((50_000,), float(comm.rank + 1))
    flat = torch.zeros(100_000)
    flat.chunk(2)[comm.rank].copy_(rest)
    pending = comm.all_gather(flat, WHAT, [rest])
    if comm.rank == 0:
        pending.wait()
        del rest, pending
        gc.collect()
        garbage = [torch.full((50_000,), -1.0) for _ in range(20)]
        readers = comm._transport.peers._readers
        assert readers() == {1}, "the peer has not read yet"
        dist.barrier()
        comm.fence(WHAT)
        assert readers() == set()
        assert len(garbage) == 20
    else:
        dist.barrier()
        pending.wait()
    assert flat.chunk(2)[0].eq(1).all() and flat.chunk(2)[1].eq(2).all(), flat


@distributed(world_size=2)
def test_thousands_of_offers_before_the_first_is_read():
    comm = Communicator.connect()
    flats = [torch.full((2,), float(10 * number + comm.rank)) for number in range(3000)]
    under_way = [comm.all_gather(flat, Tag("one of many", number % 5)) for number, flat in enumerate(flats)]
    for number, (flat, pending) in enumerate(zip(flats, under_way, strict=True)):
        pending.wait()
        assert flat.tolist() == [10.0 * number, 10.0 * number + 1]


def end_while_a_peer_reads():
    comm = Communicator.connect()
    flat = torch.full((2_000_000,), float(comm.rank))
    pending = comm.all_gather(flat, WHAT)
    if comm.rank == 1:
        time.sleep(0.5)  # rank 0 is leaving by now
    pending.wait()
    return flat.chunk(2)[0].eq(0).all().item() and flat.chunk(2)[1].eq(1).all().item()


@distributed(world_size=2)
def test_a_rank_leaves_when_slower_ranks_have_read():
    assert end_while_a_peer_reads()
    gc.collect()  # the communicator of a rank that goes on is gone too


@distributed(world_size=2)
def test_a_peer_that_is_gone_is_named():
    comm = Communicator.connect(hang_timeout_s=60)
    flat = torch.zeros(4)
    comm.all_gather(flat, WHAT).wait()
    dist.barrier()
    if comm.rank == 1:
        comm._transport.peers.leave()  # what the kernel does with the sockets of a process that was killed
        return
    with pytest.raises(hf_zero.errors.ZeroRuntimeError, match=r"all-gather of a test: rank\(s\) \[1\] have ended"):
        comm.all_gather(flat, WHAT).wait()


# -- who can read whom ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["place", "socket", "memory"])
@distributed(world_size=2)
def test_all_ranks_send_messages_where_one_cannot_be_read(reason):
    if dist.get_rank() == 1:
        if reason == "place":
            peer_memory._place = lambda: ("another machine",)
        elif reason == "socket":
            peer_memory._listen = lambda: None
        else:

            def refuse(*_):
                raise OSError("operation not permitted")

            PeerMemory._copy = refuse
    assert connect() is None
    comm = Communicator.connect()
    assert not comm.takes_parts
    flat = torch.zeros(2)
    flat[comm.rank] = comm.rank + 1
    comm.all_gather(flat, WHAT).wait()
    assert flat.tolist() == [1, 2]


@pytest.mark.parametrize("asks", ["0", "1"])
@distributed(world_size=2)
def test_where_the_kernel_asks_the_launcher_is_named_and_nobody_else(tmp_path, asks):
    """With Yama as it might be here: who is named, and its descendants, may read a process."""
    peer_memory._YAMA = tmp_path / f"ptrace_scope_{dist.get_rank()}"
    peer_memory._YAMA.write_text(f"{asks}\n")
    library, permitted = peer_memory._libc(), []

    class Library:
        process_vm_readv = library.process_vm_readv

        def prctl(self, option, process, *rest):
            permitted.append((option, process.value))

    peer_memory._libc = lambda: Library()
    assert Communicator.connect().takes_parts
    assert permitted == ([(0x59616D61, os.getppid())] if asks == "1" else []), "the ranks of a test are siblings"


@distributed(world_size=2)
def test_nothing_has_a_name_in_the_file_system():
    def sockets():
        with open("/proc/net/unix") as table:
            return [line for line in table if "hf_zero-" in line]

    comm = Communicator.connect()
    assert comm.takes_parts
    dist.barrier()
    assert all("@hf_zero-" in line for line in sockets()), "abstract names end with their sockets"
    opened = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [link for link in opened if link.is_symlink() and "hf_zero" in os.readlink(link)]
