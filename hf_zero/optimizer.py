"""Puts flat master groups in the place of an optimizer's parameters; the optimizer object stays the user's."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hf_zero.flat_buffer import FlatBuffer
from hf_zero.masters import MasterGroup, Piece


class ZeroOptimizerMixin:
    """Added to the class of an adopted optimizer: its gradients also wait in buffers that it does not see."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._zero_drop_gradients()


def adopt(
    optimizer: torch.optim.Optimizer,
    buffers: Iterable[FlatBuffer],
    group_of: dict[nn.Parameter, MasterGroup],
    *,
    drop_gradients: Callable[[], None],
) -> list[MasterGroup]:
    """Replace the parameters of every optimizer group by one flat master tensor per dtype.

    `group_of` holds the parameters that an optimizer adopted before owns; it is extended. Frozen parameters are left
    out of the groups. Existing optimizer state moves along. Raises ValueError where the optimizer holds parameters
    that are not among `buffers`, or is not elementwise.
    """
    buffers = list(buffers)
    home = {param: (buffer, index) for buffer in buffers for index, param in enumerate(buffer.params)}
    _check_parameters(optimizer, home, group_of)
    _check_elementwise(optimizer)
    wanted = {param: i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    groups = _move_masters([buffer for buffer in buffers if buffer.trainable], wanted, group_of)
    old_state, optimizer.state = optimizer.state, defaultdict(dict)
    for i, group in enumerate(optimizer.param_groups):
        group["params"] = [master.weight for (label, _), master in groups.items() if label == i]
    _move_state(old_state, optimizer, home)
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (ZeroOptimizerMixin, base), {"__module__": base.__module__})
    optimizer._zero_drop_gradients = drop_gradients
    return list(groups.values())


def _check_parameters(optimizer: torch.optim.Optimizer, home: dict, group_of: dict) -> None:
    for i, group in enumerate(optimizer.param_groups):
        for j, param in enumerate(group["params"]):
            if param not in home:
                raise ValueError(
                    f"{type(optimizer).__name__} group {i} holds a tensor (number {j}, shape {tuple(param.shape)}) "
                    "that is not a parameter of the prepared model. Create the optimizer from model.parameters() of "
                    "the model that you prepare, after any change to its modules (LoRA, resized embeddings)"
                )
            if param in group_of:
                buffer, index = home[param]
                raise ValueError(f"parameter '{buffer.names[index]}' is in two optimizers; keep it in one of them")


def _move_masters(
    buffers: list[FlatBuffer], wanted: dict[nn.Parameter, int], group_of: dict[nn.Parameter, MasterGroup]
) -> dict[tuple[int, torch.dtype], MasterGroup]:
    """Cut what this rank owns into runs per optimizer group and move each into its group's flat tensor.

    Label -1 collects trainable parameters that no optimizer holds; runs of optimizers adopted before stay in place.
    """
    plans = []  # (buffer, old piece, (label, dtype) or None to keep, start, stop)
    numels: dict[tuple[int, torch.dtype], int] = {}
    for buffer in buffers:
        kept = len(wanted) + len(buffers)  # labels of kept groups must differ from all others, and from each other
        kept_labels: dict[MasterGroup, int] = {}
        labels = [
            kept + kept_labels.setdefault(group_of[param], len(kept_labels))
            if param in group_of
            else wanted.get(param, -1)
            for param in buffer.params
        ]
        dtype = buffer.pieces[0].group.weight.dtype
        for label in set(labels):
            if label < kept:
                numels.setdefault((label, dtype), 0)
        for label, start, stop in buffer.layout.runs(buffer.begin, buffer.end, labels):
            key = None if label >= kept else (label, dtype)
            if key is not None:
                numels[key] += stop - start
            plans.append((buffer, key, start, stop))
    device = buffers[0].full.device if buffers else torch.device("cpu")
    groups = {key: MasterGroup(numel, key[1], device) for key, numel in numels.items()}
    _fill(plans, groups)
    for param in wanted:
        for buffer in buffers:
            if any(param is candidate for candidate in buffer.params):
                group_of[param] = groups[wanted[param], buffer.pieces[0].group.weight.dtype]
    return groups


def _fill(plans: list, groups: dict[tuple[int, torch.dtype], MasterGroup]) -> None:
    used = dict.fromkeys(groups, 0)
    pieces: dict[FlatBuffer, list[Piece]] = {}
    for buffer, key, start, stop in plans:
        new = pieces.setdefault(buffer, [])
        if key is None:
            new.append(next(piece for piece in buffer.pieces if piece.start == start))
            continue
        piece = Piece(start, stop, groups[key], used[key])
        used[key] += stop - start
        for old_start, old_stop, values in buffer.rest():
            low, high = max(start, old_start), min(stop, old_stop)
            if low < high:
                piece.weight[low - start : high - start].copy_(values[low - old_start : high - old_start])
        new.append(piece)
    for buffer, new in pieces.items():
        buffer.pieces = new


def _move_state(old_state: dict, optimizer: torch.optim.Optimizer, home: dict) -> None:
    """Carry the state that an optimizer had for whole parameters over to this rank's part of the flat tensors."""
    scalars = {"step"} | {  # a state that has one parameter's shape by chance only (the 0-dim step of a scalar)
        name
        for param, state in old_state.items()
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.shape != param.shape
    }
    for param, state in old_state.items():
        buffer, index = home[param]
        for name, value in state.items():
            for piece in buffer.pieces:
                flat_state = optimizer.state[piece.group.weight]
                if name in scalars:
                    flat_state[name] = value
                    continue
                flat = flat_state.setdefault(name, torch.zeros_like(piece.group.weight, requires_grad=False))
                begin = buffer.begin + piece.start
                for span in buffer.layout.spans(begin, buffer.begin + piece.stop):
                    if span.index == index:
                        at = piece.offset + span.offset
                        flat[at : at + span.numel] = value.reshape(-1)[span.start : span.start + span.numel]


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Step a copy of the optimizer on a matrix and on the same numbers cut into flat pieces; they must agree."""
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(8, 4, generator=generator) for _ in range(3))
    try:
        whole = _probe(optimizer, [values], [[grad] for grad in grads])
        flat = _probe(
            optimizer, values.reshape(-1).split((20, 12)), [grad.reshape(-1).split((20, 12)) for grad in grads]
        )
    except Exception as error:
        raise ValueError(_refusal(optimizer, f"it fails on flat parameters: {error}")) from error
    if not torch.allclose(torch.cat(whole), torch.cat(flat), rtol=1e-5, atol=1e-7):
        raise ValueError(_refusal(optimizer, "its update of an element depends on the shape around it"))


def _refusal(optimizer: torch.optim.Optimizer, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot be sharded: {reason}. hf_zero steps flat slices of parameters, so it "
        "needs an elementwise optimizer such as AdamW, Adam, SGD, Adagrad, RMSprop, NAdam, RAdam or Lion"
    )


def _probe(optimizer: torch.optim.Optimizer, values: Iterable[Tensor], grads: list) -> list[Tensor]:
    """Run a twin of `optimizer` (same class and settings, no state, no hooks) on small tensors."""
    params = [nn.Parameter(value.clone()) for value in values]
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's counter
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state = defaultdict(dict)
    settings = optimizer.param_groups[0] if optimizer.param_groups else {}
    twin.param_groups = [{**settings, "params": params, "lr": 0.01}]
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        twin.step()
    return [param.detach().reshape(-1) for param in params]
