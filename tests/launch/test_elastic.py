"""torchrun starts ranks again after one was killed, and the run ends as one that nobody disturbed."""

import json
import math
import re

import psutil
import pytest
from safetensors.torch import load_file

from tests.support.harness import LIMIT
from tests.support.launches import TORCHRUN, run


pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT)]

STEPS, SAVE_STEPS, KILLED_AT = 20, 5, 13
SCRIPT = f"""
import os, shutil, signal, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from hf_zero import ZeroTrainer, ZeroTrainingArguments

output, victim = Path(sys.argv[1]), sys.argv[2]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class Dies(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        print(f"begins after step {{state.global_step}}\\n", end="", flush=True)

    def on_step_end(self, args, state, control, **_):
        if first and state.global_step == {KILLED_AT} and os.environ["RANK"] == victim:
            newest = output / "checkpoint-{KILLED_AT - KILLED_AT % SAVE_STEPS}"
            torn = shutil.ignore_patterns("COMMIT")
            shutil.copytree(newest, output / "checkpoint-{KILLED_AT}", ignore=torn)
            os.kill(os.getpid(), signal.SIGKILL)


set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    attention_dropout=0.1,
))
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 64, (64, 16))]
args = ZeroTrainingArguments(
    output, zero_stage=3, per_device_train_batch_size=2, max_steps={STEPS}, save_steps={SAVE_STEPS}, logging_steps=1,
    learning_rate=1e-2, report_to="none", disable_tqdm=True,
)
trainer = ZeroTrainer(model, args, train_dataset=rows, callbacks=[Dies()])
saved = output.exists() and any(path.name.startswith("checkpoint-") for path in output.iterdir())
trainer.train(resume_from_checkpoint=saved)
trainer.save_model()
"""


def _losses(folder):
    history = json.loads((folder / f"checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry}


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_ranks_that_torchrun_starts_again_end_where_undisturbed_ones_do(tmp_path, victim):
    """The newest checkpoint lacks its COMMIT then, so they begin at the one before, and repeat some steps."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = (*TORCHRUN, "--nproc-per-node", 2, "--max-restarts", 1, script)
    commands = [(*launch, tmp_path / "killed", victim), (*launch, tmp_path / "undisturbed", -1)]
    # See docs/installation.md: torch keeps addresses of the dead ranks otherwise.
    outputs, statuses = run(*commands, folder=tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert statuses == [0, 0], "\n".join(outputs)
    assert "exitcode: -9" in outputs[0], outputs[0]
    assert re.findall(r"begins after step (\d+)", outputs[0]) == ["0", "0", "10", "10"], outputs[0]
    assert re.search(rf"checkpoint-{KILLED_AT}.*no COMMIT", outputs[0]), outputs[0]

    losses = _losses(tmp_path / "undisturbed")
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS][0] < math.log(64)
    assert _losses(tmp_path / "killed") == losses
    killed, undisturbed = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "undisturbed"))
    assert killed.keys() == undisturbed.keys()
    assert not [name for name, value in killed.items() if not value.equal(undisturbed[name])]
    assert not [process for process in psutil.process_iter() if str(script) in _words(process)]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
