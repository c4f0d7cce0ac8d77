"""Checksums add up over any cut of a tensor, notice what they must, and keep the values that markers have."""

import json

import pytest
import torch

from hf_zero.checkpoint import commit
from hf_zero.checkpoint.checksum import Checksums, combine
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint import write_alone


DTYPES = [torch.float64, torch.int64, torch.complex64, torch.float32, torch.bfloat16, torch.int16, torch.uint8]
DTYPES += [torch.float8_e4m3fn, torch.bool]
# More words than have weights of their own, and no multiple of anything.
_BYTES = 300_000 // 8 * 8


def _bytes(dtype, nbytes=_BYTES):
    draw = torch.Generator().manual_seed(nbytes)
    highest = 2 if dtype is torch.bool else 256
    return torch.randint(0, highest, (nbytes,), generator=draw, dtype=torch.uint8)


def _sum(values, start=0, **how):
    sums = Checksums(**how)
    sums.add("x", start, values)
    return sums["x"]


def _defined(data, word, signed=True):
    """The checksum as its definition has it, in Python's whole numbers."""
    words = [int.from_bytes(data[at : at + word], "little", signed=signed) for at in range(0, len(data), word)]
    weights = ((0x1E3779B97F4A7C15 * (at % 2**15)) % 2**64 | 1 for at in range(len(words)))
    return sum(x * w * (2 * (at // 2**15) + 1) for at, (x, w) in enumerate(zip(words, weights, strict=True))) % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_is_the_defined_one(dtype):
    data = _bytes(dtype)
    word = min(dtype.itemsize, 4)
    assert _sum(data.view(dtype)) == _defined(data.numpy().tobytes(), word, signed=word > 1)
    if dtype.itemsize == 8:
        assert _sum(data.view(dtype), wide=True) == _defined(data.numpy().tobytes(), 8)


@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype, wide):
    values = _bytes(dtype).view(dtype)
    numel = values.numel()
    cuts = [0, 1, 7, numel // 3, numel // 2 + 1, numel - 1, numel]
    parts = [_sum(values[low:high], low, wide=wide) for low, high in zip(cuts, cuts[1:], strict=False)]
    assert combine(*parts) == _sum(values, wide=wide)
    sums = Checksums(["x", "empty"], wide=wide)
    for low, high in reversed(list(zip(cuts, cuts[1:], strict=False))):
        sums.add("x", low, values[low:high])
    assert sums == {"x": _sum(values, wide=wide), "empty": 0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_counts_and_highest_bits_do_not_cancel(dtype):
    data = _bytes(dtype, 4096)
    whole, width = _sum(data.view(dtype)), dtype.itemsize
    bits = range(1) if dtype is torch.bool else range(8)
    for at in range(0, 4096, 257):
        for bit in bits:
            changed = data.clone()
            changed[at] ^= 1 << bit
            assert _sum(changed.view(dtype)) != whole, (at, bit)
    highest = width - 1  # its highest bit is the sign
    for first, second in [(3, 9), (0, 1), (2, 4), (100, 101)]:
        changed = data.clone()
        for element in (first, second):
            changed[element * width + highest] ^= 1 if dtype is torch.bool else 0x80
        assert _sum(changed.view(dtype)) != whole, (first, second)


def _committed(folder, tensors, version):
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_alone(folder / "model.safetensors", SlicedFile(shapes, {}), tensors)
    sums = Checksums(wide=version == 1)
    for name, tensor in tensors.items():
        sums.add(name, 0, tensor)
    commit.write_marker(folder, {"model.safetensors": sums})
    marker = json.loads((folder / commit.MARKER).read_text())
    assert marker["format"] == 2
    (folder / commit.MARKER).write_text(json.dumps({**marker, "format": version}))


@pytest.mark.parametrize("version", (1, 2))
def test_markers_of_both_formats_are_verified(tmp_path, version):
    tensors = {"wide": torch.rand(50, dtype=torch.float64), "narrow": torch.rand(50), "count": torch.arange(9)}
    _committed(tmp_path, tensors, version)
    commit.check_files(tmp_path)
    commit.check_tensors(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for name in tensors:
        damaged = bytearray(whole)
        damaged[SlicedFile.open(path).position(name, 3) + 1] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ZeroCheckpointError, match=f"tensor '{name}' has other values"):
            commit.check_tensors(tmp_path)
        path.write_bytes(whole)
    signs = tensors["wide"].clone()
    signs[[3, 9]] *= -1
    write_alone(path, SlicedFile.open(path), {**tensors, "wide": signs})
    if version == 2:
        with pytest.raises(ZeroCheckpointError, match="tensor 'wide' has other values"):
            commit.check_tensors(tmp_path)
