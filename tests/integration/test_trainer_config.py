"""Configuration through the Trainer: DeepSpeed files, their optimizer and scheduler, conflicts, accumulation."""

import json
import math

import pytest
import torch

from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.transformers import resolved_plugin
from tests.support.harness import distributed, run_ranks


STEPS = 6
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def make(folder, arguments, class_name="ZeroTrainer", examples=48):
    import transformers

    import hf_zero

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (examples, 8), generator=generator).tolist()
    # Labels of different lengths: the loss is a mean over tokens, whose number differs by micro-batch and rank.
    data = [{"input_ids": row, "labels": [-100] * (i % 6) + row[i % 6 :]} for i, row in enumerate(rows)]
    shared = {"output_dir": folder, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    home, args_class = (
        (hf_zero, "ZeroTrainingArguments") if class_name == "ZeroTrainer" else (transformers, "TrainingArguments")
    )
    args = getattr(home, args_class)(**shared, **arguments)
    return getattr(home, class_name)(model=transformers.LlamaForCausalLM(config), args=args, train_dataset=data)


@distributed(world_size=2)
def test_a_deepspeed_json_builds_the_optimizer_and_the_scheduler(tmp_path):
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(DEEPSPEED))
    trainer = make(
        str(tmp_path / "out"),
        {
            "deepspeed": str(path),
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
        },
    )
    trainer.train()
    group = trainer.optimizer.param_groups[0]
    assert trainer.accelerator.zero_plugin.config.zero_stage == 3
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW"
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-6, 0.1)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert max(rates) == pytest.approx(0.01) and rates[-1] <= 0.01 / 2 and rates[0] < 0.01, rates


@distributed(world_size=1)
def test_conflicts_are_found_before_anything_is_loaded(tmp_path):
    import hf_zero

    path = tmp_path / "zero2.json"
    text = {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 8,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 0.5,
    }
    path.write_text(json.dumps(text, indent=1))
    with pytest.raises(ZeroConfigError) as caught:
        hf_zero.ZeroTrainingArguments(output_dir=str(tmp_path), deepspeed=str(path), gradient_accumulation_steps=4)
    assert len(caught.value.problems) == 3
    message = str(caught.value)
    for expected in ("gradient_accumulation_steps differs", "zero2.json:5", "gradient_clipping differs", "write"):
        assert expected in message, message


@distributed(world_size=1)
def test_equal_values_are_no_conflict_however_they_are_written(tmp_path):
    import hf_zero

    for written in ("4", 4, "auto"):
        config = {
            "zero_optimization": {"stage": 2},
            "gradient_accumulation_steps": written,
            "gradient_clipping": "1.0",
        }
        args = hf_zero.ZeroTrainingArguments(
            output_dir=str(tmp_path), deepspeed=config, gradient_accumulation_steps=4, per_device_train_batch_size=2
        )
        plugin = resolved_plugin(args)
        assert plugin.config.gradient_accumulation_steps == 4
        assert plugin.config.train_batch_size == 8


@distributed(world_size=1)
def test_two_files_are_one_too_many(tmp_path):
    import hf_zero

    with pytest.raises(ZeroConfigError, match="both --deepspeed and --zero_config"):
        hf_zero.ZeroTrainingArguments(output_dir=str(tmp_path), deepspeed={}, zero_config={"zero_stage": 1})


@distributed(world_size=1)
def test_a_trainer_that_shards_nothing_does_not_take_our_arguments(tmp_path):
    import transformers

    import hf_zero

    trainer = make(str(tmp_path), {"zero_stage": 3})  # that one was made before is no excuse
    args = hf_zero.ZeroTrainingArguments(output_dir=str(tmp_path), zero_stage=3)
    with pytest.raises(ZeroConfigError, match=r"not hf_zero's, .* shard nothing: use hf_zero.ZeroTrainer"):
        transformers.Trainer(model=trainer.model, args=args)


def losses(folder, class_name, arguments, examples=48):
    trainer = make(folder, arguments, class_name, examples)
    trainer.train()
    history = trainer.state.log_history
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return [entry["loss"] for entry in history if "loss" in entry], weights


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("examples", [48, 44])
def test_accumulation_equals_one_process_with_large_batches(tmp_path, stage, examples):
    """44 examples make a ragged last window: it is divided by its own size."""
    shared = {"num_train_epochs": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5, "optim": "sgd"}
    many = {**shared, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "zero_stage": stage}
    one = {**shared, "per_device_train_batch_size": 16, "use_cpu": True}
    ours, weights = run_ranks(losses, str(tmp_path / "a"), "ZeroTrainer", many, examples, world_size=2)[0]
    theirs, reference = run_ranks(losses, str(tmp_path / "b"), "Trainer", one, examples, world_size=1)[0]
    assert len(ours) == len(theirs) == math.ceil(examples / 16)
    for mine, stock in zip(ours, theirs, strict=True):
        assert abs(mine - stock) <= 1e-6 * max(1.0, stock), (ours, theirs)
    for name, value in reference.items():
        assert (weights[name] - value).abs().max() <= 1e-6, name


@distributed(world_size=2)
def test_bf16_works_where_there_is_no_accelerator(tmp_path):
    trainer = make(str(tmp_path), {"zero_stage": 3, "bf16": True, "max_steps": 2})
    trainer.train()
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert trainer.accelerator.zero_plugin.config.mixed_precision == "bf16"


@pytest.mark.parametrize("stage, units", [(3, ["(persistent)"]), (2, [])])
@distributed(world_size=2)
def test_automatic_sizes_follow_the_width_of_the_model(tmp_path, stage, units):
    from hf_zero.core.engine import engine_of

    sizes = {"stage3_param_persistence_threshold": "auto", "reduce_bucket_size": "auto"}
    config = {"zero_optimization": {"stage": stage, **(sizes if stage == 3 else {"reduce_bucket_size": "auto"})}}
    trainer = make(str(tmp_path), {"deepspeed": config, "max_steps": 1, "max_grad_norm": 0.0})
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine.config.reduce_bucket_size == 32 * 32
    assert "hidden_size squared" in engine.config.origins["reduce_bucket_size"].reason
    whole = [unit.name for unit in engine.units if unit.name == "(persistent)"]
    assert whole == units
    if stage == 3:
        assert engine.config.stage3_param_persistence_threshold == 320
        assert engine.units[0].numel == 5 * 32  # the norms of two layers, and the last one
