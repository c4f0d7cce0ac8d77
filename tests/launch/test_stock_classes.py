"""Stock classes in a run for ZeRO become ours; with HF_ZERO_ADOPT=0 the run ends and says what to write."""

import sys

import pytest

from hf_zero.config import ZeroConfig
from tests.support import launches
from tests.support.launches import ACCELERATE, RECIPES


pytestmark = pytest.mark.slow

TRAIN = """import os
from transformers import (
    TrainingArguments,
    Trainer,
)
import torch
from pathlib import Path

class Net(torch.nn.Linear):
    def forward(self, input):
        return {"loss": super().forward(input).mean()}

args = TrainingArguments("out", report_to=[], max_steps=1)
Path(f"created_{os.environ['RANK']}").touch()
trainer = Trainer(Net(2, 2), args, train_dataset=[{"input": torch.ones(2)}])
trainer.train()
"""


COMMAND = (*ACCELERATE, "--config_file", RECIPES / "zero3.yaml", "--num_processes", 2, "--mixed_precision", "no")


def test_the_literal_launch_trains_a_stock_script_under_zero_and_says_so_once(tmp_path):
    script = tmp_path / "train.py"
    like = "print('LIKE ' + str([cls.__name__ for cls in type(trainer).__mro__][:2]))"
    script.write_text(f"{TRAIN}\n{like}\n")
    (output,), (status,) = launches.run((*COMMAND, script), folder=tmp_path)
    assert status == 0 and "train_runtime" in output, output
    assert output.count("LIKE ['Trainer', 'ZeroTrainerMixin']") == 2, output
    assert output.count("hf_zero: the script's Trainer runs under ZeRO stage 3, configured by HF_ZERO_CONFIG") == 1


