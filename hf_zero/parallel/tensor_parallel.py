"""Shares a model out over tensor-parallel ranks by transformers' own plan, whichever way it was loaded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hf_zero.comm import dtensors
from hf_zero.core import deferred, guard
from hf_zero.errors import ZeroConfigError


def share_out_once(
    model: nn.Module, size: int, mesh: Callable[[], dtensors.DeviceMesh]
) -> dict[nn.Parameter, nn.Parameter]:
    """As `share_out`, over `size` ranks, unless the model was loaded so.

    Raises ZeroConfigError, too, for one that was shared out over another number of ranks, or in the middle of heads.
    """
    ranks = dtensors.ranks_of(model)
    if ranks is not None and len(ranks) != size:
        raise ZeroConfigError(
            f"{type(model).__name__} was loaded with tensor parallelism over {len(ranks)} ranks, and tp_size is "
            f"{size}: set tp_size to {len(ranks)} (or ParallelismConfig(tp_size={len(ranks)})), so that these ranks "
            "get the same samples"
        )
    if ranks is None:
        return share_out(model, mesh()) if size > 1 else {}
    if hasattr(model, "_expand_parallel_plan"):
        _check_heads(model, model._expand_parallel_plan(model.tp_plan), size)
    return {}


def follow(optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Have an optimizer that was made of a model's parameters hold those that it has now."""
    for group in optimizer.param_groups if replaced else ():
        group["params"] = [replaced.get(param, param) for param in group["params"]]


def share_out(model: nn.Module, mesh: dtensors.DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
    """Make the parameters of a whole model DTensors over the ranks of `mesh`, in place, and have its layers use them.

    The mesh has one dimension. Nothing is sent: each rank keeps its part of what it has, or reads its part of what was
    loaded under `zero_init`. Returns the parameters that have taken the place of others.

    Raises ZeroConfigError for a model that has no plan, that is quantised, or whose heads the ranks cannot share out,
    where the plan has two rules for one parameter, and where the installed transformers makes no DTensors.
    """
    apply = _apply_of_transformers()
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ZeroConfigError(
            f"{type(model).__name__} has adapters, and the tp_plan says nothing of them: set tp_size to 1"
        )
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ZeroConfigError(
            f"{type(model).__name__} has no tp_plan, so tp_size cannot be {mesh.size()}: set it to 1, or give the "
            "model's configuration a base_model_tp_plan"
        )
    plan = model._expand_parallel_plan(plan)
    _check_heads(model, plan, mesh.size())
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                places[param].append((f"{path}.{name}", module, name))
    packed = next((found[0][0] for param, found in places.items() if guard.is_packed(param)), None)
    if packed is not None:
        raise ZeroConfigError(f"'{packed}' is quantised, and tp_size shares out weights that are not: set it to 1")
    for param, found in places.items():  # the plan has a rule for each place, and torch names a parameter once
        for _, module, name in found:
            bare = torch.empty(param.shape, dtype=param.dtype, device="meta")
            module._parameters[name] = nn.Parameter(bare, param.requires_grad)
    apply(model, mesh, plan)
    replaced = {}
    for param, found in places.items():
        (first, module, own), *others = found
        laid_out = module._parameters[own]
        assert laid_out is not None
        for other, its_module, its in others:
            if not dtensors.same_parts(laid_out, its_module._parameters[its]):
                raise ZeroConfigError(
                    f"'{first}' and '{other}' are one parameter, which the tp_plan shares out in two ways: untie them "
                    "(tie_word_embeddings=False), or give both the same rule"
                )
        made = _part(first, param, laid_out) if dtensors.is_dtensor(laid_out) else param
        if made is not param:
            replaced[param] = made
        for _, its_module, its in found:
            its_module._parameters[its] = made
    return replaced


# Layers that make heads (others have those of one of these, or are gathered): what says how wide a head is, and how
# many times that the layer makes for each.
_HEADS = {"q_proj": ("head_dim", 1), "k_proj": ("head_dim", 1), "query_key_value": ("head_size", 3)}


def _check_heads(model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Refuse numbers of heads that do not divide: transformers cuts anywhere, and a rank attends with whole heads."""
    heads = {}
    for path, style in plan.items():
        above, _, name = path.rpartition(".")
        if style == "colwise" and name in _HEADS:
            width, of_each = _HEADS[name]
            each = of_each * getattr(model.get_submodule(above), width, 1)
            heads[path] = model.get_submodule(path).out_features // each
    wrong = next((path for path in heads if heads[path] % size), None)
    if wrong is not None:
        fitting = [str(number) for number in range(1, size) if math.gcd(*heads.values()) % number == 0]
        raise ZeroConfigError(
            f"tp_size is {size}, but '{wrong}' of {type(model).__name__} makes {heads[wrong]} head(s), and each rank "
            f"needs as many whole ones: set tp_size to {' or '.join(fitting)}, or let ranks share sequences instead "
            "(sp_size), for which heads of keys need not divide"
        )


def _apply_of_transformers() -> Callable[..., object]:
    """The function of transformers that makes placeholders of DTensors by an expanded plan, and wraps layers."""
    import transformers

    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism as apply
    except ImportError:
        apply = None
    # Until 5.21 a plan was not expanded to layers, and styles were others.
    if apply is None or not hasattr(transformers.PreTrainedModel, "_expand_parallel_plan"):
        raise ZeroConfigError(
            f"tensor parallelism needs a transformers that shares models out as DTensors by a plan (5.23 does), and "
            f"this is {transformers.__version__}: update it, or remove tp_size"
        )
    return apply


def _part(name: str, param: nn.Parameter, laid_out: nn.Parameter) -> nn.Parameter:
    """A DTensor laid out as `laid_out`, with this rank's part of the values of `param`."""
    part, source = dtensors.part_of(name, laid_out, 0), deferred.source_of(param)
    with torch.no_grad():
        values = torch.empty(part.local_shape, dtype=param.dtype, device=param.device)
        flat, whole = values.view(-1), None if source is not None else param.detach().reshape(-1)
        for offset, at, numel in part.runs(0, values.numel()):
            target = flat[offset : offset + numel]
            if whole is None:
                assert source is not None
                source.read(at, target)
            else:
                target.copy_(whole[at : at + numel])
    return dtensors.parameter(laid_out, values, param.requires_grad)
