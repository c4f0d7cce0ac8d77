"""Ulysses: two ranks that share sequences, twice, train as two ranks with whole sequences do."""

import functools
import itertools

import pytest
import torch

from tests.support import sequences
from tests.support.harness import run_ranks
from tests.support.trainers import compare_logs, compare_weights, make_trainer, saved_weights, without_times
from tests.support.trl_runs import SFT, compare, make, outcome


pytestmark = sequences.needs_shared_sequences
STEPS = 4


def _train(folder, stage, batches, build=sequences.build, resume=None, **arguments):
    """Train, and return (log history, saved weights)."""
    torch.manual_seed(0)
    make, collate = sequences.BATCHES[batches]
    trainer = make_trainer(
        None,
        stage,
        folder,
        model=build(),
        others={"train_dataset": make(16), "eval_dataset": make(5), "data_collator": collate},
        **{"max_steps": STEPS, "max_grad_norm": 0.5, "learning_rate": 5e-3, "eval_strategy": "steps", "eval_steps": 2}
        | arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    return without_times(trainer.state.log_history), saved_weights(trainer, folder / "saved")


def train_grouped(folder, stage, batches, keys, **arguments):
    return _train(folder, stage, batches, build=functools.partial(sequences.build, keys=keys), **arguments)


def _compare(ours, whole, what):
    compare_logs(ours[0], whole[0], what)
    compare_weights(ours[1], whole[1], what, tolerance=1e-5)


def _cases():
    """All pairs; the default run has the two that ask most."""
    usual = {(2, "packed"), (3, "padded at the beginning")}
    for case in itertools.product([0, 2, 3], sequences.BATCHES):
        yield pytest.param(*case, marks=[] if case in usual else pytest.mark.exhaustive)


@pytest.mark.parametrize("stage, batches", list(_cases()))
def test_parts_of_sequences_train_like_whole_ones(stage, batches, tmp_path):
    whole = run_ranks(_train, tmp_path, None, batches, world_size=2)[0]
    ours = run_ranks(_train, tmp_path, stage, batches, zero_sp_size=2, world_size=4)
    for found in ours:
        _compare(found, whole, f"stage {stage}, {batches}")


SAVES = {"save_strategy": "steps", "save_steps": 2}


def test_checkpoints_resume_without_sequence_groups(tmp_path):
    """Two ranks for each sequence, then none: always the same samples in a step."""
    whole = run_ranks(_train, tmp_path, 3, "padded", zero_sp_size=2, world_size=4, **SAVES)[0]
    alone = run_ranks(_train, tmp_path, 2, "padded", resume=str(tmp_path / "checkpoint-2"), world_size=2)[0]
    _compare(alone, whole, "resumed without sequence groups")


@pytest.mark.exhaustive
def test_checkpoints_resume_with_larger_sequence_groups(tmp_path):
    whole = run_ranks(_train, tmp_path / "whole", None, "padded", world_size=2)[0]
    run_ranks(_train, tmp_path, 3, "padded", zero_sp_size=2, world_size=4, **SAVES)
    checkpoint = str(tmp_path / "checkpoint-2")
    four = run_ranks(
        _train,
        tmp_path,
        3,
        "padded",
        resume=checkpoint,
        zero_sp_size=4,
        per_device_train_batch_size=4,
        eval_strategy="no",
        world_size=4,
    )[0]
    compare_weights(four[1], whole[1], "resumed with groups of four", tolerance=1e-5)


def _metrics(folder, stage, **arguments):
    """What evaluation gives to compute_metrics, and what the model generates."""
    shapes = []

    def metrics(found):
        shapes.append((found.predictions.shape, found.label_ids.shape))
        return {"logits": float(abs(found.predictions).sum()), "labels": int(found.label_ids.sum())}

    make, collate = sequences.BATCHES["whole"]
    trainer = make_trainer(
        None,
        stage,
        folder,
        model=sequences.build(),
        others={"eval_dataset": make(5), "data_collator": collate, "compute_metrics": metrics},
        **arguments,
    )
    results = trainer.evaluate()
    batch = {"input_ids": make(2)[1]["input_ids"][None, :6]}
    text = trainer.model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return shapes, {name: results[name] for name in ("eval_loss", "eval_logits", "eval_labels")}, text


def test_evaluation_and_generation_are_those_of_whole_sequences(tmp_path):
    (shapes, results, text), _ = run_ranks(_metrics, tmp_path, None, world_size=2)
    for found in run_ranks(_metrics, tmp_path, 3, zero_sp_size=2, world_size=4):
        assert found[0] == shapes
        assert found[1] == pytest.approx(results, rel=1e-5)
        torch.testing.assert_close(found[2], text)


def _accumulated(folder, stage, tokens_on_all_ranks, **arguments):
    return _train(
        folder,
        stage,
        "padded",
        build=functools.partial(sequences.build, keys=1),
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        average_tokens_across_devices=tokens_on_all_ranks,
        **arguments,
    )


@pytest.mark.parametrize("tokens", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_accumulated_and_checkpointed_batches_weigh_tokens_as_trainer_does(tokens, tmp_path):
    whole = run_ranks(_accumulated, tmp_path, None, tokens, world_size=2)[0]
    ours = run_ranks(_accumulated, tmp_path, 3, tokens, zero_sp_size=2, world_size=4)[0]
    _compare(ours, whole, f"tokens on all ranks: {tokens}")


def _tuned(folder, stage, **arguments):
    torch.manual_seed(0)
    return outcome(make(SFT, stage, folder, **{"max_steps": 2, "max_grad_norm": 0.5, **arguments}), folder)


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True, "max_length": 48, "packing_strategy": "bfd"},
        pytest.param({"assistant_only_loss": True, "gradient_accumulation_steps": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_sft_trains_and_reports_like_on_whole_sequences(options, tmp_path):
    whole = run_ranks(_tuned, tmp_path / "whole", None, world_size=2, **options)[0]
    for found in run_ranks(_tuned, tmp_path, 3, zero_sp_size=2, world_size=4, **options):
        compare(found, whole, "SFT")
