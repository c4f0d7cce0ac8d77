"""Refuses stock classes in ranks of a run for ZeRO that must not make ours of them: nothing would be sharded."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from hf_zero.errors import ZeroLaunchError
from hf_zero.launcher.environment import resolve_from_environment
from hf_zero.launcher.failures import is_users_file


# By library: what hf_zero has under another name. Any other trainer becomes ours by a mixin.
READY_MADE = {
    "accelerate": ("hf_zero", {"Accelerator": "ZeroAccelerator"}),
    "transformers": ("hf_zero", {"Trainer": "ZeroTrainer", "TrainingArguments": "ZeroTrainingArguments"}),
    "trl": (
        "hf_zero.trl",
        {
            "SFTTrainer": "ZeroSFTTrainer",
            "SFTConfig": "ZeroSFTConfig",
            "GRPOTrainer": "ZeroGRPOTrainer",
            "GRPOConfig": "ZeroGRPOConfig",
        },
    ),
}
TRAINER_MIXIN, TRL_MIXIN, ACCELERATOR_MIXIN = "ZeroTrainerMixin", "ZeroTRLMixin", "ZeroAccelerator"


@dataclass(frozen=True)
class _Stock:
    """A class of an installed package, and what hf_zero has for it."""

    cls: type
    usual_mixin: str

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def library(self) -> str:
        return self.cls.__module__.partition(".")[0]

    @property
    def home(self) -> str:
        return "hf_zero.trl" if self.library == "trl" else "hf_zero"

    @property
    def mixin(self) -> str:
        return TRL_MIXIN if self.library == "trl" else self.usual_mixin

    @property
    def ready_made(self) -> dict[str, str]:
        """The names of hf_zero for names of this library, if it has one for this class."""
        names = READY_MADE.get(self.library, ("", {}))[1]
        return names if self.name in names else {}


def refuse_trainers(module: ModuleType) -> None:
    """Have `module.Trainer` and its subclasses raise ZeroLaunchError when one is created that is not hf_zero's."""

    def create(cls, *args, **kwargs):
        _refuse(cls, TRAINER_MIXIN)
        return object.__new__(cls)

    module.Trainer.__new__ = create


def refuse_accelerators(module: ModuleType) -> None:
    """Have `module.Accelerator` raise ZeroLaunchError when it is given a model; it may be used for anything else."""
    prepare_model = module.Accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(self, *args, **kwargs):
        _refuse(type(self), ACCELERATOR_MIXIN)
        return prepare_model(self, *args, **kwargs)

    module.Accelerator.prepare_model = prepare


def _refuse(cls: type, mixin: str) -> None:
    if any(base.__module__.partition(".")[0] == "hf_zero" for base in cls.__mro__):
        return
    stage = resolve_from_environment().config.zero_stage
    if stage == 0 or "WORLD_SIZE" not in os.environ:
        return  # plain data parallelism is what was asked for, or there is none
    own = list(itertools.takewhile(_is_users, cls.__mro__))
    stock = _Stock(cls.__mro__[len(own)], mixin)
    raise ZeroLaunchError(
        f"this run was started for ZeRO stage {stage}, but {stock.library}.{stock.name} would train under DDP, "
        "with nothing sharded, as HF_ZERO_ADOPT=0 has it stay what it is. Leave that out, or change the script: "
        f"{_what_to_change(stock, own)}\nIf DDP is what you want, start it with --zero_stage 0"
    )


def _is_users(cls: type) -> bool:
    return cls.__module__ == "__main__" or is_users_file(_file_of(cls.__module__))


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or "<unknown>"


def _what_to_change(stock: _Stock, own: Iterable[type]) -> str:
    """Where the user's code gets the class, and the line to write there."""
    for file in dict.fromkeys(_files_to_search(own)):
        found = _find_import(file, stock.name)
        if found is not None:
            lines = _replacement(stock, {alias.name: alias.asname or alias.name for alias in found.names})
            indent = "\n" + " " * (4 + found.col_offset)
            return f"below {file}:{found.end_lineno}, which imports it, write" + indent + indent.join(lines)
    frame = _users_frame()
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else f"the script {sys.argv[0]}"
    if stock.ready_made:
        return f"in {where}, use {stock.home}.{stock.ready_made[stock.name]} in its place"
    return f"in {where}, use a class X({stock.home}.{stock.mixin}, {stock.name}) in its place"


def _replacement(stock: _Stock, imported: dict[str, str]) -> list[str]:
    """The lines that make ours of the names that one statement imports (by the name that the script gives them)."""
    if stock.ready_made:
        ours = [f"{stock.ready_made[name]} as {given}" for name, given in imported.items() if name in stock.ready_made]
        return [f"from {stock.home} import {', '.join(ours)}"]
    given = imported[stock.name]
    return [f"from {stock.home} import {stock.mixin}", f"class {given}({stock.mixin}, {given}): pass"]


def _files_to_search(own: Iterable[type]) -> Iterator[str]:
    """Files that may import the class: of the user's subclasses of it, on the stack, and the script itself."""
    for cls in own:
        yield _file_of(cls.__module__)
    frame = _users_frame()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            yield frame.f_code.co_filename
        frame = frame.f_back
    yield _file_of("__main__")


def _users_frame():
    """The innermost frame of the user's own code."""
    frame = sys._getframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _find_import(file: str, name: str) -> ast.ImportFrom | None:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # not a file of Python
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return node
    return None
