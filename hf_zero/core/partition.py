"""Finds the units of a model: repeated blocks, embeddings, the output head, and the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn


# The names of the units that belong to the model itself.
PERSISTENT, ROOT = "(persistent)", "(root)"


@dataclass(eq=False)
class UnitPlan:
    """The parameters of one unit to be, by fully qualified name; a tied parameter once, under its first name."""

    name: str
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    persistent: bool = False  # its parameters stay whole on every rank, also at stage 3


@dataclass(eq=False)
class HookPlan:
    """A module whose forward needs the given units."""

    name: str
    module: nn.Module
    units: list[UnitPlan]

    @property
    def reads_weights_in_backward(self) -> bool:
        """The backward of an embedding lookup needs the indices only."""
        return type(self.module) is not nn.Embedding


# An embedding smaller than this share of the model (position tables, token types) is not worth a collective.
_SMALL_EMBEDDING = 0.01

# The same of a part of a layer that is gathered in parts, as a share of the size that makes it so.
_SMALL_PART = 0.02

# Nor is a module behind the blocks that is smaller than this share of the last block.
_LIGHT_TAIL = 0.1


def partition(
    model: nn.Module, persistent: Callable[[nn.Parameter], bool] | None = None, largest: float = math.inf
) -> tuple[list[UnitPlan], list[HookPlan]]:
    """Units in the order [persistent, rest, embeddings, blocks, tail], and the modules to hook, the model first.

    The tail is the output head; what is small there (the final norm) belongs to the last block's unit.

    `persistent` picks parameters that stay whole on every rank; they make one unit, which the model itself needs.
    Of a block with more than `largest` elements each module is a unit, down to single layers; what is small beside
    them belongs to the model's unit. Parameters that several modules share belong to the first unit that holds them;
    every hooked module names all units that its parameters live in.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = [part for block in blocks_of(model) if _has_params(block) for part in _parts(block, largest)]
    embeddings = _embeddings(model, blocks)
    tail = _tail(model, blocks, embeddings)

    owner: dict[nn.Parameter, UnitPlan] = {}
    whole = UnitPlan(PERSISTENT, persistent=True)
    for param_name, param in model.named_parameters():
        if persistent is not None and persistent(param):
            owner[param] = whole
            whole.params[param_name] = param
    embedding_units = [_claim(owner, names[module], [module], names) for module in embeddings]
    light = [module for module in tail if _numel(module) < _LIGHT_TAIL * _numel(blocks[-1])]
    heavy = [module for module in tail if module not in light]
    block_units = [_claim(owner, names[module], [module], names) for module in blocks[:-1]]
    block_units += [_claim(owner, names[module], [module, *light], names) for module in blocks[-1:]]
    tail_units = [_claim(owner, "+".join(names[module] for module in heavy), heavy, names)] if heavy else []
    rest = _claim(owner, ROOT, [model], names)

    units = [unit for unit in [whole, rest, *embedding_units, *block_units, *tail_units] if unit.params]
    hooks = [HookPlan("", model, [unit for unit in (whole, rest) if unit.params])]
    for module in [*embeddings, *blocks, *tail]:
        needed = dict.fromkeys(owner[param] for param in module.parameters())
        hooks.append(HookPlan(names[module], module, list(needed)))
    return units, hooks


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _claim(owner: dict, name: str, modules: list[nn.Module], names: dict[nn.Module, str]) -> UnitPlan:
    unit = UnitPlan(name)
    for module in modules:
        prefix = names[module] + "." if names[module] else ""
        for param_name, param in module.named_parameters():
            if param not in owner:
                owner[param] = unit
                unit.params[prefix + param_name] = param
    return unit


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks: what transformers must not split, else the entries of module lists."""
    unsplit: set[str] = set()
    for module in model.modules():
        unsplit.update(getattr(module, "_no_split_modules", None) or ())
    counts = Counter(type(module).__name__ for module in model.modules())
    repeated = {name for name in unsplit if counts[name] > 1}
    found = _outermost(model, lambda module: type(module).__name__ in repeated)
    if found:
        return found
    lists = _outermost(model, _is_block_list)
    if lists:
        return list(dict.fromkeys(block for module_list in lists for block in _called(module_list)))
    # No repetition to go by: the direct children, looking through containers of a single child or a Sequential.
    children = [model]
    while len(children) == 1 and next(children[0].children(), None) is not None:
        children = [child for child in _called(children[0]) if _has_params(child)]
    return children if len(children) > 1 else []


_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The children that are called, of which hooks tell; of a container that never is, its entries."""
    for child in module.children():
        if isinstance(child, _NEVER_CALLED):
            yield from _called(child)
        else:
            yield child


def _parts(module: nn.Module, largest: float) -> Iterator[nn.Module]:
    """The modules that a block is gathered by. Experts in lists stay together: ranks call different ones."""
    children = [child for child in module.children() if _has_params(child)]
    if _numel(module) <= largest or not children or any(isinstance(child, _NEVER_CALLED) for child in children):
        yield module
        return
    for child in children:
        if _numel(child) > _SMALL_PART * largest:
            yield from _parts(child, largest)


def _is_block_list(module: nn.Module) -> bool:
    """A list of layers, also of different types; not a list of stacks, whose entries hold longer lists each."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    inner = [[len(m) for m in entry.modules() if isinstance(m, nn.ModuleList)] for entry in module]
    return not all(max(lengths, default=0) > len(module) for lengths in inner)


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for child in module.children():
        for hit in [child] if wanted(child) else _outermost(child, wanted):
            found[hit] = None
    return list(found)


def _embeddings(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    inside = {module for block in blocks for module in block.modules()}
    total = sum(param.numel() for param in model.parameters())
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module not in inside
        and module.weight.numel() > _SMALL_EMBEDDING * total
    ]


def _tail(model: nn.Module, blocks: list[nn.Module], embeddings: list[nn.Module]) -> list[nn.Module]:
    """The modules defined after the last block, outside of everything that holds a block: final norm and head."""
    if not blocks:
        return []
    last = blocks[-1]
    taken = set(blocks) | set(embeddings)
    holds_block = {module for module in model.modules() if any(inner in taken for inner in module.modules())}
    tail: list[nn.Module] = []
    seen_last = False
    for module in model.modules():
        if module is last:
            seen_last = True
        elif isinstance(module, _NEVER_CALLED):
            continue
        elif seen_last and _has_params(module) and module not in holds_block | _descendants([*blocks, *tail]):
            tail.append(module)
    return tail


def _descendants(modules: list[nn.Module]) -> set[nn.Module]:
    return {inner for module in modules for inner in module.modules()}
