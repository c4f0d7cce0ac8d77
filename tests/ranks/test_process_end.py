"""A process ends in order however many tensors its last collective still has to drop."""

import subprocess
import sys

import pytest

from tests.support.harness import LIMIT
from tests.support.launches import environment


_SCRIPT = """
import sys

import torch
import torch.distributed as dist

import hf_zero


store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
model = torch.nn.Linear(4, 4)
hf_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"zero_stage": 3})
dist.all_reduce_coalesced([torch.ones(1) for _ in range(20_000)])
"""


@pytest.mark.slow
def test_a_script_may_end_right_behind_a_collective(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    for attempt in range(2):
        words = [sys.executable, "-W", "ignore", str(script), str(tmp_path / f"store{attempt}")]
        ranks = [
            subprocess.Popen([*words, str(rank)], env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            ends = [(rank.communicate(timeout=LIMIT)[1], rank.returncode) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert ends == [("", 0)] * 2
