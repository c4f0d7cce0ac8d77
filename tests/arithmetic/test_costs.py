"""What operations and collectives cost, on machines whose numbers have sources."""

import os

import pytest
import torch

from hf_zero.errors import ZeroRuntimeError
from hf_zero.planning.costs import MachineError, machine_names, read_machine
from hf_zero.planning.enqueued import Enqueued, Move
from hf_zero.tools.calibrate import calibrate, spread
from hf_zero.tools.operations import Operation
from tests.support.machines import plain_machine


# -- costs ------------------------------------------------------------------------------------------------------------


def test_products_take_the_larger_of_computing_and_moving():
    machine = plain_machine(large_share=0.5, small_share=0.25)
    large = Operation("mm", 10**12, 1000, torch.bfloat16, 2048)
    small = Operation("mm", 10**12, 1000, torch.bfloat16, 64)
    thin = Operation("mm", 1000, 10**9, torch.float32, 1)
    assert [machine.operation_seconds(one) for one in (large, small, thin)] == pytest.approx([1, 2, 1])


def test_operations_that_compute_much_have_a_rate_of_their_own():
    machine = plain_machine(rates={"silu": 5e8, "silu bf16": 2.5e8})
    times = [
        machine.operation_seconds(Operation(name, 0, 10**9, dtype, 0))
        for name, dtype in (
            ("silu", torch.float32),
            ("silu_", torch.float32),
            ("silu", torch.bfloat16),
            ("add", torch.float32),
        )
    ]
    assert times == pytest.approx([2, 2, 4, 1])


def test_a_rate_of_its_own_counts_in_a_cache_and_no_more_than_memory_allows_outside():
    machine = plain_machine(rates={"silu": 4e9}, cache_bytes=10**9, cache_rate=2e9)  # memory: 1e9
    small, large = (Operation("silu", 0, nbytes, torch.float32) for nbytes in (10**8, 10**10))
    other = Operation("tanh", 0, 10**8, torch.float32)
    assert [machine.operation_seconds(one) for one in (small, large, other)] == pytest.approx([1 / 40, 10, 1 / 20])


def test_rings_over_nodes_use_the_network_cards_of_all_ranks_of_a_node():
    machine = plain_machine(ranks_per_node=8, node_rate=450e9, net_rate=50e9)
    inside = machine.move_seconds(Move("all-gather", "", 10**9, tuple(range(8)), "", "nccl"))
    over = machine.move_seconds(Move("all-gather", "", 10**9, tuple(range(16)), "", "nccl"))
    assert inside == pytest.approx(7e9 / 450e9, rel=0.01)
    assert over == pytest.approx(15e9 / 400e9, rel=0.01)
    twice = machine.move_seconds(Move("all-reduce", "", 10**9, tuple(range(8)), "", "nccl"))
    assert twice == pytest.approx(2 * inside, rel=0.01)


def test_small_rings_take_the_time_of_their_steps():
    machine = plain_machine(ranks_per_node=8, node_rate=450e9, net_rate=50e9)
    seconds = machine.move_seconds(Move("all-gather", "", 8, tuple(range(64)), "", "nccl"))
    assert seconds == pytest.approx(14e-6 + (63 - 7) * 1.9e-6 + 7 * 4e-6, rel=0.01)


def test_copies_and_fills_do_not_read_what_they_write_to():
    log = Enqueued()
    wide, narrow = torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16)
    with log.recording():
        narrow.copy_(wide)
        wide.zero_()
        wide.add_(1.0)
    assert [event.nbytes for event in log.events] == [400 + 200, 400, 2 * 400]


def test_the_error_of_a_calibrated_machine_is_the_spread_of_its_rounds():
    def figures(large, add, mul, launch, latency):
        single = {"launch": launch, "node_latency": latency}
        return {"": single, "flops": {"fp32": large}, "rates": {"add": add, "mul": mul}}

    steady = figures(100.0, 1.0, 2.0, 1.0, 1.0)
    assert spread([steady] * 3) == 0
    # Latencies are a small part of a step; of operations counts what all of them take: 1.5 seconds here, and there.
    other = figures(100.0, 2.0, 1.0, 1.0, 9.0)
    assert spread([steady, steady, other]) == 0
    assert spread([steady, steady, figures(80.0, 1.0, 2.0, 1.0, 1.0)]) == pytest.approx(0.25)
    assert spread([steady, steady, figures(100.0, 1.0, 2.0, 1.5, 1.0)]) == pytest.approx(0.5)


# -- machines ---------------------------------------------------------------------------------------------------------


def test_more_ranks_than_cores_are_not_calibrated_with():
    cores = os.cpu_count() or 1
    with pytest.raises(ZeroRuntimeError, match=rf"calibrate with --num-processes {cores}"):
        calibrate(cores + 1)


@pytest.mark.parametrize("name", machine_names())
def test_every_number_of_a_machine_has_its_source(name):
    machine = read_machine(name)
    given = {"flops", "memory_rate", "launch", "node_rate", "net_rate", "large_share", "attention_share", "memory"}
    given |= {"error"}
    assert given <= set(machine.sources)
    assert all(machine.sources.values())


@pytest.mark.parametrize(
    "text, what",
    [
        ("name: a\n", "lacks"),
        ("- 1\n", "no mapping"),
        ("nmae: a\n", "'nmae' is no number of a machine"),
        ("memory_rate: 1e9\n", r"write 1\.0e\+9"),
        ("memory_rate: -1.0\n", "out of range"),
        (
            "flops: {bf16: 1.0}\nname: a\nranks_per_node: 1\nmemory: 1\nmemory_rate: 1\nlaunch: 1\nnode_rate: 1\n"
            "net_rate: 1\n",
            "flops lacks fp32",
        ),
        (
            "flops: {fp32: 1.0}\nname: a\nranks_per_node: 1\nmemory: 1\nmemory_rate: 1\nlaunch: 1\nnode_rate: 1\n"
            "net_rate: 1\nsmall_share: {bf16: 1.0}\n",
            "small_share lacks fp32",
        ),
        ("name: [\n", "not a readable YAML"),
    ],
)
def test_mistakes_in_a_machines_file_are_named(tmp_path, text, what):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(MachineError, match=what):
        read_machine(str(tmp_path / "mine.yaml"))


def test_an_unknown_machine_is_refused_with_the_nearest():
    with pytest.raises(MachineError, match="did you mean 'h100'"):
        read_machine("h10")


def test_a_share_may_be_one_number_or_one_by_dtype():
    product = {
        dtype: Operation("mm", 10**12, 1, dtype, 64) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    one, each = plain_machine(small_share=0.5), plain_machine(small_share={"fp32": 0.5, "bf16": 0.25})
    assert [one.operation_seconds(product[dtype]) for dtype in product] == pytest.approx([2, 1, 2])
    assert [each.operation_seconds(product[dtype]) for dtype in product] == pytest.approx([2, 2, 2])


def test_more_ranks_than_were_measured_share_the_cores():
    machine = plain_machine(host_computes=True)
    assert machine.shared_by(4).memory_rate == machine.memory_rate / 2
    assert machine.shared_by(2) is machine
    assert plain_machine().shared_by(4).memory_rate == machine.memory_rate
