"""The checker of what ranks enqueue finds each kind of fault, in logs written by hand and in recorded programs."""

import pytest
import torch
import torch.distributed as dist

from tests.support.allocator import CachingAllocator, replay
from tests.support.happens_before import (
    Collective,
    Compute,
    Free,
    Region,
    Resize,
    Section,
    Wait,
    exposed_gathers,
    problems,
)
from tests.support.recorder import record


def gather(label, **options):
    return Collective("gathers", "all-gather", label, 8, writes=(Region(label),), **options)


def reduction(label, **options):
    return Collective("reductions", "reduce-scatter", label, 8, reads=(Region(f"gradients of {label}"),), **options)


def the_only(found):
    assert len(found) == 1, found
    return found[0]


# -- deadlocks and orders ---------------------------------------------------------------------------------------------


def test_what_all_ranks_do_in_one_order_is_no_problem():
    logs = []
    for _ in range(3):
        a, b = gather("a", members=(0, 1, 2)), reduction("b", members=(0, 1, 2))
        logs.append([a, b, Compute("mm"), Wait(b), Wait(a), Compute("mm", reads=(Region("a"),)), Resize("a", 0)])
    assert problems(logs) == []


def test_waits_that_form_a_cycle_are_a_deadlock():
    logs = []
    for order in (gather, reduction), (reduction, gather):
        first, second = (make("x") for make in order)
        logs.append([first, Wait(first), second, Wait(second)])
    found = the_only(problems(logs))
    assert found.startswith("deadlock: 6 of 8 events never run"), found
    assert "rank 0 waits for all-gather of x, call 0 of communicator 'gathers', that rank(s) [1] have not" in found
    assert "rank 1 waits for reduce-scatter of x" in found, found


def test_launches_in_two_orders_are_found_even_where_streams_could_run_them():
    logs = []
    for order in (gather, reduction), (reduction, gather):
        first, second = (make("x") for make in order)
        logs.append([first, second, Wait(first), Wait(second)])
    found = the_only(problems(logs))
    assert found.startswith("order: launch 0 is all-gather of x (communicator 'gathers') on rank 0, and reduce"), found


def test_messages_with_tags_may_come_in_any_order():
    calls = [[Collective(f"tag {tag}", "message", tag, tagged=True) for tag in order] for order in ("ab", "ba")]
    assert problems([[*each, *map(Wait, each)] for each in calls]) == []


def old_backward(rank, incomplete):
    """The schedule of backward that this checker was made for, with its two faults.

    A unit is reduced when all of its gradients are there, in one fixed order, and the third reduction waits for the
    first. `incomplete` units never have all on rank 1. No unit is gathered before it is needed.
    """
    depth, log, issued, running = 8, [Section("backward")], 0, []

    def reduce_next():
        nonlocal issued
        running.append(reduction(f"layers.{depth - 1 - issued}"))
        log.append(running[-1])
        issued += 1
        if len(running) > 2:
            log.append(Wait(running.pop(0)))

    for layer in reversed(range(depth)):
        if layer < depth - 1:  # the last one was kept after forward
            call = gather(f"layers.{layer}")
            log.extend([call, Wait(call)])
        log.append(Compute("mm"))
        while issued < depth - layer and not (rank == 1 and depth - 1 - issued in incomplete):
            reduce_next()
    while issued < depth:
        reduce_next()
    return log + [Wait(call) for call in running]


def forward_with_prefetch(depth=8):
    log, ahead = [Section("forward")], gather("layers.0")
    log.append(ahead)
    for layer in range(depth):
        log.append(Wait(ahead))
        if layer + 1 < depth:
            ahead = gather(f"layers.{layer + 1}")
            log.append(ahead)
        log.append(Compute("mm"))
    return log


def new_backward(rank):
    """The same backward, where a unit is gathered ahead, and reduced when backward has left it behind."""
    depth, log, running = 8, [Section("backward")], []
    ahead = None
    for layer in reversed(range(depth)):
        if ahead is not None:
            log.append(Wait(ahead))
        if layer < depth - 1:
            running.append(reduction(f"layers.{layer + 1}"))
            log.append(running[-1])
        if len(running) > 2:
            log.append(Wait(running.pop(0)))
        if layer:
            ahead = gather(f"layers.{layer - 1}")
            log.append(ahead)
        log.append(Compute("mm"))
    running.append(reduction("layers.0"))
    return log + [running[-1], *map(Wait, running)]


def test_the_old_schedule_hangs_where_ranks_lack_other_gradients():
    assert problems([old_backward(rank, incomplete=()) for rank in (0, 1)]) == []
    found = the_only(problems([old_backward(rank, incomplete=(7,)) for rank in (0, 1)]))
    assert found.startswith("deadlock"), found
    assert "rank 0 waits for reduce-scatter of layers.7" in found, found
    assert "rank 1 waits for all-gather of layers.4" in found, found
    assert problems([new_backward(rank) for rank in (0, 1)]) == []


