"""The sum over ranks: made here, in rank order, so that it is the same on every run and transport."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.comm.codec import Codec
from hf_zero.comm.work import OnChunk, wide


class RankOrderSum:
    """Adds up what ranks hand over, chunk by chunk and in rank order, in fp32 at least; those of one rank stay."""

    def __init__(self, size: int, on_chunk: OnChunk) -> None:
        self._last, self._on_chunk = size - 1, on_chunk
        self._total: Tensor | None = None
        self._dtype: torch.dtype | None = None  # of sums: asked for once, as chunks are many

    def __call__(self, source: int, at: int, values: Tensor) -> None:
        if self._last == 0:
            self._on_chunk(at, values)
            return
        if self._total is None:
            self._dtype = self._dtype or wide(values.dtype)
            self._total = values.to(self._dtype)
        else:
            self._total.add_(values)
        if source == self._last:
            total, self._total = self._total, None
            self._on_chunk(at, total)


class DecodedSum:
    """Adds up payloads of a codec, which come whole, in rank order and in fp32."""

    def __init__(self, codec: Codec, numel: int, size: int, on_chunk: OnChunk) -> None:
        self._codec, self._numel, self._last, self._on_chunk = codec, numel, size - 1, on_chunk
        self._total: Tensor | None = None

    def __call__(self, source: int, at: int, payload: Tensor) -> None:
        assert at == 0 and payload.numel() == self._codec.nbytes(self._numel)
        if self._total is None:
            self._total = torch.empty(self._numel, dtype=torch.float32, device=payload.device)
        self._codec.decode(payload, self._total, add=source > 0)
        if source == self._last:
            self._on_chunk(0, self._total)
