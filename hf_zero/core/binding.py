"""An adopted optimizer: which parameters it stands for, and whether it steps them in slices or in whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.core.elementwise import needs_whole_matrices
from hf_zero.core.flat_buffer import FlatBuffer
from hf_zero.core.master import MasterShard
from hf_zero.core.twins import twin_of


# Whole tensors by parameter and kind (MASTER, "exp_avg", ...), for parameters whose masters are not in a shard yet.
WholeStates = dict[nn.Parameter, dict[str, Any]]


@dataclass(eq=False)
class Binding:
    """An adopted optimizer: by group, the model's parameters it stands for, and the masters it has in their place."""

    optimizer: torch.optim.Optimizer
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    shards: list[list[MasterShard]] = field(default_factory=list)
    owned: list[bool] = field(default_factory=list)  # by group: stepped in whole matrices

    def take_new_groups(
        self, home: dict[nn.Parameter, FlatBuffer], bound: set[nn.Parameter], *, in_parts: bool
    ) -> WholeStates:
        """Note the parameters of groups that still hold the model's own, and return the state they had.

        Tries whether these groups are stepped in slices or in whole matrices (with `in_parts`, one by one). Raises
        ValueError where neither is possible, and for a tensor that is not the model's, or that another optimizer or
        group holds.
        """
        optimizer = self.optimizer
        new = optimizer.param_groups[len(self.groups) :]
        owned = self._try(new, in_parts)
        if any(owned) and any(buffer.mesh.weights is not None for buffer in home.values()):
            raise ValueError(
                f"{type(optimizer).__name__} steps whole matrices, which is not available with quantised weights yet: "
                "set zero_quantized_weights to false"
            )
        if any(owned) and any(buffer.mesh.tensor is not None for buffer in home.values()):
            raise ValueError(
                f"{type(optimizer).__name__} steps whole matrices, of which tensor-parallel ranks have parts: use an "
                "optimizer that treats each element by itself (AdamW, SGD, Lion), or train without tensor parallelism"
            )
        for i, group in enumerate(new, start=len(self.groups)):
            for j, param in enumerate(group["params"]):
                if param not in home:
                    raise ValueError(
                        f"{type(optimizer).__name__} group {i} holds a tensor (number {j}, shape "
                        f"{tuple(param.shape)}) that is not a parameter of the prepared model. Create the optimizer "
                        "from model.parameters() of the model that you prepare, after any change to its modules "
                        "(LoRA, resized embeddings)"
                    )
                if param in bound:
                    raise ValueError(f"parameter '{home[param].name_of(param)}' is in two optimizers or groups")
            self.groups.append(list(group["params"]))
        self.owned += owned
        taken = [param for params in self.groups for param in params if param in optimizer.state]
        return {param: dict(optimizer.state.pop(param)) for param in taken}

    def carry_overrides(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Have options that bitsandbytes keeps for single parameters (embeddings in 32 bit) hold for their masters."""
        own = _own_manager(self.optimizer)
        if own is None:
            return
        shared = type(own).get_instance()
        chosen = {param: shared.pid2config[id(param)] for param in masters if id(param) in shared.pid2config}
        for module, name, options in shared.module_weight_config_triple:
            chosen[getattr(module, name)] = options
        own.pid2config = {id(masters[param]): chosen[param] for param in chosen.keys() & masters.keys()}
        cast(Any, self.optimizer).mng = own

    def _try(self, groups: list[dict], in_parts: bool) -> list[bool]:
        """By group, whether it must be stepped in whole matrices; groups that differ in numbers only are alike."""
        optimizer = self.optimizer
        own = _own_manager(optimizer)
        if own is not None:
            optimizer = twin_of(optimizer, {**vars(optimizer), "mng": own})
        known: dict[str, bool] = {}
        found = []
        for group in groups:
            options = {key: value for key, value in group.items() if key != "params"}
            kind = repr([(key, value) for key, value in options.items() if not isinstance(value, float)])
            if kind not in known:
                known[kind] = needs_whole_matrices(optimizer, options, in_parts=in_parts)
            found.append(known[kind])
        return found


def _own_manager(optimizer: torch.optim.Optimizer) -> Any:
    """An empty keeper of options of single parameters, as the one that an optimizer of bitsandbytes has; else None.

    Theirs is one for all optimizers of a process, and goes by `id` and position, which later tensors have again: an
    embedding of 32 bit, gone or of another optimizer, would make a matrix one, too.
    """
    shared = getattr(optimizer, "mng", None)
    if shared is None:
        return None
    own: Any = object.__new__(type(shared))
    own.initialize()
    return own
