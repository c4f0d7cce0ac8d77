"""What `hf-zero doctor --calibrate` writes is a machine that `hf-zero plan --time` takes."""

import pytest

from hf_zero.cli import main
from hf_zero.planning.costs import read_machine


@pytest.mark.timeout(900)
def test_a_calibrated_machine_can_be_planned_with(tmp_path):
    path = tmp_path / "here.yaml"
    assert main(["doctor", "--calibrate", str(path)]) == 0
    machine = read_machine(str(path))
    assert machine.host_computes
    assert machine.ranks_per_node == 2
    assert all(rate > 0 for rate in (*machine.flops.values(), *machine.rates.values()))
    assert min(machine.node_rate, machine.read_rate, machine.memory_rate, machine.launch) > 0
    assert "by hf-zero doctor --calibrate" in machine.sources["flops"]
