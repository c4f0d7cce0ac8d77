"""The global gradient norm over sharded masters, and clipping by it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_zero.comm.communicator import Communicator


# torch's fp32 norm of a long vector on CPU adds into too few accumulators: 6e-4 off at 16M elements (measured). Norms
# of short rows, added up in fp64, are exact to 1e-9 and as fast.
ROW = 1024


def _squares_of_rows(flat: Tensor) -> Tensor:
    """The sum of squares of every row of a flat gradient, in fp64."""
    rows = flat.numel() // ROW
    head, rest = flat[: rows * ROW].view(rows, ROW), flat[rows * ROW :]
    squares = torch.linalg.vector_norm(head, dim=1).double().square()
    # Of nothing there is no row. The operations are the same at any length.
    return torch.cat([squares, rest.double().square().sum().view(1)[: min(1, rest.numel())]])


def global_norm(
    grads: Iterable[Tensor],
    comm: Communicator,
    sharded: bool,
    norm_type: float = 2.0,
    *,
    device: torch.device,
    beside: Tensor | None = None,
    everyone: Communicator | None = None,
    tensor: Communicator | None = None,
) -> Tensor:
    """The norm of all gradients (fp32 scalar on `device`): one pass over this rank's part, one scalar all-reduce.

    Tensor-parallel ranks, if there are any, have other `grads`, which takes one more. `beside` (fp64, on `device`) is
    added up, in place, over `everyone` (default: the same ranks), by the first where it has these ranks. Supports the
    2-norm and the infinity norm; nan on any rank is nan on all. Raises ValueError for other norms.
    """
    grads = [grad for grad in grads if grad.numel()]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norm_type == math.inf:
        if grads:
            norms = [norm.to(device) for norm in torch._foreach_norm(grads, math.inf)]
            total = torch.stack(norms).amax().double()
    elif norm_type == 2.0:
        # All rows together, so that the sum does not depend on how masters are cut.
        squares = [_squares_of_rows(grad).to(device) for grad in grads if grad.device.type == "cpu"]
        # A device adds up in a tree, which is as good, and by a few kernels for all of them.
        others = [grad for grad in grads if grad.device.type != "cpu"]
        squares += [torch.stack(torch._foreach_norm(others)).double().square()] if others else []
        total = torch.cat(squares).sum() if squares else total
    else:
        raise ValueError(f"norm_type={norm_type} is not supported over shards: use 2.0 or inf")
    over = [each for each in (comm if sharded else None, tensor) if each is not None]
    everyone = everyone or comm
    if norm_type == 2.0 and sharded and beside is not None and everyone is comm:
        together = comm.all_reduce_scalars(torch.cat([total.view(1), beside]))
        beside.copy_(together[1:])
        total, over = together[0].clone(), over[1:]
    elif beside is not None:
        everyone.all_reduce_scalars(beside)
    for each in over:
        total = each.all_reduce_scalars(total.view(1))[0] if norm_type == 2.0 else _largest(total, each)
    return (total.sqrt() if norm_type == 2.0 else total).float()


def _largest(value: Tensor, comm: Communicator) -> Tensor:
    """The largest over ranks, nan where one has nan: an all-reduce of the maximum keeps nan of some ranks only."""
    largest, is_nan = comm.all_reduce_scalars(
        torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan()]), largest=True
    )
    return torch.where(is_nan > 0, math.nan, largest)


def clip_(masters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), as torch does, without waiting for the device."""
    if max_norm == math.inf:
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return  # a pass over all gradients saved; on a device, looking at the factor would cost more than the pass
    grads: dict[torch.device, list[Tensor]] = defaultdict(list)
    for master in masters:
        if master.grad is not None:
            grads[master.grad.device].append(master.grad)
    for device, its in grads.items():  # the host waits for its own once
        torch._foreach_mul_(its, factor.to(device))
