"""Weights and state are read in slices: each rank only what it keeps, from any layout of files."""

import os

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint import loading, saving
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint import train
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


def _count_reads():
    """The bytes that `preadv` gives to this process from now on."""
    count, original = [0], os.preadv

    def preadv(descriptor, buffers, position):
        number = original(descriptor, buffers, position)
        count[0] += number
        return number

    os.preadv = preadv
    return count


def _prepared(name, seed, **config):
    model = zoo.build(name, seed)
    return model, hf_zero.shard(model, None, {"zero_stage": 3, **config})


@pytest.mark.parametrize("name", zoo.NAMES)
@distributed(world_size=2)
def test_slices_of_every_family(tmp_path, name):
    if dist.get_rank() == 0:
        zoo.build(name, seed=1).save_pretrained(tmp_path / "one")
        zoo.build(name, seed=1).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    dist.barrier()
    wanted = zoo.build(name, seed=1)
    for folder in ("one", "many"):
        model, engine = _prepared(name, seed=0)
        count = _count_reads()
        loading.load_weights(model, tmp_path / folder, engine.comm)
        engine.after_load()
        size = sum(path.stat().st_size for path in (tmp_path / folder).glob("*.safetensors"))
        assert count[0] <= 0.55 * size, f"{count[0]} of {size} bytes"  # half of a tiny model, and slices are padded
        found = saving.consolidated_state_dict(model, keep=True)
        for key, tensor in wanted.state_dict().items():
            assert torch.equal(found[key], tensor), f"{folder}: {key}"


@pytest.mark.parametrize("stage, precision", [(0, "no"), (1, "no"), (2, "bf16"), (3, "bf16")])
@distributed(world_size=4)
def test_each_rank_reads_its_own_part(tmp_path, stage, precision):
    """A model large enough that padding does not show: at most 1.02/N of the bytes."""
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))  # noqa: E731
    source = make()
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        save_file(source.state_dict(), tmp_path / "model.safetensors")
    dist.barrier()
    model = make()
    engine = hf_zero.shard(model, None, {"zero_stage": stage, "mixed_precision": precision})
    count = _count_reads()
    loading.load_weights(model, tmp_path, engine.comm)
    engine.after_load()
    share = 1.0 if stage == 0 else 1.02 / 4
    assert count[0] <= share * (tmp_path / "model.safetensors").stat().st_size, count[0]
    found = saving.consolidated_state_dict(model, keep=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for key, tensor in source.state_dict().items():
        assert torch.equal(found[key], tensor.to(dtype)), key


@distributed(world_size=2)
def test_frozen_weights_are_loaded_at_every_stage(tmp_path):
    if dist.get_rank() == 0:
        zoo.build("llama", seed=1).save_pretrained(tmp_path)
    dist.barrier()
    for stage in (0, 1, 2, 3):
        model = zoo.build("llama")
        model.model.requires_grad_(False)
        engine = hf_zero.shard(model, None, {"zero_stage": stage})
        loading.load_weights(model, tmp_path, engine.comm)
        engine.after_load()
        found = saving.consolidated_state_dict(model, keep=True)
        for key, tensor in zoo.build("llama", seed=1).state_dict().items():
            assert torch.equal(found[key], tensor), f"stage {stage}: {key}"


@distributed(world_size=2)
def test_what_does_not_fit_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    model, engine = _prepared("llama", seed=0)
    if dist.get_rank() == 0:
        zoo.build("llama").save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(3, 32)
        save_file(tensors, tmp_path / "model.safetensors")
    dist.barrier()
    with pytest.raises(ZeroCheckpointError, match=r"'model.norm.weight' is missing") as caught:
        loading.load_weights(model, tmp_path, engine.comm)
    assert "'lm_head.weight' has shape (3, 32), the model's is (64, 32)" in str(caught.value)
    with pytest.raises(ZeroCheckpointError, match="holds neither model.safetensors nor"):
        loading.load_weights(model, tmp_path / "nowhere", engine.comm)


def _resume_and_count(folder):
    count = _count_reads()
    train(str(folder), 3, 4, steps=4, resume=str(folder / "checkpoint-3"))
    return count[0]


def test_resume_reads_each_byte_once(tmp_path):
    run_ranks(train, str(tmp_path), 3, 4, 3, world_size=2)
    files = ("model.safetensors", "zero_state.safetensors")
    size = sum((tmp_path / "checkpoint-3" / name).stat().st_size for name in files)
    counts = run_ranks(_resume_and_count, tmp_path)
    assert max(counts) <= 0.55 * size and sum(counts) <= 1.02 * size, (counts, size)


# ------------------------------------------------------------------------------------------------- through accelerate


@distributed(world_size=2)
def test_accelerate_saves_in_slices(tmp_path):
    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model = accelerator.prepare_model(zoo.build("llama_tied"))
    gathers = model._zero_engine.comm.traffic.calls["all_gather"]
    for size in ("10GB", "20KB"):
        accelerator.save_model(model, tmp_path / f"ours{size}", max_shard_size=size)
    accelerator.save_state(str(tmp_path / "state"))
    assert model._zero_engine.comm.traffic.calls["all_gather"] == gathers
    if accelerator.is_main_process:
        from tests.ranks.test_saving import check_same_folder

        for size in ("10GB", "20KB"):
            accelerator.save_model(zoo.build("llama_tied"), tmp_path / f"stock{size}", max_shard_size=size)
            check_same_folder(tmp_path / f"ours{size}", tmp_path / f"stock{size}")
    accelerator.wait_for_everyone()
    (tmp_path / "state/COMMIT").unlink(missing_ok=True)
    with pytest.raises(ZeroCheckpointError, match="was not saved completely"):
        accelerator.load_state(str(tmp_path / "state"))
