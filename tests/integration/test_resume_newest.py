"""`resume_from_checkpoint=True` reads what it takes once, and gives up what proves damaged as it loads."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint import train, trainer_for
from tests.ranks.test_checkpoint_faults import flip
from tests.support.harness import run_ranks


STATE, WEIGHTS = "zero_state.safetensors", "model.safetensors"


def _counted_reads():
    """The bytes of each file that `preadv` gives to this process from now on."""
    counts, original = Counter(), os.preadv

    def preadv(descriptor, buffers, position):
        number = original(descriptor, buffers, position)
        counts[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += number
        return number

    os.preadv = preadv
    return counts


def _resume_counting(folder, resume, stage, **arguments):
    counts = _counted_reads()
    train(folder, stage, 2, steps=5, resume=resume, save_strategy="no", **arguments)
    return counts


@pytest.mark.parametrize("stage, bf16", [(3, False), (3, True), (2, True)])
def test_every_byte_is_read_once(tmp_path, stage, bf16):
    """Also the 16-bit weights, whose masters are taken in their place, are verified."""
    run_ranks(train, str(tmp_path), stage, 2, 3, bf16=bf16)
    newest = tmp_path / "checkpoint-3"
    read = sum(run_ranks(_resume_counting, str(tmp_path), True, stage, bf16=bf16), Counter())
    for name in (STATE, WEIGHTS):
        size = (newest / name).stat().st_size
        # Padding of slices and buffers are read by more than one rank.
        assert 0.9 * size < read[name] <= 1.02 * size, (name, read[name], size)


def _resume(folder, resume, stage=3, **arguments):
    """(losses, or the message of an error; lines about what is skipped) of going on to step 8."""
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_zero").addHandler(handler)
    try:
        losses = train(folder, stage, 2, steps=8, resume=resume, save_strategy="no", **arguments)
    except ZeroCheckpointError as error:
        losses = str(error)
    return losses, [line for line in lines if "skipped" in line]


def _run(tmp_path, stage, **arguments):
    """A run with checkpoints of steps 3 and 6, and its folder."""
    run = tmp_path / "run"
    run_ranks(train, str(run), stage, 2, 6, **arguments)
    return run


@pytest.mark.parametrize(
    "stage, bf16, file, tensor",
    [
        (3, False, STATE, "lm_head.weight.exp_avg"),
        (3, False, WEIGHTS, "model.norm.weight"),
        (3, True, WEIGHTS, "model.norm.weight"),  # nothing is made of it: the masters are taken
        (1, True, STATE, "lm_head.weight.master"),
        (0, False, WEIGHTS, "lm_head.weight"),
    ],
)
def test_the_one_before_a_damaged_one_is_loaded_over_it(tmp_path, stage, bf16, file, tensor):
    run = _run(tmp_path, stage, bf16=bf16)
    wanted = run_ranks(_resume, str(run), str(run / "checkpoint-3"), stage, bf16=bf16)
    flip(run / "checkpoint-6" / file, tensor)
    found = run_ranks(_resume, str(run), True, stage, bf16=bf16)
    for (losses, _), (expected, _) in zip(found, wanted, strict=True):
        assert losses == expected, (losses, expected)
        assert sorted(losses) == [4, 5, 6, 7, 8]
    (line,) = found[0][1]
    assert f"checkpoint-6 ({run / 'checkpoint-6' / file} is damaged: tensor '{tensor}'" in line, line
    assert not found[1][1]


def test_one_without_training_state_is_not_taken_for_a_damaged_one(tmp_path):
    run = tmp_path / "run"
    run_ranks(train, str(run), 3, 2, 3, save_only_model=True)
    assert sorted(run_ranks(_resume, str(run), True)[0][0]) == [4, 5, 6, 7, 8]
    run_ranks(train, str(tmp_path / "other"), 3, 2, 6)
    shutil.move(tmp_path / "other/checkpoint-6", run)
    flip(run / "checkpoint-6" / WEIGHTS, "lm_head.weight")
    for message, _ in run_ranks(_resume, str(run), True):
        assert "checkpoint-3 (rank 0 of 2 failed: options of a damaged one would stay" in message, message


def _fail_to_read(folder, resume):
    original = os.preadv

    def preadv(descriptor, buffers, position):
        if "checkpoint-6" in os.readlink(f"/proc/self/fd/{descriptor}") and os.environ["RANK"] == "1":
            raise OSError(5, "Input/output error")
        return original(descriptor, buffers, position)

    os.preadv = preadv
    return _resume(folder, resume)


def test_a_disk_that_fails_on_one_rank_is_damage_on_all(tmp_path):
    run = _run(tmp_path, 3)
    for losses, _ in run_ranks(_fail_to_read, str(run), True):
        assert sorted(losses) == [4, 5, 6, 7, 8], losses
    flip(run / "checkpoint-3" / STATE, "lm_head.weight.exp_avg")
    for message, _ in run_ranks(_fail_to_read, str(run), True):
        for words in ("no complete checkpoint in", f"6/{STATE} cannot be read: Input/output", f"3/{STATE} is damaged"):
            assert words in message, message


def test_a_run_of_another_optimizer_is_no_damage(tmp_path):
    run = _run(tmp_path, 3)
    for message, lines in run_ranks(_resume, str(run), True, optim="sgd"):
        assert "build the same one" in message and not lines, (message, lines)


def _train_twice(folder):
    """The trainer's model is sharded already when it looks for the newest checkpoint."""
    trainer = trainer_for(folder, 3, 6, per_device_train_batch_size=2)
    trainer.train()
    if trainer.args.should_save:
        flip(Path(folder) / "checkpoint-6" / WEIGHTS, "lm_head.weight")
    trainer.accelerator.wait_for_everyone()
    trainer.args.max_steps, trainer.args.save_strategy = 8, "no"
    counts = _counted_reads()
    trainer.train(resume_from_checkpoint=True)
    size = (Path(folder) / "checkpoint-3" / STATE).stat().st_size
    assert counts[STATE] <= 2 * 0.55 * size, (counts, size)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def test_a_model_that_was_trained_before(tmp_path):
    run = _run(tmp_path, 3)
    wanted = run_ranks(_resume, str(run), str(run / "checkpoint-3"))[0][0]
    found = run_ranks(_train_twice, str(tmp_path / "again"))[0]
    assert {step: found[step] for step in wanted} == wanted, (found, wanted)


def _with_adapters(folder, resume):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return train(folder, 3, 2, 8 if resume else 6, resume, model=adapted)


def test_adapters_are_loaded_again(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"
    run_ranks(_with_adapters, str(run), None)
    shutil.copytree(run, kept)
    wanted = run_ranks(_with_adapters, str(kept), str(kept / "checkpoint-3"))
    state = run / "checkpoint-6" / STATE
    flip(
        state, next(name for name in SlicedFile.open(state).tensors if name.endswith("lora_A.default.weight.exp_avg"))
    )
    assert run_ranks(_with_adapters, str(run), True) == wanted
