"""`ZeroSFTTrainer` at stages 1-3 logs and saves what the stock SFTTrainer does under DDP."""

import pytest
from peft import LoraConfig
from safetensors.torch import load_file

from tests.support.harness import distributed
from tests.support.trainers import without_times
from tests.support.trl_runs import SFT, compare, make, outcome


CASES = {
    "plain": {},
    "packing": {"packing": True, "max_length": 48, "packing_strategy": "bfd"},
    "assistant_only": {"assistant_only_loss": True},
    "checkpointing": {"gradient_checkpointing": True, "assistant_only_loss": True},
    "nll_loss": {"loss_type": "nll"},
}
COMMON = {"max_steps": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}


@pytest.mark.parametrize("case", CASES)
@distributed(world_size=2)
def test_equals_stock(tmp_path, case):
    options = {**COMMON, **CASES[case]}
    stock = outcome(make(SFT, None, tmp_path / "stock", **options), tmp_path / "stock")
    assert len({entry.get("loss") for entry in stock[0]}) == 3, stock[0]
    for stage in (1, 2, 3):
        folder = tmp_path / f"stage{stage}"
        compare(outcome(make(SFT, stage, folder, **options), folder), stock, f"stage {stage}")


def _lora(**settings):
    return LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", **settings
    )


def _lora_outcome(stage, folder, **options):
    trainer = make(SFT, stage, folder, others={"peft_config": _lora()}, **{**COMMON, **options})
    trainer.train()
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    return without_times(trainer.state.log_history), load_file(folder / "adapter_model.safetensors")


@distributed(world_size=2)
def test_lora_equals_stock(tmp_path):
    """Plain and with both kinds of checkpointing; DDP itself cannot run the reentrant kind."""
    stock = _lora_outcome(None, tmp_path / "stock")
    for stage in (2, 3):
        compare(_lora_outcome(stage, tmp_path / f"stage{stage}"), stock, f"stage {stage}")
        for reentrant in (False, True):
            options = {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
            }
            what = f"stage {stage}, use_reentrant={reentrant}"
            compare(_lora_outcome(stage, tmp_path / f"{stage}{reentrant}", **options), stock, what)
