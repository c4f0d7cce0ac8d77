"""Consolidates a prepared model into a plain state dict, one unit at a time."""

from __future__ import annotations

from torch import Tensor, nn

from hf_zero import access
from hf_zero.unit import Unit, gathered_parameters


def consolidated_state_dict(model: nn.Module, keep: bool) -> dict[str, Tensor] | None:
    """The model's state dict with whole tensors on the CPU, on the ranks that `keep` it; None on the others.

    A collective: every rank of the model's engine must call it. Values are in the dtype that the model computes in.
    Names that share a parameter share a tensor, so that saving recognises tied weights. At most one unit is whole on
    a device at a time.
    """
    logical = model.state_dict(keep_vars=True)  # the parameters themselves: nothing is read yet
    names: dict[Unit, dict[nn.Parameter, list[str]]] = {}
    result: dict[str, Tensor] = dict.fromkeys(logical)  # in the order of the state dict
    for name, tensor in logical.items():
        if access.is_prepared(tensor):
            names.setdefault(access.owner_of(tensor), {}).setdefault(tensor, []).append(name)
        else:
            result[name] = tensor.detach().cpu()
    for unit, params in names.items():
        with gathered_parameters(params):
            for param, aliases in params.items() if keep else ():
                value = param.detach().to("cpu", copy=True)
                for name in aliases:
                    result[name] = value
        del unit
    return result if keep else None
