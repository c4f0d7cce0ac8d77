"""A save into a folder that holds a model: whatever happens, what loads afterwards is one model and not two."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.loading import weight_files
from hf_zero.checkpoint.model_folder import save_folder
from tests.ranks.test_checkpoint_faults import _die_at
from tests.ranks.test_saving import check_same_folder
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


def _save(folder, seed, size):
    model = zoo.build("llama", seed)
    engine = hf_zero.shard(model, None, {"zero_stage": 0})
    save_folder(
        model,
        folder,
        SaveJob(comm=engine.comm, is_main=True),
        lambda folder, state_dict: zoo.build("llama").config.save_pretrained(folder),
        max_shard_size=size,
    )


def _save_and_die(folder, size, call):
    count = _die_at(0, call)
    _save(folder, 1, size)
    return count[0]


def _loaded(folder):
    """The seed of the model in a folder, None where it does not load."""
    try:
        model, info = type(zoo.build("llama")).from_pretrained(folder, output_loading_info=True)
    except OSError:
        return None
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    plain = {seed: zoo.build("llama", seed).state_dict() for seed in (0, 1)}
    found = [seed for seed in plain if all(torch.equal(t, plain[seed][n]) for n, t in model.state_dict().items())]
    assert found, "the folder loads, and holds parts of two models"
    ours = {}
    for file in sorted(set(weight_files(folder).values())):
        ours |= load_file(folder / file)
    assert all(torch.equal(t, plain[found[0]][n]) for n, t in ours.items()), "we read another model than transformers"
    return found[0]


@pytest.mark.parametrize("before, after", [("20KB", "20KB"), ("20KB", "15KB"), ("20KB", "50GB"), ("50GB", "20KB")])
def test_a_save_that_is_killed_while_files_get_their_names(tmp_path, before, after):
    old, outcomes = tmp_path / "old", []
    run_ranks(_save, old, 0, before, world_size=1)
    shutil.copytree(old, tmp_path / "whole")
    total = run_ranks(_save_and_die, tmp_path / "whole", after, -1, world_size=1)[0]
    last = len(list(old.glob("*.safetensors"))) + len(list((tmp_path / "whole").glob("*.safetensors"))) + 3
    for call in range(total - last, total + 1):
        folder = tmp_path / str(call)
        shutil.copytree(old, folder)
        with pytest.raises(pytest.fail.Exception):
            run_ranks(_save_and_die, folder, after, call, world_size=1)
        outcomes.append(_loaded(folder))
        run_ranks(_save, folder, 1, after, world_size=1)
        check_same_folder(folder, tmp_path / "whole")
    assert outcomes[0] == 0, "the first of these deaths came before the first rename"
    if before != after:
        assert None not in outcomes, outcomes


@distributed(world_size=2)
def test_what_a_killed_save_has_left_makes_room_first(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": 3})
    if dist.get_rank() == 0:
        folder.mkdir()
        left = ["model-00002-of-00009.safetensors.tmp", "model.safetensors.tmp", "model.safetensors.index.json.tmp"]
        for name in left:
            (folder / name).write_bytes(bytes(10**6))
        (folder / "notes.tmp").write_bytes(bytes(10))
    dist.barrier()

    disk = shutil.disk_usage(tmp_path)

    def usage(path):
        return disk._replace(free=2 * 10**6 - sum(file.stat().st_size for file in Path(path).iterdir()))

    monkeypatch.setattr("hf_zero.checkpoint.staging.shutil.disk_usage", usage)
    model.save_pretrained(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        zoo.build("llama").save_pretrained(tmp_path / "stock")
        (tmp_path / "stock/notes.tmp").write_bytes(bytes(10))
        check_same_folder(folder, tmp_path / "stock")
