"""A browser without a network shows all of a run's page: nothing is fetched, cut off or drawn over something else."""

import pytest
import torch.distributed as dist

from scripts.look_at_page import BROWSER, find_browser, look
from tests.support.harness import distributed
from tests.support.trainers import make_trainer


pytest.importorskip("matplotlib")
PAGE = {"zero_report": True, "zero_report_machine": "tests/data/two_cores.yaml"}
DRAWINGS = ["placement", "memory", "peak", "plan", "bytes", "time", "timeline", "loss"]


@pytest.mark.skipif(find_browser() is None, reason=f"no headless Chromium on the path, and none named in {BROWSER}")
@distributed(world_size=2)
def test_a_browser_shows_everything_at_both_widths(tmp_path):
    trainer = make_trainer("llama", 3, tmp_path, bf16=True, logging_steps=2, **PAGE)
    trainer.train()
    dist.barrier()
    if dist.get_rank():
        return
    for width in (1000, 500):
        seen = look(find_browser(), tmp_path / "report.html", width)
        assert seen["title"] == "LlamaForCausalLM: stage 3 on 2 rank(s)" and seen["facts"] == 3
        assert len(seen["headings"]) == 7 and list(seen["drawings"]) == DRAWINGS
        assert all(200 < wide <= width and tall > 50 for wide, tall in seen["drawings"].values()), seen
        assert (seen["cut"], seen["covered"], seen["fetched"]) == ([], [], []), seen
        assert seen["needed"] == seen["width"] == width, "the window scrolls to the side"
