"""`ZeroTrainer` at stages 1-3 logs and saves what the stock Trainer logs and saves under DDP."""

import pytest

from tests.support.harness import distributed
from tests.support.trainers import compare_logs, compare_weights, make_trainer, saved_weights, train, without_times


STAGES = (1, 2, 3)
# Eleven micro-batches in windows of four: the last window is ragged. Two epochs, evaluation in between.
LONG = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


@pytest.mark.parametrize(
    "name, optim, checkpointing",
    [
        ("llama", "sgd", False),
        ("llama", "adamw_torch", True),
        ("llama_tied", "sgd", True),
        ("llama_tied", "adamw_torch", False),
        ("qwen2", "sgd", True),
        ("qwen2", "adamw_torch", False),
        ("qwen3", "sgd", False),
        ("qwen3", "adamw_torch_fused", True),
    ],
)
@distributed(world_size=2)
def test_the_whole_run(tmp_path, name, optim, checkpointing):
    options = {**LONG, "optim": optim, "gradient_checkpointing": checkpointing}
    history, weights = train(name, None, tmp_path / "stock", **options)
    counts = [sum(key in entry for entry in history) for key in ("loss", "eval_loss")]
    assert counts == [6, 3], counts
    for stage in STAGES:
        ours, mine = train(name, stage, tmp_path / f"stage{stage}", **options)
        compare_logs(ours, history, f"stage {stage}")
        compare_weights(mine, weights, f"stage {stage}")


@distributed(world_size=2)
def test_every_stage_without_clipping(tmp_path):
    options = {"gradient_accumulation_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
    history, weights = train("llama_tied", None, tmp_path / "stock", **options)
    for stage in (0, *STAGES):
        ours, mine = train("llama_tied", stage, tmp_path / f"stage{stage}", **options)
        compare_logs(ours, history, f"stage {stage}")
        compare_weights(mine, weights, f"stage {stage}")


@pytest.mark.parametrize("name", ["t5", "bert", "vit", "whisper", "mixtral"])
@distributed(world_size=2)
def test_other_families(tmp_path, name):
    options = {"gradient_accumulation_steps": 2, "optim": "sgd", "ddp_find_unused_parameters": False}
    history, weights = train(name, None, tmp_path / "stock", **options)
    for stage in (2, 3):
        ours, mine = train(name, stage, tmp_path / f"stage{stage}", **options)
        compare_logs(ours, history, f"stage {stage}")
        compare_weights(mine, weights, f"stage {stage}")


def _twice(stage, folder):
    """Train, go on for another run of the same trainer, and evaluate and predict afterwards."""
    trainer = make_trainer("llama_tied", stage, folder, gradient_accumulation_steps=2, optim="sgd")
    trainer.train()
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    history = without_times(trainer.state.log_history)
    return history, evaluated, predicted.predictions, saved_weights(trainer, folder)


@distributed(world_size=2)
def test_train_twice_then_evaluate_and_predict(tmp_path):
    history, evaluated, predicted, weights = _twice(None, tmp_path / "stock")
    for stage in STAGES:
        ours = _twice(stage, tmp_path / f"stage{stage}")
        compare_logs(ours[0], history, f"stage {stage}")
        assert abs(ours[1] - evaluated) <= 1e-6 * evaluated, f"stage {stage}: {ours[1]} {evaluated}"
        assert ours[2].shape == predicted.shape and abs(ours[2] - predicted).max() <= 1e-5, f"stage {stage}"
        compare_weights(ours[3], weights, f"stage {stage}")


@distributed(world_size=2)
def test_evaluate_before_train(tmp_path):
    """Stock DDP then trains every rank alone; ours trains as if nothing had been evaluated."""
    options = {"gradient_accumulation_steps": 2, "optim": "sgd"}
    history, weights = train("llama", None, tmp_path / "stock", **options)
    before = make_trainer("llama", None, tmp_path / "untrained", **options).evaluate()["eval_loss"]
    for stage in STAGES:
        trainer = make_trainer("llama", stage, tmp_path / f"stage{stage}", **options)
        loss = trainer.evaluate()["eval_loss"]
        assert abs(loss - before) <= 1e-6 * before, f"stage {stage}: {loss} {before}"
        trainer.train()
        ours = [entry for entry in without_times(trainer.state.log_history) if entry["step"] > 0]
        compare_logs(ours, history, f"stage {stage}")
        compare_weights(saved_weights(trainer, tmp_path / f"stage{stage}"), weights, f"stage {stage}")


@distributed(world_size=2)
def test_bf16_is_the_same_at_every_stage(tmp_path):
    options = {"bf16": True, "optim": "adamw_torch"}
    runs = [train("llama_tied", stage, tmp_path / f"stage{stage}", **options) for stage in (0, *STAGES)]
    for stage in STAGES:
        compare_logs(runs[stage][0], runs[0][0], f"stage {stage}")
        compare_weights(runs[stage][1], runs[0][1], f"stage {stage}", tolerance=0.0)
