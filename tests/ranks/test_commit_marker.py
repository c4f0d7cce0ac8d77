"""The marker of a checkpoint lists what is in it; where it does not, or is damaged itself, that is said or skipped."""

import json

import pytest
import torch

from hf_zero.checkpoint import commit
from hf_zero.checkpoint.checksum import Checksums
from hf_zero.checkpoint.staging import naming, on_all_ranks
from hf_zero.errors import ZeroCheckpointError
from hf_zero.integrations.trainer_checkpoints import newest_committed
from tests.support.harness import distributed, run_ranks


def write_tensors(path, tensors):
    """A safetensors file, and the checksums of its tensors."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    sums = Checksums()
    for name, tensor in tensors.items():
        sums.add(name, 0, tensor)
    return sums


def make_checkpoint(folder):
    sums = {
        name: write_tensors(folder / name, {"a": torch.rand(8)})
        for name in ("model.safetensors", "zero_state.safetensors")
    }
    (folder / "scheduler.pt").write_bytes(b"a schedule")
    (folder / "notes.txt").write_text("of the user")
    commit.write_marker(folder, sums)


def check(folder, share=0, shares=1):
    commit.check_files(folder)
    commit.check_tensors(folder, share, shares)


def newest(run_folder, check=check):
    return newest_committed(run_folder, True, check, {})


def test_files_in_sub_folders_may_have_the_names_of_those_above(tmp_path):
    sums = {"model.safetensors": write_tensors(tmp_path / "model.safetensors", {"a": torch.rand(8)})}
    write_tensors(tmp_path / "2_Dense/model.safetensors", {"b": torch.rand(4)})
    commit.write_marker(tmp_path, sums)
    check(tmp_path)
    write_tensors(tmp_path / "2_Dense/model.safetensors", {"b": torch.rand(4)})
    with pytest.raises(ZeroCheckpointError, match="2_Dense/model.safetensors is damaged"):
        check(tmp_path)


HASH = "0" * 64
DAMAGES = {
    "no JSON": ("{", "is damaged: JSONDecodeError"),
    "nothing": ({}, "is damaged: KeyError"),
    "a list": ([], "is damaged: TypeError"),
    "a list of files": ({"format": 1, "files": []}, "is damaged: AttributeError"),
    "no description": ({"format": 1, "files": {"a": 5}}, "is damaged: TypeError"),
    "no hash": ({"format": 1, "files": {"a": {}}}, "is damaged: KeyError"),
    "a word for a hash": ({"format": 1, "files": {"a": {"size": 1, "sha256": "good"}}}, "is damaged: ValueError"),
    "no size": ({"format": 1, "files": {"a": {"size": "1", "sha256": HASH}}}, "is damaged: 'a' in it"),
    "no files": ({"format": 1, "files": {}}, "lists no files"),
    "a file above": ({"format": 1, "files": {"../a": {"size": 1, "sha256": HASH}}}, "is damaged: '../a' in it"),
    "a file elsewhere": ({"format": 1, "files": {"/a": {"size": 1, "sha256": HASH}}}, "is damaged: '/a' in it"),
    "a newer format": (
        {"format": 99, "files": {"a": 5}},
        "has format 99, and this hf_zero reads formats up to 2",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_marker_is_named_and_its_checkpoint_is_skipped(tmp_path, name):
    content, words = DAMAGES[name]
    for step in (3, 6):
        make_checkpoint(tmp_path / f"checkpoint-{step}")
    damaged = tmp_path / "checkpoint-6"
    (damaged / commit.MARKER).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ZeroCheckpointError, match=f"{commit.MARKER} .*{words}"):
        commit.check_files(damaged)
    assert newest(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.parametrize("missing", ["zero_state.safetensors", "model.safetensors", "scheduler.pt"])
def test_what_resuming_would_read_is_listed(tmp_path, missing):
    make_checkpoint(tmp_path)
    content = json.loads((tmp_path / commit.MARKER).read_text())
    del content["files"][missing]
    (tmp_path / commit.MARKER).write_text(json.dumps(content))
    with pytest.raises(ZeroCheckpointError, match=f"{missing} is no part of the checkpoint"):
        check(tmp_path)


def test_users_may_add_files(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "README.md").write_text("a card")
    write_tensors(tmp_path / "ema.safetensors", {"a": torch.rand(2)})
    write_tensors(tmp_path / "merged/model.safetensors", {"a": torch.rand(2)})
    check(tmp_path)


def test_a_tensor_that_the_marker_leaves_out_is_not_trusted(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ZeroCheckpointError, match="has no checksum of 'b' in model.safetensors"):
        commit.compare_sums(tmp_path, "model.safetensors", {"b": 5})
    with pytest.raises(ZeroCheckpointError, match="other.safetensors is no part of the checkpoint"):
        commit.compare_sums(tmp_path, "other.safetensors", {"b": 5})


# ----------------------------------------------------------------------------------------- what only one rank fails at


class OfALibrary(Exception):
    """Like safetensors' own: derived from nothing that Python has for failing files."""


@pytest.mark.parametrize(
    "error", [OfALibrary("no room"), KeyError("no room"), TypeError("no room"), OSError("no room")]
)
@distributed(world_size=2)
def test_whatever_fails_on_one_rank_is_raised_on_all(error):
    from hf_zero.comm.communicator import Communicator

    comm = Communicator.connect()

    def fail():
        if comm.rank == 1:
            with naming("the/file"):
                raise error

    with pytest.raises(ZeroCheckpointError, match="rank 1 of 2 failed: the/file cannot be written: .*no room"):
        on_all_ranks(comm, fail)


@distributed(world_size=2)
def test_a_failure_without_words_is_a_failure():
    from hf_zero.comm.communicator import Communicator

    comm = Communicator.connect()

    def fail():
        assert comm.rank != 0

    with pytest.raises(ZeroCheckpointError, match="rank 0 of 2 failed: AssertionError"):
        on_all_ranks(comm, fail)


def _save_adapters(folder, limit):
    import resource

    from peft import LoraConfig, get_peft_model

    import hf_zero
    from tests.support import zoo

    model = get_peft_model(zoo.build("llama"), LoraConfig(r=64, target_modules=["q_proj", "v_proj"]))
    engine = hf_zero.shard(model, None, {"zero_stage": 3})
    if engine.comm.rank == 0 and limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        model.save_pretrained(folder)
    except ZeroCheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_adapters_that_cannot_be_written_are_named_on_all_ranks(tmp_path):
    assert run_ranks(_save_adapters, str(tmp_path), 0) == [None, None]
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    for message in run_ranks(_save_adapters, str(tmp_path), 20_000):
        assert message is not None and f"rank 0 of 2 failed: {tmp_path} cannot be written" in message, message
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
