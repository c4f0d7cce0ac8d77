"""`ZeroGRPOTrainer` at stages 1-3 logs and saves what the stock GRPOTrainer does under DDP."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification

from hf_zero.core.deferred import DeferredParameter
from hf_zero.core.engine import engine_of
from tests.support.harness import distributed
from tests.support.trainers import without_times
from tests.support.trl_runs import compare, digit_share, make_grpo, outcome, policy, shortness, tokenizer


CASES = {
    "beta_0": {},
    "beta": {"beta": 0.1},
    "several_rewards": {"rewards": (digit_share, shortness), "reward_weights": [1.0, 0.5]},
    "num_iterations": {"num_iterations": 2, "max_steps": 4, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "beta": 0.1},
}


@pytest.fixture
def base(tmp_path):
    """A saved policy: TRL loads the reference model from the same place."""
    policy().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def _run(stage, folder, base, **options):
    return outcome(make_grpo(stage, folder, model=base, **options), folder)


@pytest.mark.parametrize("case", CASES)
@distributed(world_size=2)
def test_equals_stock(tmp_path, base, case):
    stock = _run(None, tmp_path / "stock", base, **CASES[case])
    assert any(entry.get("reward_std", 0) > 0 for entry in stock[0]), stock[0]
    for stage in (1, 2, 3):
        compare(_run(stage, tmp_path / f"stage{stage}", base, **CASES[case]), stock, f"stage {stage}")


@distributed(world_size=2)
def test_synced_reference_equals_stock(tmp_path, base):
    """With the policy's own values mixed in, KL stays smaller than without."""
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    alone = _run(None, tmp_path / "alone", base, beta=0.1)
    stock = _run(None, tmp_path / "stock", base, **options)
    assert stock[0][2]["kl"] < 0.9 * alone[0][2]["kl"], (stock[0][2]["kl"], alone[0][2]["kl"])
    for stage in (2, 3):
        compare(_run(stage, tmp_path / f"stage{stage}", base, **options), stock, f"stage {stage}")


@distributed(world_size=2)
def test_synced_reference_with_frozen_weights(tmp_path, base):
    """Frozen weights lie in a buffer of their own: the shards of policy and reference do not match."""
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    stock, ours = (_frozen_run(stage, tmp_path / str(stage), base, options) for stage in (None, 3))
    compare(ours, stock, "stage 3")


def _frozen_run(stage, folder, base, options):
    trainer = make_grpo(stage, folder, model=base, **options)
    for layer in trainer.model.model.layers:
        layer.mlp.requires_grad_(False)
    return outcome(trainer, folder)


def _end_early(trainer):
    """Rank 1 is done after two tokens, rank 0 goes on: at stage 3 it must not wait for the other's gathers."""
    if dist.get_rank() == 1:
        trainer.generation_config.max_new_tokens = 2
        trainer.generation_config.forced_eos_token_id = tokenizer().eos_token_id
    return trainer


@distributed(world_size=2)
def test_early_end_on_one_rank(tmp_path, base):
    stock = outcome(_end_early(make_grpo(None, tmp_path / "stock", model=base)), tmp_path / "stock")
    for gather in ("auto", "all", "none"):
        folder = tmp_path / gather
        trainer = _end_early(make_grpo(3, folder, model=base, gather_for_generation=gather))
        compare(outcome(trainer, folder), stock, gather)
    trainer = _end_early(make_grpo(3, tmp_path / "ds3", model=base, ds3_gather_for_generation=False))
    assert trainer._dist.gather == "none"
    compare(outcome(trainer, tmp_path / "ds3"), stock, "ds3_gather_for_generation")


def _lora_run(stage, folder, base, **options):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(0)  # TRL 1.6 makes the adapter before the Trainer seeds
    trainer = make_grpo(stage, folder, model=base, others={"peft_config": lora}, **options)
    trainer.train()
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    return without_times(trainer.state.log_history), load_file(folder / "adapter_model.safetensors")


@distributed(world_size=2)
def test_lora_equals_stock(tmp_path, base):
    """With beta, the reference is the policy with its adapter switched off."""
    stock = _lora_run(None, tmp_path / "stock", base, beta=0.1)
    for stage in (2, 3):
        compare(_lora_run(stage, tmp_path / f"stage{stage}", base, beta=0.1), stock, f"stage {stage}")


@distributed(world_size=2)
def test_resume_continues_the_run(tmp_path, base):
    options = {"max_steps": 4, "beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    whole = _run(3, tmp_path / "whole", base, **options)
    trainer = make_grpo(3, tmp_path / "resumed", model=base, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    resumed = without_times(trainer.state.log_history)
    weights = load_file(tmp_path / "resumed" / "checkpoint-4" / "model.safetensors")
    assert [entry["step"] for entry in resumed] == [entry["step"] for entry in whole[0]]
    compare((resumed[2:-1], weights), (whole[0][2:-1], whole[1]), "resumed", tolerance=0.0)


def _scored_run(stage, folder, base):
    torch.manual_seed(3)
    scorer = LlamaForSequenceClassification(policy(num_labels=1).config)
    trainer = make_grpo(
        stage,
        folder,
        model=base,
        rewards=(scorer, digit_share),
        others={"reward_processing_classes": [tokenizer(), None]},
    )
    return outcome(trainer, folder)


@distributed(world_size=2)
def test_reward_model(tmp_path, base):
    stock = _scored_run(None, tmp_path / "stock", base)
    named = [key for key in stock[0][0] if key.startswith("rewards/") and key.endswith("/mean")]
    assert len(named) == 2 and "rewards/digit_share/mean" in named, named
    for stage in (2, 3):
        compare(_scored_run(stage, tmp_path / f"stage{stage}", base), stock, f"stage {stage}")


@distributed(world_size=2)
def test_models_by_name_are_never_whole(tmp_path, base):
    trainer = make_grpo(3, tmp_path / "run", model=base, beta=0.1)
    waiting = [name for name, param in trainer.model.named_parameters() if type(param) is not DeferredParameter]
    assert not waiting, f"read before they were sharded: {waiting}"
    reference = engine_of(trainer.ref_model)
    assert not reference.trainable and all(unit.sharded for unit in reference.units)
    assert not any(unit.state.value == "ready" for unit in reference.units)
