"""tp_size: two groups of two ranks that share layers train, save and resume as two data-parallel ranks do."""

import pytest
import torch
from accelerate import ParallelismConfig
from torch.distributed.tensor import DTensor

import hf_zero
from hf_zero.errors import ZeroConfigError
from tests.support import sequences
from tests.support.harness import distributed, run_ranks
from tests.support.reference import SGD
from tests.support.tensor_models import needs_shared_layers
from tests.support.trainers import compare_logs, compare_weights, make_trainer, saved_weights, without_times


STEPS = 4


def _train(folder, stage, resume=None, width=1, **arguments):
    """Train, and return (log history, saved weights)."""
    torch.manual_seed(0)
    if width > 1:
        arguments["parallelism_config"] = ParallelismConfig(tp_size=width, dp_shard_size=2)
    trainer = make_trainer(
        None,
        stage,
        folder,
        model=sequences.build(),
        others={
            "train_dataset": sequences.ragged(16),
            "eval_dataset": sequences.ragged(5),
            "data_collator": sequences.padded(left=False),
        },
        **{"max_steps": STEPS, "max_grad_norm": 0.5, "learning_rate": 5e-3, "eval_strategy": "steps", "eval_steps": 2}
        | arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    shared = sum(isinstance(param, DTensor) for param in trainer.model.parameters())
    assert bool(shared) == (trainer.get_tp_size() > 1), shared
    return without_times(trainer.state.log_history), saved_weights(trainer, folder / "saved")


@needs_shared_layers
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_trainer_gives_the_numbers_of_data_parallel_ranks(stage, tmp_path):
    whole = run_ranks(_train, tmp_path / "whole", None, world_size=2)[0]
    for found in run_ranks(_train, tmp_path / "ours", stage, width=2, world_size=4):
        compare_logs(found[0], whole[0], f"stage {stage}")
        compare_weights(found[1], whole[1], f"stage {stage}", tolerance=1e-5)


@needs_shared_layers
def test_a_trainers_checkpoint_goes_on_with_and_without_shared_layers(tmp_path):
    steps = {"save_strategy": "steps", "save_steps": 2}
    whole = run_ranks(_train, tmp_path / "ours", 3, zero_tp_size=2, world_size=4, **steps)[0]
    for width, ranks in ((1, 2), (2, 4)):
        found = run_ranks(
            _train, tmp_path / str(ranks), 2, str(tmp_path / "ours/checkpoint-2"), zero_tp_size=width, world_size=ranks
        )[0]
        compare_weights(found[1], whole[1], f"{ranks} ranks", tolerance=1e-5)


def _loop(config, parallelism, optimizer_first):
    model = sequences.build()
    optimizer = SGD(model.parameters())
    accelerator = hf_zero.ZeroAccelerator(
        zero_plugin=hf_zero.ZeroPlugin(config), parallelism_config=parallelism, cpu=True
    )
    loader = torch.utils.data.DataLoader(
        sequences.examples(8), batch_size=2, collate_fn=sequences.padded(left=False), shuffle=False
    )
    if optimizer_first:
        optimizer, loader, model = accelerator.prepare(optimizer, loader, model)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().view(1)).mean().item())
    state = accelerator.get_state_dict(model)
    return losses, state


@needs_shared_layers
@pytest.mark.parametrize("optimizer_first", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_loop_of_accelerate_gives_the_numbers_of_data_parallel_ranks(optimizer_first):
    whole = run_ranks(_loop, {"zero_stage": 2}, None, False, world_size=2)[0]
    ours = run_ranks(
        _loop, {"zero_stage": 3}, ParallelismConfig(tp_size=2, dp_shard_size=2), optimizer_first, world_size=4
    )[0]
    assert ours[0] == pytest.approx(whole[0], abs=1e-6)
    compare_weights(ours[1], whole[1], "accelerate", tolerance=1e-6)


@distributed(world_size=2)
def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ZeroConfigError, match="tp_size is 3.*set it to one of 1, 2"):
        hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin({"zero_stage": 2, "tp_size": 3}), cpu=True)
