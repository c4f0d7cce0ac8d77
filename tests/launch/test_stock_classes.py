"""A script that was started for ZeRO but uses stock classes does not train under DDP: it ends, and names the line."""

import importlib
import sys

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.launcher import stock
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

args = TrainingArguments("out", report_to=[], max_steps=1)
Path(f"created_{os.environ['RANK']}").touch()
trainer = Trainer(torch.nn.Linear(2, 2), args, train_dataset=[{"input": torch.ones(2)}])
trainer.train()
"""


def test_the_literal_launch_of_a_stock_script_names_the_line_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = (*ACCELERATE, "--config_file", RECIPES / "zero3.yaml", "--num_processes", 2, "--mixed_precision", "no")
    (output,), (status,) = launches.run((*command, script), folder=tmp_path)
    assert status == 2, output
    line = "from hf_zero import ZeroTrainingArguments as TrainingArguments, ZeroTrainer as Trainer"
    assert output.count(f"Below {script}:5, which imports it, write\n    {line}\n") == 1, output
    assert output.count("transformers.Trainer would train under DDP") == 1
    assert "Traceback" not in output, output
    assert (tmp_path / "created_0").exists() and "train_runtime" not in output


def test_the_line_that_it_names_makes_the_script_run(tmp_path):
    line = "from hf_zero import ZeroTrainingArguments as TrainingArguments, ZeroTrainer as Trainer\n"
    head, tail = TRAIN.split(")\nimport torch")
    script = tmp_path / "train.py"
    script.write_text(f"{head})\n{line}import torch{tail.replace('trainer.train()', 'print(type(trainer).__mro__)')}")
    status, output = as_rank(tmp_path, script)
    assert status == 0 and "ZeroTrainerMixin" in output, output


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

try:
    transformers.Trainer(torch.nn.Linear(2, 2))
except ValueError as error:
    print("TRAINER", type(error).__name__, error)
accelerator = accelerate.Accelerator()
print("LOADER", type(accelerator.prepare([1])).__name__)
accelerator.prepare(torch.utils.data.DataLoader([1]))
try:
    accelerator.prepare(torch.nn.Linear(2, 2))
except ValueError as error:
    print("ACCELERATOR", type(error).__name__, error)
print("LEFT", [type(finder).__name__ for finder in sys.meta_path if "hf_zero" in type(finder).__module__])
"""


@pytest.mark.parametrize("first", FIRST_LINES)
def test_whatever_a_script_imports_first(tmp_path, first):
    script = tmp_path / "script.py"
    script.write_text(f"{FIRST_LINES[first]}\nimport accelerate, torch, transformers\n{BOTH}")
    status, output = as_rank(tmp_path, script)
    assert status == 0, output
    assert "TRAINER ZeroLaunchError this run was started for ZeRO stage 3" in output, output
    assert "ACCELERATOR ZeroLaunchError this run was started for ZeRO stage 3" in output, output
    assert "LEFT []" in output, output


@pytest.mark.parametrize(
    "stage, variables",
    [(0, {}), (3, {"HF_ZERO_CONFIG": None}), (3, {"LOCAL_RANK": None}), (3, {"HF_ZERO_LAUNCH_HOOK": "0"})],
    ids=["plain data parallelism", "another launcher", "no rank", "switched off"],
)
def test_everywhere_else_stock_classes_are_left_alone(tmp_path, stage, variables):
    script = tmp_path / "script.py"
    script.write_text(f"import accelerate, torch, transformers\n{BOTH}")
    status, output = as_rank(tmp_path, script, stage=stage, **variables)
    assert status == 0 and "LOADER" in output, output
    assert "TRAINER" not in output and "ACCELERATOR" not in output, output


CLASSES = """
import torch
from accelerate import Accelerator as Helper
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
import transformers
from trl import DPOTrainer, SFTConfig, SFTTrainer as Tuner
from mine import Own
from library import LibraryTrainer

def attempt(name, make):
    try:
        make()
    except ValueError as error:
        print(f"<{name}>{error}</{name}>")

if True:
    from trl import GRPOTrainer

attempt("indented", lambda: GRPOTrainer())
attempt("renamed", lambda: Tuner())
attempt("unlisted", lambda: Seq2SeqTrainer())
attempt("dpo", lambda: DPOTrainer())
attempt("subclass", lambda: Own())
attempt("library", lambda: LibraryTrainer())
attempt("attribute", lambda: transformers.Trainer())
attempt("accelerator", lambda: Helper().prepare(torch.nn.Linear(1, 1)))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("classes")
    (folder / "mine.py").write_text("from transformers import Trainer\n\nclass Own(Trainer):\n    pass\n")
    installed = folder / "lib/site-packages"
    installed.mkdir(parents=True)
    (installed / "library.py").write_text(
        "from transformers import Trainer as T\n\nclass LibraryTrainer(T):\n    pass\n"
    )
    script = folder / "script.py"
    script.write_text(f"import sys; sys.path.append({str(installed)!r})\n{CLASSES}")
    status, output = as_rank(folder, script)
    assert status == 0, output

    def between(name):
        return output.partition(f"<{name}>")[2].partition(f"</{name}>")[0].replace(f"{folder}/", "")

    return between


@pytest.mark.parametrize(
    "name, place, lines",
    [
        (
            "renamed",
            "Below script.py:7",
            "    from hf_zero.trl import ZeroSFTConfig as SFTConfig, ZeroSFTTrainer as Tuner",
        ),
        ("indented", "Below script.py:18", "        from hf_zero.trl import ZeroGRPOTrainer as GRPOTrainer"),
        (
            "unlisted",
            "Below script.py:5",
            "    from hf_zero import ZeroTrainerMixin\n"
            "    class Seq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer): pass",
        ),
        (
            "dpo",
            "Below script.py:7",
            "    from hf_zero.trl import ZeroTRLMixin\n    class DPOTrainer(ZeroTRLMixin, DPOTrainer): pass",
        ),
        (
            "library",
            "Below script.py:9",
            "    from hf_zero import ZeroTrainerMixin\n"
            "    class LibraryTrainer(ZeroTrainerMixin, LibraryTrainer): pass",
        ),
        ("subclass", "Below mine.py:1", "    from hf_zero import ZeroTrainer as Trainer"),
        ("accelerator", "Below script.py:4", "    from hf_zero import ZeroAccelerator as Helper"),
    ],
)
def test_the_line_to_write(said, name, place, lines):
    assert f"{place}, which imports it, write\n{lines}\n" in said(name), said(name)


def test_a_class_that_is_not_imported_by_name_is_named_where_it_is_used(said):
    assert "In script.py:26, use hf_zero.ZeroTrainer in its place" in said("attribute"), said("attribute")


def test_every_name_that_is_offered_exists():
    offered = [(home, name) for home, names in stock.READY_MADE.values() for name in names.values()]
    offered += [
        ("hf_zero", stock.TRAINER_MIXIN),
        ("hf_zero", stock.ACCELERATOR_MIXIN),
        ("hf_zero.trl", stock.TRL_MIXIN),
    ]
    for home, name in offered:
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
