"""Parameters and buffers without elements are saved, resumed and verified like any other."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.checkpoint import commit
from tests.ranks.test_checkpoint import trainer_for
from tests.support.harness import distributed, run_ranks


class _WithNothing(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("nothing", torch.zeros(0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))


_SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_CONFIG = LlamaConfig(**_SIZES, num_attention_heads=4)


def _train(folder, stage, steps, resume=None, **arguments):
    torch.manual_seed(0)
    trainer = trainer_for(folder, stage, steps, model=_WithNothing(_CONFIG), **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.parametrize("arguments", [{}, {"bf16": True, "zero_async_save": True}])
@pytest.mark.parametrize("stage", (1, 3))
def test_the_trainer_saves_and_resumes(tmp_path, stage, arguments):
    whole = run_ranks(_train, str(tmp_path / "run"), stage, 6, **arguments)[0]
    folder = tmp_path / "run/checkpoint-3"
    commit.check_files(folder)
    commit.check_tensors(folder)
    saved = load_file(folder / "model.safetensors")
    assert saved["nothing"].shape == (0,) and saved["empty"].shape == (0, 3)
    resumed = run_ranks(_train, str(tmp_path / "again"), stage, 6, resume=str(folder), **arguments)[0]
    assert resumed == whole


@distributed(world_size=2)
def test_accelerate_saves_and_loads(tmp_path):
    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model = _WithNothing(_CONFIG)
    model = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))[0]
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    commit.check_tensors(tmp_path / "state")
