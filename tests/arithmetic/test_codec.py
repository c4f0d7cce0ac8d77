"""Quantised values come back with the error that the format has, and never silently saturate."""

import pytest
import torch

from hf_zero.comm.codec import Codec


def _back(codec, values):
    payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, payload)
    out = torch.full((values.numel(),), 7.0)
    codec.decode(payload, out)
    return payload, out


def _relative(found, values):
    return ((found - values.float()).norm() / values.float().norm()).item()


def _heavy_tailed(numel):
    return torch.distributions.StudentT(3.0).sample((numel,))


@pytest.mark.parametrize(
    "bits, draw, low, high",
    [
        (8, torch.randn, 0.006, 0.008),
        (8, _heavy_tailed, 0.006, 0.03),
        (4, torch.randn, 0.10, 0.13),
        (4, _heavy_tailed, 0.10, 0.13),
    ],
)
def test_the_error_is_that_of_the_format(bits, draw, low, high):
    torch.manual_seed(0)
    values = draw(1 << 18)
    codec = Codec(bits)
    payload, found = _back(codec, values)
    assert low <= _relative(found, values) <= high
    wrong, whole = codec.error(values, payload).tolist()
    assert (wrong / whole) ** 0.5 == pytest.approx(_relative(found, values), rel=1e-3)


@pytest.mark.parametrize("bits, per_element", [(8, 1 + 2 / 256), (4, 0.5 + 2 / 128)])
def test_a_payload_has_the_bytes_of_the_formula(bits, per_element):
    assert Codec(bits).nbytes(256 * 100) == per_element * 256 * 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_dtype_and_scale_goes_in(bits, dtype):
    torch.manual_seed(1)
    for size in (6e4, 1.0, 1e-4):
        values = (torch.randn(512).clamp(-1, 1) * size).to(dtype)
        assert _relative(_back(Codec(bits), values)[1], values) <= (0.01 if bits == 8 else 0.15), (dtype, size)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible(bits):
    codec = Codec(bits)
    values = torch.zeros(4 * codec.block)
    assert not _back(codec, values)[1].any()
    for bad in (float("inf"), float("nan"), -float("inf")):
        values = torch.ones(4 * codec.block)
        values[codec.block + 3] = bad
        found = _back(codec, values)[1].view(4, -1)
        assert not found[1].isfinite().any()
        assert found[[0, 2, 3]].isfinite().all()


def test_the_largest_value_of_a_block_is_off_by_half_a_code_at_most():
    torch.manual_seed(2)
    values = torch.randn(256 * 64) * torch.logspace(-8, 8, 64).repeat_interleave(256)
    off = (_back(Codec(8), values)[1] - values).view(64, -1).abs().amax(1)
    assert (off <= 0.504 * values.view(64, -1).abs().amax(1) / 127 * 1.005).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_adding_equals_decoding_and_adding(bits):
    torch.manual_seed(3)
    codec, values = Codec(bits), torch.randn(1 << 18)
    payload, found = _back(codec, values)
    total = torch.ones(values.numel())
    codec.decode(payload, total, add=True)
    assert torch.equal(total, found + 1)
