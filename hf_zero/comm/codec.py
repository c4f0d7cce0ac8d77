"""Quantised messages: values in 8 or 4 bits with a scale for each block, and the error that this makes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


_OUTLIER = 64.0  # times the median of a block
_CHUNK = 1 << 17  # elements at a time: what stays in a processor's cache


class Codec:
    """Symmetric block quantisation: `code = round(x / peak * largest code)`, with one peak for each block of elements.

    The peak is the largest absolute value of the block, rounded to bf16 before codes are made, so that both sides use
    the same. A block with inf or nan decodes to nan. A payload is one uint8 tensor: all codes, then all peaks (8 bits:
    1.0078 bytes per element, 4 bits: 0.5156).

    Decoded 8-bit values are encoded to the same payload again, also after they were rounded to bf16: the peak comes
    back as it is, and the rounding is less than half a code.

    With 4 bits, blocks are rotated by a Hadamard matrix of 32 x 32 before (as in SDP4Bit, Jia et al. 2024,
    arXiv:2410.15526), which spreads outliers: the error no longer depends on how heavy the tails are.

    Args:
        bits: 8 (blocks of 256 elements) or 4 (blocks of 128).
    """

    def __init__(self, bits: int) -> None:
        assert bits in (8, 4), bits
        self.bits = bits
        self.block = {8: 256, 4: 128}[bits]
        self._largest = {8: 127, 4: 7}[bits]
        self._turns: dict[torch.device, Tensor] = {}  # the rotation, where it is used

    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` elements, a multiple of the block."""
        return numel * self.bits // 8 + 2 * (numel // self.block)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Write the payload of flat `values` (any floating dtype; whole blocks) into a flat uint8 tensor."""
        assert values.numel() % self.block == 0 and payload.numel() == self.nbytes(values.numel())
        codes, peaks = self._parts(payload, values.numel())
        for at in range(0, values.numel(), _CHUNK):
            blocks = self._rotate(values[at : at + _CHUNK].float().view(-1, self.block))
            low, high = blocks.aminmax(dim=1)
            peak = torch.maximum(low.abs(), high.abs()).bfloat16()
            peaks[at // self.block : at // self.block + len(peak)] = peak
            # A block of zeros has the peak 0; where it is inf or nan the codes do not matter.
            scale = (peak.float() / self._largest).clamp_min(torch.finfo(torch.float32).tiny)
            blocks = (blocks / scale.unsqueeze(1)).nan_to_num_()
            blocks = blocks.round_().clamp_(-self._largest, self._largest).to(torch.int8).view(-1)
            self._pack(blocks, codes[at * self.bits // 8 : (at + blocks.numel()) * self.bits // 8])

    def pack(self, values: Tensor) -> Tensor:
        """The payload of flat `values`."""
        payload = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode(values, payload)
        return payload

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the values of a payload into flat `out`, or add them to it."""
        codes, peaks = self._parts(payload, out.numel())
        for at in range(0, out.numel(), _CHUNK):
            target = out[at : at + _CHUNK]
            scale = peaks[at // self.block : (at + target.numel()) // self.block].float() / self._largest
            blocks = self._unpack(codes[at * self.bits // 8 : (at + target.numel()) * self.bits // 8])
            values = self._rotate(blocks.view(-1, self.block) * scale.unsqueeze(1)).view(-1)
            if add:
                target.add_(values)
            else:
                target.copy_(values)

    def error(self, values: Tensor, payload: Tensor) -> Tensor:
        """Sums of squares of the error and of the values (fp64, two elements, on the device of `values`).

        A value of more than 64 times the median of its block (of the magnitudes that are not zero) counts as much as
        that: with its own size an outlier would hide that the others of its block are lost.
        """
        decoded = torch.empty_like(values, dtype=torch.float32)
        self.decode(payload, decoded)
        wrong = decoded.sub_(values).double().square().sum()
        sizes = values.float().abs().view(-1, self.block)
        median = sizes.masked_fill(sizes == 0, math.nan).nanmedian(dim=1, keepdim=True).values
        counted = torch.minimum(sizes, _OUTLIER * median.nan_to_num(math.inf))
        return torch.stack([wrong, counted.double().square().sum()])

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        size = numel * self.bits // 8
        return payload[:size], payload[size:].view(torch.bfloat16)

    def _pack(self, codes: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.view(torch.int8).copy_(codes)
            return
        pairs = codes.view(-1, 2)
        out.copy_((pairs[:, 0] & 15) | ((pairs[:, 1] & 15) << 4))

    def _unpack(self, codes: Tensor) -> Tensor:
        signed = codes.view(torch.int8)
        if self.bits == 8:
            return signed.float()
        # Shifted up and down again, four bits have their sign.
        return torch.stack([(signed << 4) >> 4, signed >> 4], dim=1).view(-1).float()

    def _rotate(self, blocks: Tensor) -> Tensor:
        """Turn blocks by a matrix that is its own inverse."""
        if self.bits == 8:
            return blocks
        if blocks.device not in self._turns:
            self._turns[blocks.device] = _hadamard(32).to(blocks.device)
        return (blocks.view(-1, 32) @ self._turns[blocks.device]).view(blocks.shape)


def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix, scaled to be orthonormal: symmetric, and so its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
