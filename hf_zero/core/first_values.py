"""The first values of a buffer's parameters: rank 0's, or a file's; each rank takes the part that it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_zero.comm import dtensors
from hf_zero.comm.mesh import Mesh
from hf_zero.comm.work import Tag
from hf_zero.core import deferred
from hf_zero.core.layout import FlatLayout
from hf_zero.core.tensor_parts import TensorParts


def first_values(
    layout: FlatLayout,
    params: Sequence[nn.Parameter],
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
    parts: TensorParts,
    needed: tuple[int, int],
    tag: Tag,
) -> Tensor:
    """Elements `needed` of the layout, in memory of their own; a collective.

    They are rank 0's, whatever others have. It is no collective where a part is needed and all of it can be read in
    slices. Each element is written once, where messages need no room.
    """
    low, high = needed
    sources = [deferred.take(param) for param in params]
    found = [source for source in sources if source is not None]
    if high - low < layout.padded_numel and len(found) == len(sources):
        flat = _empty(layout, low, high, dtype, device)
        for span in layout.spans(low, high):
            found[span.index].read(span.start, flat[span.offset : span.offset + span.numel])
        return flat
    if mesh.world.deals and mesh.tensor is None:
        return _dealt(layout, params, sources, _empty(layout, low, high, dtype, device), mesh, low, tag)
    flat = _empty(layout, 0, layout.padded_numel, dtype, device)
    views = views_of(layout, flat)
    for param, source, view in zip(params, sources, views, strict=True):
        if source is None:
            view.copy_(dtensors.local(param.detach()))
        else:
            source.read(0, view.view(-1))
    parts.agree(flat, views)
    return flat if flat.numel() == high - low else flat[low:high].clone()


def views_of(layout: FlatLayout, flat: Tensor) -> list[Tensor]:
    """Views of `flat`, a tensor of the whole layout, one per parameter."""
    spans = zip(layout.offsets, layout.numels, layout.shapes, strict=True)
    return [flat[offset : offset + numel].view(shape) for offset, numel, shape in spans]


def _empty(layout: FlatLayout, low: int, high: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for elements [low, high), in which padding is zero."""
    flat = torch.empty(high - low, dtype=dtype, device=device)
    for start, stop in layout.gaps(low, high):
        flat[start:stop] = 0
    return flat


def _dealt(
    layout: FlatLayout,
    params: Sequence[nn.Parameter],
    sources: Sequence[deferred.Source | None],
    flat: Tensor,
    mesh: Mesh,
    low: int,
    tag: Tag,
) -> Tensor:
    """`flat`, filled with the elements from `low` on: the other ranks read them out of rank 0's parameters."""
    given: list[Tensor] = []
    for param, source in zip(params, sources, strict=True) if mesh.world.rank == 0 else ():
        values = dtensors.local(param.detach())
        if source is not None:
            values = torch.empty(param.shape, dtype=flat.dtype, device=flat.device)
            source.read(0, values.view(-1))
        given.append(values.to(flat.device).reshape(-1))
    wanted: list[tuple[int, Tensor]] = []
    starts = [0, *itertools.accumulate(layout.numels)]
    for span in layout.spans(low, low + flat.numel()):
        part = flat[span.offset : span.offset + span.numel]
        if given:
            part.copy_(given[span.index][span.start : span.start + span.numel])
        else:
            wanted.append((starts[span.index] + span.start, part))
    mesh.world.deal(given, wanted, tag)
    return flat
