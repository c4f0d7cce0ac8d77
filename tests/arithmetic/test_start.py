"""What starting costs, in modules: a command and the first step of a Trainer import what they need, and no more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import LIMIT


ROOT = Path(__file__).parents[2]
ZERO3 = ROOT / "recipes/accelerate_configs/zero3.yaml"
_LARGE = {"torch", "numpy", "transformers", "accelerate", "datasets", "huggingface_hub", "matplotlib", "pydantic"}
_STEP = """
import json, sys
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def step(trainer, arguments, **options):
    options |= {"output_dir": sys.argv[1], "max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8))
    data = [{"input_ids": [1, 2], "labels": [1, 2]}] * 8
    trainer(model=model, args=arguments(disable_tqdm=True, **options), train_dataset=data).train()

step(Trainer, TrainingArguments)
before = set(sys.modules)
import hf_zero

step(hf_zero.ZeroTrainer, hf_zero.ZeroTrainingArguments, zero_config={"zero_stage": 3})
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _run(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["config", "--json", str(ZERO3)]])
def test_a_command_that_computes_nothing_imports_no_large_library(words):
    code = (
        "import contextlib, json, sys; from hf_zero import cli\n"
        f"with contextlib.suppress(SystemExit): cli.main({words!r})\n"
        "print(); print(json.dumps(sorted(sys.modules)))"
    )
    imported = _run(code)
    assert not _LARGE & set(imported)
    assert len(imported) < 600  # `import torch` alone brings twice as many


def test_the_first_step_imports_nothing_that_only_other_commands_use(tmp_path):
    more = _run(_STEP, str(tmp_path))
    theirs = {name.partition(".")[0] for name in more} - {"hf_zero", "__editable___hf_zero_0_1_0_finder"}
    assert theirs <= {"packaging", "accelerate"}
    unused = ("convert", "planning", "verify", "tools.doctor", "integrations.plain_loop", "lazy_init", "deepspeed")
    assert [name for name in more if name.startswith(tuple(f"hf_zero.{each}" for each in unused))] == []