def test_the_old_schedule_exposes_eight_of_fifteen_gathers():
    def count(log):
        exposed = exposed_gathers(log)
        return {name: len(labels) for name, labels in exposed.items()}

    old = forward_with_prefetch() + old_backward(0, ())
    assert sum(isinstance(event, Collective) and event.kind == "all-gather" for event in old) == 15
    assert count(old) == {"forward": 1, "backward": 7}
    assert count(forward_with_prefetch() + new_backward(0)) == {"forward": 1, "backward": 0}


# -- mismatches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other, words",
    [
        (gather("b"), "all-gather of b (8 elements) on rank 1"),
        (Collective("gathers", "all-gather", "a", 16), "(16 elements"),
        (Collective("gathers", "broadcast", "a", 8), "broadcast of a"),
    ],
)
def test_calls_that_differ_between_ranks(other, words):
    mine = gather("a")
    found = the_only(problems([[mine, Wait(mine)], [other, Wait(other)]]))
    assert found.startswith("mismatch: communicator 'gathers' is in call 0 all-gather of a") and words in found, found


def test_a_call_that_one_rank_does_not_make():
    last = gather("b")
    found = the_only(problems([[gather("a"), last], [gather("a")]]))
    assert found.startswith("mismatch: call 1 of communicator 'gathers', all-gather of b, is made on rank(s) [0]")
    found = the_only(problems([[gather("a"), last, Wait(last)], [gather("a")]]))
    assert found.startswith("deadlock: 1 of 4") and "rank 1 has ended" in found, found


def test_two_groups_that_took_one_name():
    logs = [[Collective("1", "all-gather", "a", 8, members=members)] for members in ((0, 1), (0, 1), (2, 3), (2, 3))]
    assert the_only(problems(logs)) == "mismatch: communicator '1' has ranks (0, 1), and ranks (2, 3) on rank 2"


# -- memory -----------------------------------------------------------------------------------------------------------


def both(make):
    return [make(), make()]


@pytest.mark.parametrize(
    "event, words",
    [
        (Resize("a", 0), "its release changes storage a while all-gather of a may still be writing to it"),
        (Free("a"), "its release changes"),
        (Compute("mm", reads=(Region("a"),)), "mm reads storage a while all-gather of a may still be writing to it"),
        (Compute("mul_", writes=(Region("gradients of b"),)), "mul_ changes storage gradients of b while reduce"),
        (Free("gradients of b"), "reduce-scatter of b may still be reading it"),
        (Collective("others", "broadcast", "a", reads=(Region("a"),)), "broadcast of a reads storage a"),
    ],
)
def test_memory_that_is_touched_while_a_collective_may_need_it(event, words):
    def log(early):
        calls = [gather("a"), reduction("b")]
        late = list(map(Wait, calls))
        return [*calls, event, *late] if early else [*calls, *late, event]

    found = problems([log(early=True), log(early=False)])
    assert words in the_only(found) and "rank 0" in found[0], found
    assert problems(both(lambda: log(early=False))) == []


def test_what_reads_may_be_read_and_other_bytes_may_be_changed():
    def log():
        call = Collective("reductions", "all-to-all", reads=(Region("a", 0, 64),), writes=(Region("b", 0, 64),))
        calm = [
            Compute("mm", reads=(Region("a"),)),
            Compute("mul_", writes=(Region("a", 64, 128),)),
            Compute("mul_", writes=(Region("b", 64, 128), Region("c"))),
        ]
        return [call, *calm, Wait(call)]

    assert problems(both(log)) == []


def test_an_end_is_known_by_later_calls_too():
    def same_communicator():
        first, second = gather("a"), gather("b")
        return [first, second, Wait(second), Compute("mm", reads=(Region("a"),))]

    assert problems(both(same_communicator)) == []
    # Rank 1 reduces after its own wait: where the reduction has ended, so has the gather on both ranks.
    calls = [(gather("a"), reduction("b")) for _ in range(2)]
    through_another_rank = [
        [calls[0][0], calls[0][1], Wait(calls[0][1]), Resize("a", 0)],
        [calls[1][0], Wait(calls[1][0]), calls[1][1]],
    ]
    assert problems(through_another_rank) == []
    through_another_rank[1][1:] = [calls[1][1], Wait(calls[1][0])]
    assert "its release changes storage a" in the_only(problems(through_another_rank))


# -- exposed gathers --------------------------------------------------------------------------------------------------


def test_gathers_are_exposed_unless_the_model_computes_meanwhile():
    a, b, c, d = map(gather, "abcd")
    copy = Compute("copy_", of_model=False)
    log = [Section("one"), a, copy, Wait(a), b, c, Compute("mm"), Wait(b), Section("two"), copy, Wait(c), d, Wait(d)]
    assert exposed_gathers(log) == {"one": ["a"], "two": ["d"]}
    together = [a, b, copy, Wait(a), Wait(b), Compute("mm"), c, Wait(c)]
    assert exposed_gathers(together) == {"": ["a + b", "c"]}


