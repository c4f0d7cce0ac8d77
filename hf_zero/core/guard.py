"""The guard: parameter classes that keep a released parameter from being read empty or written in vain.

[Note: parameter classes] A prepared parameter is always the user's own object; only its class changes.
`ReadyParameter` is its class while its values are there: it behaves as `nn.Parameter` at the same speed and only
notices writes through `.data`, which torch's version counter does not see. `GuardedParameter` is its class while the
values are released or still on their way: metadata is answered at once, anything else first asks the owner for them.
Without it, reading a released view gives a loss of 0.0 or kills the process (measured on CPU with torch 2.13).

[Note: packed parameters] Libraries that quantise weights subclass `nn.Parameter` (bitsandbytes: `Params4bit` and
`Int8Params`) and keep the scales in attributes. A frozen one is prepared too: its class becomes a subclass of both
ours and its own. Its elements are packed codes, which are sharded, gathered and copied, and never cast. Where the
library keeps the codes under another name as well, a *follower* stands there: a parameter with the same values, which
is released, guarded and gathered with it.

[Note: tensors of tensors] torchao's parameters have no memory of their own, but other tensors for codes and scales.
The bytes of each are sharded, as a parameter of `uint8` whose followers are a parameter in the place of the inner
tensor and the outer one. That keeps its own class while the values are there: its library makes tensors of that class.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.comm import dtensors
from hf_zero.core.wrappers import inner_tensors, is_made_of_plain_tensors, is_wrapper
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
    _zero_base: type[nn.Parameter] = nn.Parameter  # what it was before, and is again
    _zero_ready: type[ReadyParameter]
    _zero_guarded: type[GuardedParameter]

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
        if _shares_memory(self, value):  # layers of bitsandbytes assign it after every call
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
        return raw if raw is not None else dtensors.like(self, owner_of(self).read_grad(self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        owner_of(self).write_grad(self, None if value is None else dtensors.local_grad(self, value))

    def requires_grad_(self, requires_grad: bool = True) -> ReadyParameter:
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        # A copy belongs to no unit: it is a plain parameter with values of its own.
        if is_wrapper(self):
            owner_of(self).on_access(self, "deepcopy")  # which gives it its own class again
            return copy.deepcopy(self, memo)
        if id(self) not in memo:
            twin = memo[id(self)] = _whole(self)
            if is_packed(self):
                attributes = {key: value for key, value in vars(self).items() if key != "_zero_owner"}
                twin.__dict__.update(copy.deepcopy(attributes, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return copy.deepcopy(self).__reduce_ex__(protocol)

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


ReadyParameter._zero_ready, ReadyParameter._zero_guarded = ReadyParameter, GuardedParameter


@functools.cache
def _ready_class(base: type[nn.Parameter]) -> type[ReadyParameter]:
    """The class of parameters that came as `base` while their values are there."""
    if base is nn.Parameter:
        return ReadyParameter
    # What reads values without a function that the guard is asked about.
    readers = {name: _asking(name) for name in dtensors.READERS} if issubclass(base, dtensors.DTensor) else {}
    made, locked = _class_of_both(ReadyParameter, base), _class_of_both(GuardedParameter, base, **readers)
    for each in (made, locked):
        each._zero_ready, each._zero_guarded = made, locked
    return made


@functools.cache
def _guarded_wrapper(base: type[Tensor]) -> type[GuardedParameter]:
    """The class of parameters made of tensors while the values of these are released."""
    locked = _class_of_both(GuardedParameter, base)
    locked._zero_ready, locked._zero_guarded = base, locked
    return locked


def _class_of_both(ours: type[ReadyParameter], base: type[Tensor], **names: Any) -> Any:
    names.update(_zero_base=base, __module__=base.__module__)
    return types.new_class(base.__name__, (ours, base), exec_body=lambda own: own.update(names))


def _asking(name: str) -> Callable[..., Any]:
    """A method of a guarded parameter that asks for the values first."""

    def method(self: GuardedParameter, *args: Any, **kwargs: Any) -> Any:
        owner_of(self).on_access(self, name)
        return getattr(self._zero_base, name)(self, *args, **kwargs)

    return method


def is_packed(param: nn.Parameter) -> bool:
    """Whether its elements are codes rather than values (see [Note: packed parameters])."""
    return not dtensors.is_dtensor(param) and getattr(type(param), "_zero_base", type(param)) is not nn.Parameter


def with_followers(param: nn.Parameter) -> list[nn.Parameter]:
    """The parameter, and what has the same values for good (see [Note: packed parameters])."""
    return [param, *vars(param).get("_zero_followers", ())]


def views_of(param: nn.Parameter) -> list[nn.Parameter]:
    """Of these, the views of the flat storage."""
    return [each for each in with_followers(param) if not is_wrapper(each)]


def make_followers(param: nn.Parameter) -> None:
    """Put followers in the place of tensors among its attributes that are views of the same values."""
    for key, value in list(vars(param).items()):
        if isinstance(value, Tensor) and _shares_memory(param, value):
            add_follower(param, nn.Parameter(value.detach(), requires_grad=False))
            setattr(param, key, with_followers(param)[-1])


def add_follower(param: nn.Parameter, follower: nn.Parameter) -> None:
    vars(param).setdefault("_zero_followers", []).append(follower)


def _whole(param: nn.Parameter) -> nn.Parameter:
    """A parameter of the class that `param` came as, with values of its own."""
    base = cast(ReadyParameter, param)._zero_base
    if dtensors.is_dtensor(param):
        return nn.Parameter(param.detach().clone(), param.requires_grad)
    return torch.Tensor._make_subclass(base, param.detach().clone(), param.requires_grad)


def _shares_memory(param: nn.Parameter, value: Tensor) -> bool:
    """Whether `value` is a view of what the parameter is a view of, at the same place."""
    with torch._C.DisableTorchFunctionSubclass():
        one, other = dtensors.local(param), dtensors.local(value)
        mine, its = (tensor.untyped_storage()._cdata for tensor in (one, other))
        return mine == its and (one.storage_offset(), one.shape) == (other.storage_offset(), other.shape)


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
    """Take what autograd has left on the parameter, of a DTensor that of this rank's part."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = DESCRIPTORS.grad.__get__(param)
        DESCRIPTORS.grad.__set__(param, None)
        assert grad is not None
        return grad if type(grad) is Tensor else dtensors.local_grad(param, grad)


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


