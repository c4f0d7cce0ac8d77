"""A machine with round numbers, so that tests can work out predicted times by hand."""

from hf_zero.planning.costs import Machine


def plain_machine(**numbers) -> Machine:
    """Two ranks per node; 1 TFLOP/s, 1 GB/s of memory and inside a node, 0.1 GB/s between nodes, free launches."""
    plain = {
        "name": "a machine",
        "ranks_per_node": 2,
        "memory": 8e9,
        "flops": {"fp32": 1e12, "bf16": 2e12},
        "memory_rate": 1e9,
        "launch": 0.0,
        "node_rate": 1e9,
        "net_rate": 1e8,
    }
    return Machine(**{**plain, **numbers})
