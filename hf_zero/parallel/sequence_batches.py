"""Cuts batches: each rank of a sequence group takes its part of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


IGNORED = -100
_STARTS = "cu_seq_lens"  # of packed sequences, for queries (_q) and keys (_k), with max_length_q and max_length_k


def cut(batch: Any, rank: int, size: int) -> dict[str, Any]:
    """The part of `batch` for rank `rank` of `size`: equally many tokens for all, the last ones padded.

    Tensors of the shape of `input_ids`, (rows, tokens), are cut, others stay. Labels are also shifted to the token
    that predicts them (`shift_labels`), before the cut. Positions that are missing are counted from the first token.

    Raises ValueError for batches without such input_ids, and for those that need padding and say where sequences begin
    that are packed into several rows (`cu_seq_lens_q`).
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        kind = f"keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            "sp_size: batches must be dicts with input_ids of shape (rows, tokens), so that sequences can be cut; "
            f"this one is or has {kind}"
        )
    whole = dict(batch)
    mask, labels = whole.get("attention_mask"), whole.get("labels")
    if isinstance(mask, Tensor) and mask.shape != ids.shape:
        raise ValueError(
            f"sp_size: an attention_mask of shape {tuple(mask.shape)} cannot be cut: pass one of the shape of "
            f"input_ids, {tuple(ids.shape)}"
        )
    if isinstance(labels, Tensor) and labels.shape == ids.shape and "shift_labels" not in whole:
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(ids.shape[1], device=ids.device)
    if whole["position_ids"].shape[-1] == ids.shape[1]:
        whole["position_ids"] = whole["position_ids"].expand(ids.shape)
    tokens = -(-ids.shape[1] // size)
    missing = tokens * size - ids.shape[1]
    if missing and any(name.startswith(_STARTS) for name in whole):
        if ids.shape[0] > 1:
            raise ValueError(
                f"sp_size: {ids.shape[1]} tokens cannot be cut into {size} equal parts, and the batch says where "
                f"sequences begin that are packed into {ids.shape[0]} rows (cu_seq_lens_q): have the collator pack "
                f"them into one row, or pad to a multiple of {size} (pad_to_multiple_of)"
            )
        _lengthen_last(whole, missing)
    return {
        name: _part(name, value, missing, slice(rank * tokens, (rank + 1) * tokens))
        if isinstance(value, Tensor) and value.shape[:2] == ids.shape
        else value
        for name, value in whole.items()
    }


def _lengthen_last(batch: dict[str, Any], missing: int) -> None:
    """Have padding belong to the last of the packed sequences, as its positions do."""
    for side in ("q", "k"):
        starts = batch.get(f"{_STARTS}_{side}")
        if starts is not None:
            batch[f"{_STARTS}_{side}"] = starts = torch.cat([starts[:-1], starts[-1:] + missing])
            longest = f"max_length_{side}"
            if longest in batch:
                batch[longest] = max(batch[longest], type(batch[longest])(starts[-1] - starts[-2]))


def _part(name: str, value: Tensor, missing: int, part: slice) -> Tensor:
    if missing and name == "position_ids":
        # As if the last sequence went on: causal attention does not look at what follows.
        more = torch.arange(1, missing + 1, device=value.device)
        value = torch.cat([value, value[:, -1:] + more], 1)
    elif missing:
        fill = IGNORED if name in ("labels", "shift_labels") else 0
        value = torch.cat([value, value.new_full((value.shape[0], missing, *value.shape[2:]), fill)], 1)
    return value[:, part].contiguous()


class CuttingCollator:
    """A dataloader's collate function whose batches are cut."""

    def __init__(self, collate: Callable[[list], Any], rank: int, size: int) -> None:
        self.collate, self.rank, self.size = collate, rank, size

    def __call__(self, examples: list) -> dict[str, Any]:
        return cut(self.collate(examples), self.rank, self.size)
