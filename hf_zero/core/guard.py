"""The guard: parameter classes that keep a released parameter from being read empty or written in vain.

[Note: parameter classes] A prepared parameter is always the user's own object; only its class changes.
`ReadyParameter` is its class while its values are there: it behaves as `nn.Parameter` at the same speed and only
notices writes through `.data`, which torch's version counter does not see. `GuardedParameter` is its class while the
values are released or still on their way: metadata is answered at once, anything else first asks the owner for them.
Without it, reading a released view gives a loss of 0.0 or kills the process (measured on CPU with torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, SupportsIndex, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.errors import ZeroAccessError


class Owner(Protocol):
    """What the guard needs from the unit that owns a parameter."""

    def on_access(self, param: nn.Parameter, operation: str) -> None:
        """Make the values of `param` available, or raise with the fix."""

    def on_data(self) -> None:
        """A writable alias of the values was handed out."""

    def on_requires_grad(self, param: nn.Parameter) -> None:
        """`requires_grad` of `param` was set."""

    def on_replace(self, param: nn.Parameter, value: Tensor) -> None:
        """The values of `param` are to become `value`, of another shape."""

    def read_grad(self, param: nn.Parameter) -> Tensor | None:
        """The whole gradient of `param`."""

    def write_grad(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Make `value` the gradient of `param` (None: as if it had got none)."""


def _getters(names: str) -> set:
    return {getattr(Tensor, name).__get__ for name in names.split() if hasattr(Tensor, name)}


def _functions(module: object, names: str) -> set:
    return {getattr(module, name) for name in names.split() if hasattr(module, name)}


# Type checkers take what torch says of an attribute for its value; here it is wanted as a descriptor.
DESCRIPTORS: Any = Tensor

# What can be answered without the values.
METADATA = (
    _getters(
        "shape dtype device layout requires_grad grad_fn is_leaf ndim names itemsize nbytes is_cuda is_cpu "
        "is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_mps is_xpu is_xla is_nested retains_grad output_nr "
        "_version _base _backward_hooks _post_accumulate_grad_hooks"
    )
    | _functions(
        Tensor,
        "size stride dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous get_device "
        "storage_offset requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad is_same_size "
        "__hash__ __len__ new_empty new_zeros new_ones new_full is_conj is_neg is_inference",
    )
    | _functions(
        torch,
        "numel is_floating_point is_complex empty_like zeros_like ones_like full_like rand_like randn_like is_conj "
        "is_neg is_inference",
    )
    | {
        DESCRIPTORS._backward_hooks.__set__,
    }
)


class ReadyParameter(nn.Parameter):
    """A prepared parameter whose values are there (see [Note: parameter classes])."""

    _zero_owner: weakref.ref[Owner]

    # The descriptor of Tensor is kept; ours only adds the notice.
    @property
    def data(self) -> Tensor:
        owner_of(self).on_data()
        return DESCRIPTORS.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.device != self.device:
            raise ValueError(
                f"cannot make a prepared parameter of {self.dtype} on {self.device} one of {value.dtype} on "
                f"{value.device}: hf_zero owns its storage. Convert or move the model before it is prepared"
            )
        if value.shape != self.shape:
            owner_of(self).on_replace(self, value.detach())
            return
        with torch.no_grad():
            self.copy_(value)

    @property
    def requires_grad(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return DESCRIPTORS.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            DESCRIPTORS.requires_grad.__set__(self, value)
        owner_of(self).on_requires_grad(self)

    @property
    def grad(self) -> Tensor | None:
        """The whole gradient: this rank's sum inside `no_sync`, else the mean over ranks; None where there is none.

        The values are gathered when they are first used, which is a collective. What is changed in place counts.
        """
        raw = raw_grad(self)  # between autograd's delivery and the engine's hook
        return raw if raw is not None else owner_of(self).read_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        owner_of(self).write_grad(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> ReadyParameter:
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        # A copy belongs to no unit: it is a plain parameter with values of its own.
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl


class GuardedParameter(ReadyParameter):
    """A prepared parameter whose values are released or on their way (see [Note: parameter classes])."""

    def __repr__(self) -> str:  # type: ignore[override]  # the argument that torch adds is for containers
        # Printing on one rank must not start a collective that the others do not join.
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, GuardedParameter):
                owner_of(leaf).on_access(leaf, getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)


def raise_if_released(error: BaseException) -> None:
    """Raises ZeroAccessError where `error` is what torch says of a released weight that autograd has saved."""
    if isinstance(error, RuntimeError) and "setStorage" in str(error) and "storage of size 0" in str(error):
        raise ZeroAccessError(
            "backward needs weights that are released: a gradient has entered a module by a tensor that its forward "
            "did not return (kept in an attribute or a list, say). Return every tensor that the loss depends on"
        ) from error


def raw_grad(param: nn.Parameter) -> Tensor | None:
    """What autograd has left on the parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return DESCRIPTORS.grad.__get__(param)


def take_grad(param: nn.Parameter) -> Tensor:
    """Take what autograd has left on the parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = DESCRIPTORS.grad.__get__(param)
        DESCRIPTORS.grad.__set__(param, None)
    assert grad is not None
    return grad


def gets_gradient(param: nn.Parameter) -> bool:
    """Inside backward: whether the graph that autograd goes through leads to the parameter."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        if not DESCRIPTORS.requires_grad.__get__(param):
            return False
        node = Tensor.view_as(param, param).grad_fn
        assert node is not None
        accumulate = node.next_functions[0][0]
        assert accumulate is not None
    return torch._C._will_engine_execute_node(accumulate)


def attach(params: Iterable[nn.Parameter], owner: Owner) -> None:
    """Make `owner` answer for `params`; only a weak reference hangs on each tensor."""
    for param in params:
        if type(param) not in (nn.Parameter, ReadyParameter, GuardedParameter):
            raise TypeError(
                f"parameters of type {type(param).__name__} cannot be sharded: hf_zero needs torch.nn.Parameter. "
                "Load the model without quantisation or keep it out of prepare()"
            )
        cast(ReadyParameter, param)._zero_owner = weakref.ref(owner)
        param.__class__ = ReadyParameter


def detach(params: Iterable[nn.Parameter]) -> None:
    """Make `params` plain parameters again."""
    for param in params:
        del cast(ReadyParameter, param)._zero_owner
        param.__class__ = nn.Parameter


def owner_of(param: nn.Parameter) -> Owner:
    """The unit that owns a prepared parameter."""
    owner = cast(ReadyParameter, param)._zero_owner()
    assert owner is not None, "the engine of this parameter is gone"
    return owner


def is_prepared(param: Tensor) -> TypeGuard[nn.Parameter]:
    return isinstance(param, ReadyParameter)


def lock(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.__class__ = GuardedParameter


def unlock(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.__class__ = ReadyParameter


def point_to(param: nn.Parameter, view: Tensor) -> None:
    """Make `param` a view of the flat storage, without the notice of a write."""
    with torch._C.DisableTorchFunctionSubclass():
        DESCRIPTORS.data.__set__(param, view)