def test_switched_off_the_literal_launch_of_a_stock_script_says_once_what_to_write(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (output,), (status,) = launches.run((*COMMAND, script), folder=tmp_path, HF_ZERO_ADOPT="0")
    assert status == 2, output
    assert output.count("\n    class ShardedTrainer(hf_zero.ZeroTrainerMixin, Trainer): pass\n") == 1, output
    assert output.count("transformers.Trainer would train under DDP") == 1
    line = next(number for number, text in enumerate(TRAIN.splitlines(), 1) if text.startswith("trainer = Trainer("))
    assert output.count(f"in {script}:{line}: trainer = Trainer(") == 1 and "Traceback" not in output, output
    assert (tmp_path / "created_0").exists() and "train_runtime" not in output


# -- one rank without a launcher ------------------------------------------------------------------------------------


def as_rank(folder, script, *, stage=3, **variables):
    """Run a script with the variables of a rank that hf_zero's launcher has started; returns (status, output)."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    config = ZeroConfig.from_any({"zero_stage": stage}).to_json()
    rank |= {"HF_ZERO_CONFIG": config, "ACCELERATE_USE_CPU": "true"}
    rank = {name: value for name, value in (rank | variables).items() if value is not None}
    (output,), (status,) = launches.run((sys.executable, script), folder=folder, **rank)
    return status, output


# Whichever module imports torch is half loaded when the hook is called.
FIRST_LINES = {
    "torch": "import torch",
    "accelerate": "from accelerate import Accelerator",
    "accelerate.accelerator": "import accelerate.accelerator",
    "transformers": "from transformers import Trainer",
    "transformers.trainer": "import transformers.trainer",
}
BOTH = """
import sys

from accelerate.utils import deepspeed

trainer = transformers.Trainer(torch.nn.Linear(2, 2))
accelerator = accelerate.Accelerator()
accelerator.prepare(torch.nn.Linear(2, 2))
for name, found in (("TRAINER", trainer), ("ACCELERATOR", accelerator)):
    print(name, any(base.__module__.startswith("hf_zero") for base in type(found).__mro__))
touched = [
    *(cls for cls in (transformers.Trainer, accelerate.Accelerator) if cls.__new__ is not object.__new__),
    *(f for f in (
        transformers.TrainingArguments.__post_init__,
        transformers.PreTrainedModel.from_pretrained.__func__,
        transformers.PreTrainedModel._from_config.__func__,
    ) if hasattr(f, "__wrapped__")),
    *(name for name in ("DummyOptim", "DummyScheduler") if hasattr(accelerate.utils, name)),
]
print("TOUCHED", len(touched))
print("LEFT", [type(finder).__name__ for finder in sys.meta_path if "hf_zero" in type(finder).__module__])
"""


# In short the first and the last: those between are half loaded at other places of the same way.
@pytest.mark.parametrize(
    "first",
    [
        name if name in ("torch", "transformers.trainer") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in FIRST_LINES
    ],
)
def test_whatever_a_script_imports_first(tmp_path, first):
    """Without the module that hf_zero's launcher puts in front, as under torchrun."""
    script = tmp_path / "script.py"
    script.write_text(f"{FIRST_LINES[first]}\nimport accelerate, torch, transformers\n{BOTH}")
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    status, output = as_rank(tmp_path, script, HF_ZERO_CONFIG=None, HF_ZERO_CONFIG_FILE=str(file))
    assert status == 0, output
    assert "TRAINER True\nACCELERATOR True\nTOUCHED 7\nLEFT []\n" in output, output


def test_outside_of_such_runs_nothing_is_touched(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import accelerate, torch, transformers\n{BOTH}")
    status, output = as_rank(tmp_path, script, HF_ZERO_CONFIG=None)
    assert status == 0, output
    assert "TRAINER False\nACCELERATOR False\nTOUCHED 0\nLEFT []\n" in output, output


NO_RANK = {"LOCAL_RANK": None, "WORLD_SIZE": None}


@pytest.mark.parametrize(
    "stage, variables, switch",
    [
        pytest.param(0, {}, "1", id="plain data parallelism"),
        pytest.param(3, NO_RANK, "1", id="no rank"),
        pytest.param(0, {}, "0", id="plain data parallelism, off", marks=pytest.mark.exhaustive),
        pytest.param(3, NO_RANK, "0", id="no rank, off", marks=pytest.mark.exhaustive),
    ],
)
def test_where_nothing_is_to_be_sharded_stock_classes_stay_what_they_are(tmp_path, stage, variables, switch):
    script = tmp_path / "script.py"
    script.write_text(f"import accelerate, torch, transformers\n{BOTH}")
    status, output = as_rank(tmp_path, script, stage=stage, HF_ZERO_ADOPT=switch, **variables)
    assert status == 0, output
    assert "TRAINER False\nACCELERATOR False\n" in output, output


NOTEBOOK = """
import torch
from accelerate import Accelerator, debug_launcher, notebook_launcher

def train():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    print(f"SHARDED {accelerator.num_processes} {hasattr(model, '_zero_engine')}\\n", end="", flush=True)

if __name__ == "__main__":
    debug_launcher(train, num_processes=2)
    notebook_launcher(train, num_processes=2)
"""


def test_ranks_that_a_notebook_starts_after_its_imports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NOTEBOOK)
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    (output,), (status,) = launches.run((sys.executable, script), folder=tmp_path, HF_ZERO_CONFIG_FILE=str(file))
    assert status == 0 and output.count("SHARDED 2 True\n") == 4, output


def test_an_import_of_deepspeed_says_what_to_write(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nimport deepspeed\n")
    status, output = as_rank(tmp_path, script)
    assert status == 2 and "Traceback" not in output, output
    assert "hf_zero: No module named 'deepspeed'. hf_zero runs in its place" in output, output
    assert f"in {script}:2: import deepspeed" in output, output


CLASSES = """
import hf_zero, torch
from accelerate import Accelerator
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from trl import DPOTrainer
import hf_zero.trl

class Own(Trainer):
    pass

def attempt(make):
    try:
        print("MADE", type(make()).__mro__[1].__name__)
    except ValueError as error:
        line = str(error).splitlines()[1].strip()
        print("WRITE", line)
        exec(line, globals())

net = torch.nn.Linear(1, 1)
arguments = Seq2SeqTrainingArguments("out", report_to=[])
for name in ("Trainer", "Seq2SeqTrainer", "Own", "Accelerator"):
    for front in ("", "Sharded"):
        cls = globals().get(front + name)
        if name == "Accelerator":
            attempt(lambda: [made := cls(), made.prepare(net)][0])
        else:
            attempt(lambda: cls(net, arguments))
attempt(lambda: DPOTrainer())
"""


def test_the_class_to_write_makes_the_script_run(tmp_path):
    pytest.importorskip("trl")
    script = tmp_path / "script.py"
    script.write_text(CLASSES)
    status, output = as_rank(tmp_path, script, HF_ZERO_ADOPT="0")
    said = [line for line in output.splitlines() if line.startswith(("WRITE", "MADE"))]
    assert (status, said) == (
        0,
        [
            "WRITE class ShardedTrainer(hf_zero.ZeroTrainerMixin, Trainer): pass",
            "MADE ZeroTrainerMixin",
            "WRITE class ShardedSeq2SeqTrainer(hf_zero.ZeroTrainerMixin, Seq2SeqTrainer): pass",
            "MADE ZeroTrainerMixin",
            "WRITE class ShardedOwn(hf_zero.ZeroTrainerMixin, Own): pass",
            "MADE ZeroTrainerMixin",
            "WRITE class ShardedAccelerator(hf_zero.ZeroAccelerator, Accelerator): pass",
            "MADE ZeroAccelerator",
            "WRITE class ShardedDPOTrainer(hf_zero.trl.ZeroTRLMixin, DPOTrainer): pass",
        ],
    ), output