def check_kinds(params: Iterable[nn.Parameter]) -> None:
    """Raise TypeError for a parameter of a class that can be neither trained nor sharded."""
    for param in params:
        base = getattr(type(param), "_zero_base", type(param))
        known = base is nn.Parameter or issubclass(base, dtensors.DTensor)
        packed = issubclass(base, nn.Parameter) or is_made_of_plain_tensors(param)
        if not known and (param.requires_grad or not packed):
            raise TypeError(
                f"parameters of type {base.__name__} cannot be {'trained' if param.requires_grad else 'sharded'}: "
                "hf_zero needs torch.nn.Parameter. Freeze quantised weights (requires_grad_(False)) and train "
                "adapters on them, or load the model without quantisation"
            )


def attach(params: Sequence[nn.Parameter], owner: Owner) -> None:
    """Make `owner` answer for `params`; only a weak reference hangs on each tensor. Raises as `check_kinds`."""
    check_kinds(params)
    for param in params:
        if is_wrapper(param):
            continue  # what it is made of has an owner
        cast(ReadyParameter, param)._zero_owner = weakref.ref(owner)
        param.__class__ = _ready_class(getattr(type(param), "_zero_base", type(param)))


def detach(params: Iterable[nn.Parameter]) -> None:
    """Make `params` plain parameters again."""
    for param in params:
        if is_wrapper(param):
            unlock([param])
            continue
        del cast(ReadyParameter, param)._zero_owner
        param.__class__ = cast(ReadyParameter, param)._zero_base


def owner_of(param: nn.Parameter) -> Owner:
    """The unit that owns a prepared parameter."""
    if not hasattr(param, "_zero_owner"):  # it is made of tensors that have it
        param = cast(nn.Parameter, next(inner_tensors(param))[2])
    owner = cast(ReadyParameter, param)._zero_owner()
    assert owner is not None, "the engine of this parameter is gone"
    return owner


def is_prepared(param: Tensor) -> TypeGuard[nn.Parameter]:
    if isinstance(param, ReadyParameter):
        return True
    return is_wrapper(param) and any(isinstance(tensor, ReadyParameter) for _, _, tensor in inner_tensors(param))


def lock(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        kind: Any = type(param)
        if kind is ReadyParameter:  # almost all are, and each is locked in every pass
            param.__class__ = GuardedParameter
        else:
            param.__class__ = kind._zero_guarded if issubclass(kind, ReadyParameter) else _guarded_wrapper(kind)


def unlock(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        kind: Any = type(param)
        param.__class__ = ReadyParameter if kind is GuardedParameter else getattr(kind, "_zero_ready", kind)


def point_to(param: nn.Parameter, view: Tensor) -> None:
    """Make `param`, and its followers, a view of the flat storage, without the notice of a write."""
    with torch._C.DisableTorchFunctionSubclass():
        for each in views_of(param):
            if isinstance(each, dtensors.DTensor):
                dtensors.point_to(each, view)
                continue
            same = view
            if each is not param and each.dtype != view.dtype:  # bytes as what they mean
                same = view.view(-1).view(each.dtype)
                same = same.as_strided(each.shape, each.stride(), same.storage_offset())
            DESCRIPTORS.data.__set__(each, same)
