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


SCRIPT = """
import sys
import transformers
from tests.support.trainers import make_data
from tests.support import zoo
from hf_zero import ZeroTrainer, ZeroTrainingArguments

transformers.set_seed(0)
rate = float(sys.argv[sys.argv.index("--learning_rate") + 1])
args = ZeroTrainingArguments(
    "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5, max_grad_norm=0.1,
    learning_rate=rate, report_to=[], disable_tqdm=True, save_strategy="no",
)
ZeroTrainer(zoo.build("llama_tied"), args, train_dataset=make_data("llama_tied", 40)).train()
"""


@pytest.mark.slow
def test_a_script_is_run_twice_and_its_steps_are_compared(tmp_path):
    """Also with settings that stage 0 does not have."""
    (tmp_path / "train.py").write_text(SCRIPT)
    zero = {"stage": 3, "zero_quantized_gradients": True, "offload_param": {"device": "cpu"}}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero}))
    words = ("--config", "zero.json", "--steps", 2, "train.py", "--learning_rate", "1e-3")
    (output,), (status,) = launches.run((*VERIFY, *words), folder=tmp_path)
    assert status == 0 and "every promise holds" in output, output
    written = json.loads((tmp_path / "certificate/certificate.json").read_text())
    assert (written["model"], written["steps"], written["micro_batches"]) == ("train.py --learning_rate 1e-3", 2, 2)
    assert written["system"] == "hf_zero, stage 3, beside hf_zero, stage 0", written["system"]
    promises = {verdict["promise"]: verdict["verdict"][:5] for verdict in written["verdicts"]}
    assert set(promises.values()) == {"holds"} and "gradients, clipped" in promises, promises


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp_size", "sp_size"])
def test_a_script_whose_ranks_share_batches_is_compared_with_fewer_ranks_that_share_none(tmp_path, name):
    (tmp_path / "train.py").write_text(SCRIPT.replace("llama_tied", "llama"))
    lines = ("distributed_type: DEEPSPEED", "deepspeed_config:", "  zero_stage: 3", "parallelism_config:")
    (tmp_path / "zero.yaml").write_text("\n".join([*lines, f"  parallelism_config_{name}: 2\n"]))
    words = ("--config", "zero.yaml", "--steps", 2, "--num-processes", 4, "train.py", "--learning_rate", "1e-3")
    (output,), (status,) = launches.run((*VERIFY, *words), folder=tmp_path)
    assert status == 0 and "every promise holds" in output, output
    written = json.loads((tmp_path / "certificate/certificate.json").read_text())
    assert (written["ranks"], written["micro_batches"], written["settings"][name]) == (4, 2, 2)
    verdicts = {verdict["promise"]: verdict["verdict"][:5] for verdict in written["verdicts"]}
    cut = {"data"} if name == "sp_size" else set()
    assert {promise for promise, verdict in verdicts.items() if verdict != "holds"} == cut, verdicts


@pytest.mark.parametrize(
    "words, said",
    [
        (["train.py", "--lr", "1"], "there is no script 'train.py'"),
        (["--model", "m", "train.py"], "--model and a script both say what is to be trained"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--output", "/proc/certificate"], "--output /proc/certificate cannot be written to"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_starts(capsys, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
