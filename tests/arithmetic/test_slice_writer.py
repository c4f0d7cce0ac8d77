"""Writing overlaps with making the next piece ready, and reading makes no copies and no sums that nobody needs."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint import loading
from hf_zero.checkpoint.checksum import Checksums
from hf_zero.checkpoint.safetensors_file import BUFFER_BYTES, Buffer, SlicedFile
from hf_zero.checkpoint.slice_writer import SliceWriter
from tests.support import zoo
from tests.support.harness import distributed


_NUMEL = BUFFER_BYTES // 4


def _writer(path, numel, dtype=torch.float32):
    file = SlicedFile({"a": (dtype, (numel,))}, {"format": "pt"})
    file.create(path)
    return SliceWriter({"x": file}, {"x": path})


def _read(path, numel):
    values = torch.empty(numel)
    SlicedFile.open(path).read(path, [("a", 0, values)])
    return values


def test_the_next_piece_is_summed_while_one_is_written(tmp_path, monkeypatch):
    second_sum, pwrite, add, added = threading.Event(), os.pwrite, Checksums.add, []

    def counted(self, *args):
        add(self, *args)
        added.append(args)
        if len(added) == 2:
            second_sum.set()

    def waits(*args):
        assert second_sum.wait(60), "nothing was summed while a piece was being written"
        return pwrite(*args)

    monkeypatch.setattr(Checksums, "add", counted)
    monkeypatch.setattr(os, "pwrite", waits)
    values, path = torch.rand(5 * _NUMEL // 2), tmp_path / "x"
    writer = _writer(path, values.numel())
    writer.put("x", "a", 0, values)
    writer.close()
    assert len(added) == 3
    assert torch.equal(_read(path, values.numel()), values)


@pytest.mark.parametrize("direct", (True, False))
def test_values_may_change_once_they_are_put(tmp_path, monkeypatch, direct):
    """What is cast or copied in a buffer, and what the caller writes afterwards, does not reach the file."""
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    path, numel = tmp_path / "x", 3 * _NUMEL
    writer = _writer(path, numel)
    wanted = torch.rand(numel).half().float()
    values = wanted.clone()
    # Cuts that fill no page, parts within a page, and another dtype.
    cuts = [0, 5, 6, 1030, _NUMEL + 3, 2 * _NUMEL, numel]
    for low, high in zip(cuts, cuts[1:], strict=False):
        part = values[low:high] if low < _NUMEL else values[low:high].half()
        writer.put("x", "a", low, part)
        part.zero_()
    writer.close()
    assert torch.equal(_read(path, numel), wanted)
    sums = Checksums()
    sums.add("a", 0, wanted)
    assert writer.sums == sums and writer.nbytes == wanted.nbytes


@pytest.mark.parametrize("error", (OSError(28, "No space left on device"), MemoryError("none left")))
def test_an_error_of_the_thread_is_raised_when_the_file_is_closed(tmp_path, monkeypatch, error):
    def fails(*args):
        raise error

    path, values = tmp_path / "x", torch.rand(_NUMEL)
    writer = _writer(path, 9 * _NUMEL)
    monkeypatch.setattr(os, "pwrite", fails)
    for number in range(9):
        writer.put("x", "a", number * _NUMEL, values)
    with pytest.raises(type(error)) as raised:
        writer.close()
    assert str(path) in str(raised.value) or isinstance(error, MemoryError)
    assert not [thread for thread in threading.enumerate() if thread.name == "slice writer"]


def test_storages_that_were_written_and_read_can_still_be_released(tmp_path):
    """`Tensor.numpy` would forbid it for ever."""
    values, target = torch.rand(_NUMEL), torch.empty(_NUMEL)
    writer = _writer(tmp_path / "x", _NUMEL)
    writer.put("x", "a", 0, values)
    writer.close()
    SlicedFile.open(tmp_path / "x").read(tmp_path / "x", [("a", 0, target)], Checksums())
    assert torch.equal(target, values)
    for tensor in (values, target):
        tensor.untyped_storage().resize_(0)


def _count(monkeypatch, owner, name, calls):
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


@distributed(world_size=2)
def test_weights_that_nothing_is_known_of_are_read_without_copies_and_sums(tmp_path):
    if dist.get_rank() == 0:
        zoo.build("llama", seed=1).save_pretrained(tmp_path)
    dist.barrier()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        _count(patch, Checksums, "add", calls)
        _count(patch, Buffer, "room", calls)
        with hf_zero.zero_init({"zero_stage": 3}):
            model = type(zoo.build("llama")).from_pretrained(tmp_path)
        engine = hf_zero.shard(model, None, {"zero_stage": 3})
        engine.before_load()
        loading.load_weights(model, tmp_path, engine.comm)
        engine.after_load()
    assert calls == []
    with hf_zero.gathered_parameters(model):
        for (name, param), wanted in zip(
            model.named_parameters(), zoo.build("llama", seed=1).parameters(), strict=True
        ):
            assert torch.equal(param, wanted), name


def test_values_of_another_dtype_come_through_one_buffer(tmp_path):
    path, numel = tmp_path / "x", 3 * _NUMEL
    writer = _writer(path, numel, torch.bfloat16)
    wanted = torch.rand(numel).bfloat16()
    writer.put("x", "a", 0, wanted)
    writer.close()
    places = set()
    room = Buffer.room

    def noted(self, dtype, count):
        values = room(self, dtype, count)
        places.add(values.data_ptr())
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "room", noted)
        assert torch.equal(_read(path, numel), wanted.float())
    assert len(places) == 1
