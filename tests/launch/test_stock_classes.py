"""Stock classes in a run for ZeRO become ours; with HF_ZERO_ADOPT=0 the run ends and names the line to change."""

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
    script.write_text(f"{TRAIN}\nprint('LIKE', [cls.__name__ for cls in type(trainer).__mro__][:2])\n")
    (output,), (status,) = launches.run((*COMMAND, script), folder=tmp_path)
    assert status == 0 and "train_runtime" in output, output
    assert output.count("LIKE ['Trainer', 'ZeroTrainerMixin']") == 2, output
    assert output.count("hf_zero: the script's Trainer runs under ZeRO stage 3, configured by HF_ZERO_CONFIG") == 1


def test_switched_off_the_literal_launch_of_a_stock_script_names_the_line_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (output,), (status,) = launches.run((*COMMAND, script), folder=tmp_path, HF_ZERO_ADOPT="0")
    assert status == 2, output
    line = "from hf_zero import ZeroTrainingArguments as TrainingArguments, ZeroTrainer as Trainer"
    assert output.count(f"below {script}:5, which imports it, write\n    {line}\n") == 1, output
    assert output.count("transformers.Trainer would train under DDP") == 1
    assert "Traceback" not in output, output
    assert (tmp_path / "created_0").exists() and "train_runtime" not in output


def test_the_line_that_it_names_makes_the_script_run(tmp_path):
    line = "from hf_zero import ZeroTrainingArguments as TrainingArguments, ZeroTrainer as Trainer\n"
    head, tail = TRAIN.split(")\nimport torch")
    script = tmp_path / "train.py"
    script.write_text(f"{head})\n{line}import torch{tail.replace('trainer.train()', 'print(type(trainer).__mro__)')}")
    status, output = as_rank(tmp_path, script, HF_ZERO_ADOPT="0")
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


@pytest.mark.parametrize("first", FIRST_LINES)
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


@pytest.mark.parametrize(
    "stage, variables",
    [(0, {}), (3, {"LOCAL_RANK": None, "WORLD_SIZE": None})],
    ids=["plain data parallelism", "no rank"],
)
@pytest.mark.parametrize("switch", ["0", "1"])
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
    assert status == 1 and "Traceback" not in output, output
    assert "hf_zero: No module named 'deepspeed'. hf_zero runs in its place" in output, output
    assert f"in {script}:2: import deepspeed" in output, output


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
    status, output = as_rank(folder, script, HF_ZERO_ADOPT="0")
    assert status == 0, output

    def between(name):
        return output.partition(f"<{name}>")[2].partition(f"</{name}>")[0].replace(f"{folder}/", "")

    return between


@pytest.mark.parametrize(
    "name, place, lines",
    [
        (
            "renamed",
            "below script.py:7",
            "    from hf_zero.trl import ZeroSFTConfig as SFTConfig, ZeroSFTTrainer as Tuner",
        ),
        ("indented", "below script.py:18", "        from hf_zero.trl import ZeroGRPOTrainer as GRPOTrainer"),
        (
            "unlisted",
            "below script.py:5",
            "    from hf_zero import ZeroTrainerMixin\n"
            "    class Seq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer): pass",
        ),
        (
            "dpo",
            "below script.py:7",
            "    from hf_zero.trl import ZeroTRLMixin\n    class DPOTrainer(ZeroTRLMixin, DPOTrainer): pass",
        ),
        (
            "library",
            "below script.py:9",
            "    from hf_zero import ZeroTrainerMixin\n"
            "    class LibraryTrainer(ZeroTrainerMixin, LibraryTrainer): pass",
        ),
        ("subclass", "below mine.py:1", "    from hf_zero import ZeroTrainer as Trainer"),
        ("accelerator", "below script.py:4", "    from hf_zero import ZeroAccelerator as Helper"),
    ],
)
def test_the_line_to_write(said, name, place, lines):
    assert f"{place}, which imports it, write\n{lines}\n" in said(name), said(name)


def test_a_class_that_is_not_imported_by_name_is_named_where_it_is_used(said):
    assert "in script.py:26, use hf_zero.ZeroTrainer in its place" in said("attribute"), said("attribute")


def test_every_name_that_is_offered_exists():
    offered = [(home, name) for home, names in stock.READY_MADE.values() for name in names.values()]
    offered += [
        ("hf_zero", stock.TRAINER_MIXIN),
        ("hf_zero", stock.ACCELERATOR_MIXIN),
        ("hf_zero.trl", stock.TRL_MIXIN),
    ]
    for home, name in offered:
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
