"""The command `hf-zero verify` as a user types it: what it prints, writes and returns."""

import json
import sys

import pytest

from hf_zero import cli
from tests.support import launches
from tests.support.launches import RECIPES


VERIFY = (sys.executable, "-m", "hf_zero.cli", "verify")


@pytest.mark.slow
def test_a_recipe_and_a_config_json_are_verified_on_two_ranks(tmp_path):
    model = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps({**model, "architectures": ["Qwen3ForCausalLM"]}))
    words = ("--config", RECIPES / "zero3.yaml", "--model", "config.json", "--steps", 2, "--mixed-precision", "no")
    (output,), (status,) = launches.run((*VERIFY, *words), folder=tmp_path)
    assert status == 0 and "every promise holds" in output, output
    written = json.loads((tmp_path / "certificate/certificate.json").read_text())
    assert written["holds"] and (written["ranks"], written["steps"], written["settings"]["zero_stage"]) == (2, 2, 3)
    assert written["model"] == "config.json" and written["micro_batches"] == 2 and written["clip"] > 0
    verdicts = {verdict["promise"]: verdict["verdict"] for verdict in written["verdicts"]}
    assert {verdicts[f"run of {what}"][:5] for what in ("DistributedDataParallel", "one process")} == {"holds"}


@pytest.mark.parametrize(
    "words, said",
    [
        (["train.py", "--lr", "1"], "train.py: scripts cannot be verified yet"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--output", "/proc/certificate"], "--output /proc/certificate cannot be written to"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_starts(capsys, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
