"""The header of a safetensors file is read as the library reads it, and refused where the library refuses it."""

import copy
import json
import os
import random
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_zero.checkpoint import safetensors_file
from hf_zero.checkpoint.safetensors_file import SlicedFile, library_order
from hf_zero.errors import ZeroCheckpointError


_A = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
_B = {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]}


def _write(path, header, nbytes=40):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(nbytes)))
    return path


def _library_opens(path):
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except Exception:
        return None


def _entry(**changes):
    return {"a": _A, "b": {**_B, **changes}}


_INVALID = {
    "offsets before the data": {"a": {**_A, "data_offsets": [-40, -24]}, "b": _B},
    "overlap": _entry(data_offsets=[8, 32]),
    "hole": {"a": _A, "b": {**_B, "shape": [5], "data_offsets": [20, 40]}},
    "end before begin": _entry(data_offsets=[40, 16]),
    "size of another shape": _entry(shape=[2, 2]),
    "size of another dtype": _entry(dtype="F16"),
    "negative shape": _entry(shape=[-2, -3]),
    "shape that overflows": _entry(shape=[2**62, 2**62]),
    "shape that is no list": _entry(shape="x"),
    "fractions": _entry(shape=[2.0, 3.0]),
    "truth values": _entry(shape=[True, 6]),
    "three offsets": _entry(data_offsets=[16, 40, 40]),
    "no offsets": {"a": _A, "b": {"dtype": "F32", "shape": [2, 3]}},
    "dtype that is no string": _entry(dtype=32),
    "unknown dtype": _entry(dtype="F99"),
    "tensor that is a number": {"a": _A, "b": 5},
    "metadata that are no strings": {"__metadata__": {"format": 1}, "a": _A, "b": _B},
    "list": [1, 2],
    "nothing": b"",
    "brackets": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "no text": b"\xff\xfe{}",
    "other encoding": json.dumps({"a": _A, "b": _B}).encode("utf-16"),
    "data without a tensor": {"a": _A},
}


@pytest.mark.parametrize("case", _INVALID)
def test_what_the_library_refuses_is_refused(tmp_path, case):
    path = _write(tmp_path / "x.safetensors", _INVALID[case])
    assert _library_opens(path) is None
    with pytest.raises(ZeroCheckpointError, match="x.safetensors"):
        SlicedFile.open(path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"garbage!", struct.pack("<Q", 2**63) + b"{}"])
def test_what_has_no_header_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert _library_opens(path) is None
    with pytest.raises(ZeroCheckpointError, match="x.safetensors is not a safetensors file"):
        SlicedFile.open(path)


def test_a_missing_file_and_an_unknown_dtype_are_named(tmp_path):
    with pytest.raises(ZeroCheckpointError, match="x.safetensors cannot be read: No such file"):
        SlicedFile.open(tmp_path / "x.safetensors")
    path = _write(tmp_path / "x.safetensors", {"b": {"dtype": "F4", "shape": [80], "data_offsets": [0, 40]}})
    assert _library_opens(path)
    with pytest.raises(ZeroCheckpointError, match="tensor 'b' has the dtype F4; hf_zero reads U64, "):
        SlicedFile.open(path)


def _damaged(header, draw):
    """A header with one number, or one dtype, changed."""
    header = copy.deepcopy(header)
    entry = header[draw.choice(sorted(header))]
    field = draw.choice(["dtype", "shape", "data_offsets"])
    if field == "dtype":
        entry["dtype"] = draw.choice(["F64", "F32", "BF16", "U8"])
    elif entry[field]:
        at = draw.randrange(len(entry[field]))
        entry[field][at] = draw.choice([entry[field][at] + draw.choice([-8, -1, 1, 8]), 0, 1, 4, -entry[field][at]])
    return header


def test_headers_with_any_number_changed_are_treated_as_by_the_library(tmp_path):
    """Tensors without elements and other orders in the file are among them."""
    header = {
        "late": {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]},
        "first": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]},
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [16, 16]},
        "scalar": {"dtype": "F64", "shape": [], "data_offsets": [40, 48]},
    }
    draw, opened = random.Random(0), 0
    for number in range(400):
        path = _write(tmp_path / f"{number}.safetensors", _damaged(header, draw) if number else header, nbytes=48)
        wanted = _library_opens(path)
        try:
            file = SlicedFile.open(path)
        except ZeroCheckpointError:
            assert wanted is None, path.read_bytes()
        else:
            assert {name: shape for name, (_, shape) in file.tensors.items()} == wanted, path.read_bytes()
            opened += 1
            with safe_open(path, "pt") as theirs:
                for name in wanted:
                    target = torch.empty(wanted[name], dtype=file.tensors[name][0])
                    file.read(path, [(name, 0, target)])
                    assert _bytes(target) == _bytes(theirs.get_tensor(name)), name
    assert 10 < opened < 390, opened


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_is_laid_out_and_read_as_by_the_library(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"t{number}": torch.randint(0, 2, (32,), generator=draw, dtype=torch.uint8).view(dtype)
        for number, dtype in enumerate(safetensors_file._NAMES)
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert SlicedFile(library_order(shapes), {}).header == SlicedFile.open(path).header
    for name, tensor in tensors.items():
        target = torch.empty_like(tensor)
        SlicedFile.open(path).read(path, [(name, 0, target)])
        assert _bytes(target) == _bytes(tensor), tensor.dtype
    with pytest.raises(ZeroCheckpointError, match="tensor 'z' cannot be saved: .* no torch.complex128"):
        library_order({"z": (torch.complex128, (2,))})


def test_a_header_that_no_reader_takes_is_not_written(tmp_path):
    """A limit of the library: 100 MB."""
    padded = b"{" + b" " * 100_000_000 + b"}"
    path = _write(tmp_path / "x.safetensors", padded, nbytes=0)
    assert _library_opens(path) is None
    with pytest.raises(ZeroCheckpointError, match="is not a safetensors file"):
        SlicedFile.open(path)
    file = SlicedFile({}, {"long": "x" * 100_000_000})
    with pytest.raises(ZeroCheckpointError, match="header of 100,.* bytes: readers of safetensors take 100,000,000"):
        file.create(tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


def test_what_comes_next_is_asked_for_while_the_present_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.checkpoint.safetensors_file._AHEAD_BYTES", 16)
    tensors = {f"t{number}": torch.full((4,), float(number)) for number in range(5)}
    layout = SlicedFile(dict.fromkeys(tensors, (torch.float32, (4,))), {})
    path, asked = tmp_path / "a.safetensors", []
    path.write_bytes(layout.header + b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))

    def parts():
        for name in tensors:
            read = torch.empty(4)
            yield name, 0, read
            assert torch.equal(read, tensors[name])
            asked.append(name)

    monkeypatch.setattr("os.posix_fadvise", lambda _, position, size, advice: asked.append((position, size, advice)))
    layout.read(path, parts(), coming=((name, 0, torch.empty(4, device="meta")) for name in tensors))
    ranges = {f"t{number}": (layout.position(f"t{number}", 0), 16, os.POSIX_FADV_WILLNEED) for number in range(5)}
    order = ["t0", "t1", "t2", "t3", "t4"]
    assert [each for each in asked if isinstance(each, str)] == order
    assert [each for each in asked if not isinstance(each, str)] == [ranges[name] for name in order]
    assert asked.index(ranges["t1"]) < asked.index("t0") < asked.index(ranges["t2"]) < asked.index("t1")
