"""`benchmarks/compare_stages.py` trains at every stage, and writes a table, a picture and a recommendation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.support.harness import LIMIT


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare_stages.py"


@pytest.mark.slow
def test_every_stage_is_compared(tmp_path):
    transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    ).save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", "--length", 32, "--steps", 2, "--budget", "20MB", "--output", tmp_path]
    done = subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["state_bytes"] > rows[1]["state_bytes"] > rows[3]["state_bytes"]
    assert 0 < rows[0]["micro_batch"] <= rows[3]["micro_batch"]
    assert all(row["tokens_per_second"] > 0 and row["peak_bytes"] > row["state_bytes"] for row in rows)
    assert "\nStage " in (tmp_path / "comparison.md").read_text()


@pytest.mark.parametrize(
    "words, says",
    [(["--model", "no/such/folder"], "is no local folder"), (["--model", "x", "--budget", "y"], "--budget y")],
)
def test_mistakes_are_told_in_one_line(words, says):
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
