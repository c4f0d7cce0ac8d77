"""Stock scripts share sequences out over ranks where an Accelerate YAML or a flag of the launcher says so."""

import pytest
import yaml

from tests.support.launches import ACCELERATE, HF_ZERO, RECIPES, run


pytestmark = pytest.mark.slow

LAUNCH = (*ACCELERATE, "--config_file")

MODEL = """
import torch
import transformers as tf
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1)
model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=64, **sizes))
data = [dict(input_ids=row, labels=row) for row in torch.randint(64, (24, 10), generator=torch.Generator())]
"""
TRAINER = f"""{MODEL}
args = tf.TrainingArguments("out", report_to=[], max_steps=3, per_device_train_batch_size=2, logging_steps=1, seed=1)
trainer = tf.Trainer(model, args, train_dataset=data)
trainer.train()
losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
"""
LOOP = f"""{MODEL}
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator()
loader = DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
losses = []
for batch, _ in zip(loader, range(3)):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(round(accelerator.gather(loss.detach()).mean().item(), 4))
"""
SAY = """
print("LOSSES " + str(losses) + "\\n", end="")
"""


def _losses(command, script, folder):
    (output,), (status,) = run((*command, "--mixed_precision", "no", script), folder=folder)
    assert status == 0, output
    found = [line for line in output.splitlines() if line.startswith("LOSSES")]
    assert len(set(found)) == 1, output
    return found[0]


def _script(folder, text):
    script = folder / "train.py"
    script.write_text(text + SAY)
    return script, _losses((*LAUNCH, RECIPES / "zero3.yaml", "--num_processes", 2), script, folder)


def test_a_flag_of_the_launcher_shares_sequences(tmp_path):
    script, whole = _script(tmp_path, LOOP)
    flags = ("--num_processes", 4, "--parallelism_config_sp_size", 2)
    assert _losses((*HF_ZERO, "--config_file", RECIPES / "zero3.yaml", *flags), script, tmp_path) == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", [TRAINER, LOOP], ids=["trainer", "loop"])
def test_an_unmodified_script_trains_as_with_whole_sequences(text, tmp_path):
    script, whole = _script(tmp_path, text)
    settings = yaml.safe_load((RECIPES / "zero3_sequences.yaml").read_text())
    settings["parallelism_config"]["parallelism_config_sp_size"] = 2
    shared = tmp_path / "shared.yaml"
    shared.write_text(yaml.safe_dump(settings))
    assert _losses((*LAUNCH, shared, "--num_processes", 4), script, tmp_path) == whole
