"""Quantised values come back with the error that the format has, and never silently saturate."""

import pytest
import torch

from hf_zero.comm.codec import Codec
from hf_zero.comm.feedback import ErrorFeedback


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
    if draw is torch.randn:
        assert (wrong / whole) ** 0.5 == pytest.approx(_relative(found, values), rel=1e-3)
    else:
        assert _relative(found, values) <= (wrong / whole) ** 0.5 <= 1.2 * _relative(found, values)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_decoded_is_encoded_to_the_same_payload(dtype):
    torch.manual_seed(4)
    values = torch.cat([torch.randn(1 << 16), _heavy_tailed(1 << 16), torch.zeros(512)])
    values *= torch.logspace(-12, 12, values.numel())
    payload, found = _back(Codec(8), values)
    assert torch.equal(_back(Codec(8), found.to(dtype))[0], payload)


def test_error_feedback_brings_the_mean_of_many_messages_near_what_was_meant():
    torch.manual_seed(5)
    codec, values = Codec(4), torch.randn(1 << 12)

    def mean(feedback, steps=60):
        total = torch.zeros_like(values)
        for _ in range(steps):
            message = values.clone()
            feedback.correct("sum", message)
            sent = torch.empty_like(message)
            codec.decode(codec.pack(message), sent)
            total += sent
            feedback.keep("sum", message, sent)
            feedback.end_step()
        return _relative(total / steps, values)

    alone = mean(ErrorFeedback(0.8, 1))  # forgets after every step
    assert alone == pytest.approx(_relative(_back(codec, values)[1], values), rel=1e-4)
    assert mean(ErrorFeedback(0.8, 1000)) < alone / 5


def test_error_feedback_survives_an_overflow():
    feedback, bad = ErrorFeedback(0.5, 100), torch.full((256,), float("inf"))
    feedback.keep("sum", bad, bad.clone())
    values = torch.ones(256)
    feedback.correct("sum", values)
    assert torch.equal(values, torch.ones(256))


@pytest.mark.parametrize("bits, limit", [(8, 0.05), (4, 0.25)])
def test_an_outlier_does_not_hide_what_its_block_has_lost(bits, limit):
    torch.manual_seed(6)
    codec, values = Codec(bits), torch.randn(256 * 64)
    values.view(-1, 256)[:, 7] *= 1e4
    wrong, whole = codec.error(values, codec.pack(values)).tolist()
    assert (wrong / whole) ** 0.5 > 2 * limit
    sparse = torch.randn(256 * 64) * (torch.rand(256 * 64) < 0.02)
    wrong, whole = codec.error(sparse, codec.pack(sparse)).tolist()
    assert whole == pytest.approx(sparse.square().sum().item(), rel=0.01) and (wrong / whole) ** 0.5 < limit
