"""What is known of DTensors, the parameters of tensor-parallel models: every fact in one file.

[Note: tensor parallelism] transformers shares parameters out over tensor-parallel ranks as DTensors, each of which
wraps the local tensor of its rank, and wraps the forward functions of layers. Its DTensor stays the module's
parameter. The engine lays out, gathers and releases local tensors over the data-parallel ranks that hold the same
part; where they have been moved, the DTensor is pointed to the new place.

A parameter that all tensor-parallel ranks hold whole is a DTensor or an ordinary one; each rank computes the same
gradient of it. Where each computes only its part of the sum (norms of single heads), transformers adds the parts up in
a hook on the parameter, which it registers in the first forward; the engine does so instead, as it takes gradients
away before such a hook would run.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_zero.comm.local_part import LocalPart, shared_out


# torch's own, which has no setter that leaves the version of the parameter alone.
_DATA: Any = Tensor.data

# The function of transformers that registers the hooks which add parts of gradients up, and what it closes over.
SUMMING = "ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"
HOOKED = "is_already_hooked"

# Methods of a DTensor that use its values, and are no functions of torch.
READERS = ("to_local", "full_tensor", "redistribute")

_EXPERTS = "expert parallelism is not supported; NeMo AutoModel, Megatron-LM and DeepSpeed's AutoEP train by it"
_OTHER_MESHES = {
    "ep": _EXPERTS,
    "efsdp": _EXPERTS,
    "pp": "pipeline parallelism is not supported; Megatron-LM, torchtitan and NeMo AutoModel train by it",
    "fsdp": "FSDP2 has sharded it, and hf_zero takes its place: load it without fsdp_size, and set tp_size",
    "dp_shard": "FSDP2 has sharded it, and hf_zero takes its place: pass the model as it was before",
}


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, which is all of it unless it is a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def point_to(param: DTensor, view: Tensor) -> None:
    """Make `view` the local tensor of a parameter; it may have another dtype."""
    # `.data` has a version counter of its own: gathers into the storage do not change what autograd has saved.
    values = view.data
    with torch._C.DisableTorchFunctionSubclass():
        if values.dtype != param.dtype:
            made = _wrap(param, values)
            _DATA.__set__(param, made)
            param._spec = made._spec
        param._local_tensor = values


def _wrap(param: DTensor, values: Tensor) -> DTensor:
    with torch.no_grad():
        return DTensor.from_local(
            values,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=torch.Size(param.shape),
            stride=tuple(torch.empty(param.shape, device="meta").stride()),
        )


def like(param: nn.Parameter, values: Tensor | None) -> Tensor | None:
    """What belongs to a parameter as it is seen from outside: a DTensor over `values` if the parameter is one."""
    return _wrap(param, values) if values is not None and isinstance(param, DTensor) else values


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """The gradient of this rank's part. A collective where autograd has left a sum of parts of it."""
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(param, DTensor), "a DTensor is the gradient of one"
    with torch.no_grad():
        if grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
    return grad._local_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; a collective of tensor-parallel ranks where it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ranks_of(model: nn.Module) -> tuple[int, ...] | None:
    """The numbers, in the default group, of the ranks that share out a model's parameters; None without DTensors.

    Raises ValueError where they are shared out in a way that the engine does not know.
    """
    loaded = getattr(getattr(model, "config", None), "distributed_config", None)
    for size, kind in (("pp_size", "pp"), ("ep_size", "ep")):
        if getattr(loaded, size, 1) > 1:
            raise ValueError(f"the model was loaded with {size} {getattr(loaded, size)}: {_OTHER_MESHES[kind]}")
    found: tuple[int, ...] | None = None
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        mesh: DeviceMesh = param.device_mesh
        for dim in mesh.mesh_dim_names or ():
            if dim in _OTHER_MESHES:
                raise ValueError(f"parameter '{name}' is shared out over the mesh '{dim}': {_OTHER_MESHES[dim]}")
        ranks = tuple(mesh.mesh.reshape(-1).tolist())
        if mesh.ndim != 1 or (found is not None and ranks != found):
            raise ValueError(
                f"parameter '{name}' is shared out over ranks {mesh.mesh.tolist()}, others over {found}: hf_zero "
                "needs one mesh of one dimension, that of tensor parallelism"
            )
        found = ranks
        part_of(name, param, 0)
    return found


def take_over(model: nn.Module) -> None:
    """Have transformers take a model whose parameters it has shared out for one that others save."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "distributed_config", None) is not None:
        del config.distributed_config
    if hasattr(model, "_is_distributed_loading_by_transformers"):
        model._is_distributed_loading_by_transformers = False  # type: ignore[assignment]  # no submodule


def part_of(name: str, param: nn.Parameter, rank: int) -> LocalPart:
    """The elements of a parameter that tensor-parallel rank `rank` holds.

    Raises ValueError where they cannot be known.
    """
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return LocalPart(shape, first=rank == 0)
    (placement,) = param.placements
    mesh: DeviceMesh = param.device_mesh
    if placement.is_replicate():
        return LocalPart(shape, first=rank == 0)
    # A strided shard cuts each of so many blocks (packed projections); torch has no public name for it.
    blocks = getattr(placement, "split_factor", 1)
    dim: int | None = getattr(placement, "dim", None)
    part = None if dim is None else shared_out(shape, dim, mesh.size(), mesh.get_local_rank(), blocks)
    if part is None or part.local_shape != tuple(param._local_tensor.shape):
        raise ValueError(
            f"parameter '{name}' of shape {shape} is shared out as {placement}, this rank's part being of shape "
            f"{tuple(param._local_tensor.shape)}: hf_zero does not know which elements these are"
        )
    return part


def _summed(model: nn.Module) -> Iterator[tuple[dict[str, nn.Parameter], str, nn.Parameter]]:
    """(parameters with a hook that adds parts of gradients up, name, parameter) of all that get one in forward."""
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        if getattr(forward, "__qualname__", "") == SUMMING:
            hooked = inspect.getclosurevars(forward).nonlocals[HOOKED]
            for name, param in module.named_parameters(recurse=False):
                yield hooked, name, param


def take_over_sums(model: nn.Module) -> frozenset[nn.Parameter]:
    """The parameters whose gradients have to be added up over tensor-parallel ranks, and nobody else does from now on.

    Those that have a hook already, as the model was called before, are left to it: it runs first.
    """
    taken = set()
    for hooked, name, param in _summed(model):
        if hooked.get(name) is not param:
            hooked[name] = param
            taken.add(param)
    return frozenset(taken)


def give_back_sums(model: nn.Module, taken: Container[nn.Parameter]) -> None:
    """Have the next forward register the hooks of the parameters that were taken over."""
    for hooked, name, param in _summed(model):
        if param in taken:
            del hooked[name]


def same_parts(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether ranks hold the same parts of two tensors of one shape."""
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements
    return not isinstance(one, DTensor) and not isinstance(other, DTensor)


def parameter(laid_out: nn.Parameter, values: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter laid out as a DTensor is, over `values` of this rank."""
    assert isinstance(laid_out, DTensor)
    return nn.Parameter(_wrap(laid_out, values), requires_grad)


def cut(param: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's part of a tensor of a parameter's shape, which all ranks have whole."""
    if not isinstance(param, DTensor) or whole.shape != param.shape:
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)._local_tensor


def joined(param: nn.Parameter, part: Tensor) -> Tensor:
    """All of a tensor of a parameter's shape, of which this rank has a part; a collective of tensor-parallel ranks."""
    if not isinstance(param, DTensor) or part.shape != param._local_tensor.shape:
        return part
    return _wrap(param, part.contiguous()).full_tensor()
