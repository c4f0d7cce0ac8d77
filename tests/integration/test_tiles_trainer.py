"""`ZeroTrainer` with losses and MLPs in tiles logs, evaluates and saves what the stock Trainer does."""

import pytest
import torch
import transformers
from packaging.version import Version

from hf_zero.errors import ZeroConfigError, ZeroRuntimeError
from tests.support.harness import distributed
from tests.support.trainers import compare_logs, compare_weights, make_trainer, saved_weights, train, without_times
from tests.support.trl_runs import GRPO, SFT, compare, make, outcome, prompts


TILES = {"zero_tile_loss": 5, "zero_tile_mlp": 6}
# Windows of several micro-batches, the last one ragged, whose numbers of counted labels differ.
COMMON = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 1,
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "optim": "sgd",
}
CASES = {
    "plain": {},
    "smoothed": {"label_smoothing_factor": 0.1},
    "loss only": {"prediction_loss_only": True},
    "by batches": {"average_tokens_across_devices": False},
    "checkpointed": {"gradient_checkpointing": True},
}


_averages = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.8"),
    reason="transformers 5.3 adds up smoothed losses of micro-batches instead of averaging them",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=_averages if case == "smoothed" else pytest.mark.exhaustive) for case in CASES],
)
@distributed(world_size=2)
def test_a_whole_run(tmp_path, case):
    options = {**COMMON, **CASES[case]}
    history, weights = train("llama_tied", None, tmp_path / "stock", **options)
    assert any("eval_loss" in entry for entry in history)
    for stage in (1, 3):
        ours, mine = train("llama_tied", stage, tmp_path / f"stage{stage}", **options, **TILES)
        compare_logs(ours, history, f"stage {stage}")
        compare_weights(mine, weights, f"stage {stage}")


@pytest.mark.parametrize("factor", [0.0, pytest.param(0.2, marks=pytest.mark.exhaustive)])
@distributed(world_size=2)
def test_routers_and_smoothing_of_experts(tmp_path, factor):
    """Trainer's smoothed loss has no part of the router's."""
    options = {"optim": "sgd", "label_smoothing_factor": factor, "max_steps": 3}
    history, weights = train("mixtral", None, tmp_path / "stock", **options)
    ours, mine = train("mixtral", 3, tmp_path / "ours", zero_tile_loss=5, **options)
    compare_logs(ours, history, f"smoothing {factor}")
    compare_weights(mine, weights, f"smoothing {factor}")


def _right(predicted):
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def _evaluate(stage, folder, **options):
    torch.manual_seed(0)
    trainer = make_trainer("llama", stage, folder, others={"compute_metrics": _right}, optim="sgd", **options)
    trainer.train()
    return without_times([trainer.evaluate()])[0], trainer.predict(trainer.eval_dataset).predictions


@distributed(world_size=2)
def test_metrics_get_whole_logits(tmp_path):
    (metrics, logits), (ours, mine) = _evaluate(None, tmp_path / "a"), _evaluate(3, tmp_path / "b", **TILES)
    assert ours.keys() == metrics.keys() and ours["eval_right"] == metrics["eval_right"], (ours, metrics)
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(logits), atol=1e-5, rtol=0)


@distributed(world_size=2)
def test_evaluation_of_losses_alone_needs_no_logits(tmp_path):
    trainer = make_trainer("llama", 3, tmp_path, prediction_loss_only=True, **TILES)
    trainer.train()
    seen = []
    whole = torch.nn.Linear.forward

    def note(module, x):
        seen.append(tuple(whole(module, x).shape)) if module.out_features == 64 else None
        return whole(module, x)

    torch.nn.Linear.forward = note
    trainer.evaluate()
    assert seen and max(shape[-2] * shape[0] for shape in seen) == 5, set(seen)


@distributed(world_size=2)
def test_files_are_the_same_and_training_goes_on_without_tiles(tmp_path):
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    trainer = make_trainer("llama", 2, tmp_path / "tiles", **options, **TILES)
    trainer.train()
    weights = saved_weights(trainer, tmp_path / "tiles")
    other = make_trainer("llama", 3, tmp_path / "whole", **options)
    other.train(resume_from_checkpoint=str(tmp_path / "tiles" / "checkpoint-3"))
    compare_weights(saved_weights(other, tmp_path / "whole"), weights, "resumed without tiles")


def _mean(outputs, labels, num_items_in_batch=None):
    return outputs.logits.float().mean()


@distributed(world_size=1)
def test_a_loss_of_whole_logits_is_refused(tmp_path):
    trainer = make_trainer("llama", 0, tmp_path, others={"compute_loss_func": _mean}, zero_tile_loss=5)
    with pytest.raises(ZeroConfigError, match="compute_loss_func"):
        trainer.train()


@distributed(world_size=2)
def test_trl_tiles_the_loss_itself_and_takes_tiles_of_mlps(tmp_path):
    for kind, more in ((SFT, {}), (GRPO, {"reward_funcs": [lambda completions, **_: [0.0] * len(completions)]})):
        data = prompts() if kind is GRPO else None
        settings = {"num_generations": 2, "max_completion_length": 4} if kind is GRPO else {}
        trainer = make(
            kind, 2, tmp_path / "refused", others=more, data=data, zero_tile_loss=16, max_steps=1, **settings
        )
        # An SFTTrainer of TRL 1.6 that computes a plain loss is told when it asks for the logits.
        with pytest.raises((ZeroConfigError, ZeroRuntimeError), match="TRL|whole logits"):
            trainer.train()
    options = {"max_steps": 2, "gradient_accumulation_steps": 2}
    stock = outcome(make(SFT, None, tmp_path / "stock", **options), tmp_path / "stock")
    ours = outcome(make(SFT, 3, tmp_path / "ours", zero_tile_mlp=16, **options), tmp_path / "ours")
    compare(ours, stock, "SFT with tiles of MLPs")
