"""`bf16_full_eval` and `fp16_full_eval` evaluate, predict and save as with the stock Trainer."""

import pytest
import torch

from tests.support.harness import distributed
from tests.support.trainers import compare_weights, make_trainer, saved_weights


STAGES = (0, 1, 2, 3)
# Stages 0 and 1 take the same way as stage 2 does: whole weights that are cast for evaluation.
SOME_STAGES = [pytest.param(stage, marks=[pytest.mark.exhaustive] * (stage < 2)) for stage in STAGES]
OPTIONS = {"optim": "sgd", "max_grad_norm": 0.0}


def _train_and_evaluate(name, stage, folder, **options):
    torch.manual_seed(0)
    trainer = make_trainer(name, stage, folder, **OPTIONS, **options)
    trainer.train()
    first = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    return trainer, [first, predicted.metrics["test_loss"], trainer.evaluate()["eval_loss"]], predicted.predictions


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "bert"])
@distributed(world_size=2, timeout=180)
def test_a_model_trained_in_fp32(tmp_path, name, half, stage):
    options = {f"{half}_full_eval": True}
    stock, losses, predictions = _train_and_evaluate(name, None, tmp_path / "stock", **options)
    weights = saved_weights(stock, tmp_path / "stock")
    assert next(iter(weights.values())).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    ours, found, mine = _train_and_evaluate(name, stage, tmp_path / "ours", **options)
    assert found == losses, f"{found}, not {losses}"
    torch.testing.assert_close(mine, predictions, rtol=0, atol=0)
    compare_weights(saved_weights(ours, tmp_path / "ours"), weights, f"stage {stage}", tolerance=0.0)
    before = [master.detach().clone() for master in ours.model._zero_engine.masters]
    assert {master.dtype for master in before} == {torch.float32}, "training would go on with full precision"
    ours.train()
    assert not all(map(torch.equal, before, ours.model._zero_engine.masters)), "it does not train"


@pytest.mark.parametrize("stage", SOME_STAGES)
@distributed(world_size=2, timeout=180)
def test_a_model_trained_in_bf16(tmp_path, stage):
    """Its weights are 16-bit already: evaluation is as during training."""
    losses = []
    for full in (False, True):
        options = {"bf16": True, "bf16_full_eval": full}
        losses.append(_train_and_evaluate("bert", stage, tmp_path / str(full), **options)[1])
    assert losses[0] == losses[1], losses


@pytest.mark.parametrize("stage", SOME_STAGES)
@distributed(world_size=2, timeout=180)
def test_evaluation_before_training(tmp_path, stage):
    """At stage 3 the evaluated copy is 16-bit, and training then starts from what was given."""
    wanted = make_trainer("llama", None, tmp_path / "stock", **OPTIONS, bf16_full_eval=True).evaluate()["eval_loss"]
    ours = make_trainer("llama", stage, tmp_path / "ours", **OPTIONS, bf16_full_eval=True)
    assert ours.evaluate()["eval_loss"] == wanted
    ours.train()
    ours.evaluate()