# -- the allocator ----------------------------------------------------------------------------------------------------


def test_released_bytes_are_used_again():
    log = [Resize("a", 1000), Resize("b", 5000), Resize("a", 0), Resize("c", 900), Free("b"), Resize("d", 5120)]
    allocator = replay(log)
    assert (allocator.peak_held, allocator.held, allocator.reserved) == (1024 + 5120, 1024 + 5120, 1024 + 5120)


def test_a_split_block_leaves_a_hole():
    """An activation that outlives the pass sits in what was a unit's block: the unit then needs fresh memory."""
    allocator = CachingAllocator(granule=1)
    for storage, nbytes in [("unit", 100), ("unit", 0), ("activation", 10), ("unit", 100)]:
        allocator.resize(storage, nbytes)
    assert (allocator.peak_held, allocator.reserved) == (110, 200)
    allocator.resize("other", 90)
    assert allocator.reserved == 200


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator(granule=1)
    for storage, nbytes in [("all", 90), ("all", 0), ("a", 30), ("b", 30), ("c", 30)]:
        allocator.resize(storage, nbytes)
    for storage in "acb":
        allocator.resize(storage, 0)
    allocator.resize("all", 90)
    assert (allocator.held, allocator.reserved) == (90, 90)


# -- the recorder -----------------------------------------------------------------------------------------------------


class Program:
    """Gathers and reduces by hand; subclasses break one rule."""

    def __call__(self, recording):
        full = torch.zeros(8)
        own = full.chunk(2)[dist.get_rank()]
        work = dist.all_gather_into_tensor(full, own, async_op=True)
        self.while_gathering(full, work)
        work.wait()
        grads, out = full * 2, torch.empty(4)
        work = dist.reduce_scatter_tensor(out, grads, async_op=True)
        grads = self.while_reducing(grads)
        work.wait()

    def while_gathering(self, full, work):
        pass

    def while_reducing(self, grads):
        return grads


class Reads(Program):
    def while_gathering(self, full, work):
        full.sum()


class ReadsParts(Program):
    def while_gathering(self, full, work):
        torch._foreach_mul([full[1:]], 2.0)


class Releases(Program):
    def while_gathering(self, full, work):
        full.untyped_storage().resize_(0)
        work.wait()
        full.untyped_storage().resize_(32)


class Rewrites(Program):
    def while_reducing(self, grads):
        torch.mul(grads, 2, out=grads)
        return grads


class LetsGo(Program):
    def while_reducing(self, grads):
        return None


class Diverges(Program):
    def while_reducing(self, grads):
        if dist.get_rank():
            dist.barrier()
        return grads


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names that torch 2.11 has, too
@pytest.mark.parametrize(
    "program, words",
    [
        (Program, []),
        (Reads, ["sum reads storage"]),
        (ReadsParts, ["_foreach_mul reads storage"]),
        (Releases, ["its release changes storage"]),
        (Rewrites, ["mul changes storage", "reduce-scatter may still be reading"]),
        (LetsGo, ["its release changes storage", "reduce-scatter may still be reading"]),
        (Diverges, ["deadlock", "rank 1 waits for barrier", "rank(s) [0]"]),
    ],
)
def test_recorded_programs(program, words):
    found = "\n".join(problems(record(program())))
    assert all(word in found for word in words), found
    assert bool(found) == bool(words), found


def test_released_memory_is_not_used():
    def reading(recording):
        values = torch.ones(4)
        values.untyped_storage().resize_(0)
        assert values.view(2, 2).shape == torch.empty_like(values).view(2, 2).shape
        values + 1

    def gathering(recording):
        values = torch.ones(4)
        values.untyped_storage().resize_(0)
        dist.broadcast(values, 0)

    for program, name in (reading, "add"), (gathering, "broadcast"):
        with pytest.raises(RuntimeError, match=f"{name} uses released memory"):
            record(program)
    assert not dist.is_initialized()


def test_allocations_are_recorded_with_their_ends():
    def program(recording):
        kept = torch.ones(256)
        for _ in range(3):
            (kept * 2).sum()

    allocator = replay(record(program, world_size=1)[0])
    assert (allocator.peak_held, allocator.held) == (2 * 1024 + 512, 0)


def test_values_are_those_of_ranks_that_all_hold_the_same():
    def program(recording):
        rank = dist.get_rank()
        value = torch.tensor([1.0 + rank])
        dist.all_reduce(value)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        assert value.item() == 2 * (1 + rank)
        objects = [None, None]
        dist.all_gather_object(objects, ("rank", rank))
        assert objects == [("rank", rank)] * 2
        dist.all_to_all(received := [torch.zeros(1), torch.zeros(1)], [value, value + 1])
        assert [one.item() for one in received] == [2 * (1 + rank) + rank] * 2

    assert problems(record(program)) == []
