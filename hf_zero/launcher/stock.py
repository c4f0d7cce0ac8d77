"""Refuses stock classes in ranks that were started for ZeRO: they would train under DDP and shard nothing."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroLaunchError
from hf_zero.failures import is_users_file
from hf_zero.launcher.environment import CONFIG_VARIABLE


# What hf_zero has under another name. Any other trainer becomes ours by a mixin.
READY_MADE = {
    "Accelerator": ("hf_zero", "ZeroAccelerator"),
    "Trainer": ("hf_zero", "ZeroTrainer"),
    "TrainingArguments": ("hf_zero", "ZeroTrainingArguments"),
    "SFTTrainer": ("hf_zero.trl", "ZeroSFTTrainer"),
    "SFTConfig": ("hf_zero.trl", "ZeroSFTConfig"),
    "GRPOTrainer": ("hf_zero.trl", "ZeroGRPOTrainer"),
    "GRPOConfig": ("hf_zero.trl", "ZeroGRPOConfig"),
}
MIXINS = {"transformers": ("hf_zero", "ZeroTrainerMixin"), "trl": ("hf_zero.trl", "ZeroTRLMixin")}
_LIBRARIES = ("accelerate", "transformers", "trl")


def refuse_trainers(module: ModuleType) -> None:
    """Have `module.Trainer` and its subclasses raise ZeroLaunchError when one is created that is not hf_zero's."""

    def create(cls, *args, **kwargs):
        _refuse(cls)
        return object.__new__(cls)

    module.Trainer.__new__ = create


def refuse_accelerators(module: ModuleType) -> None:
    """Have `module.Accelerator` raise ZeroLaunchError when it is given a model; it may be used for anything else."""
    prepare_model = module.Accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(self, *args, **kwargs):
        _refuse(type(self))
        return prepare_model(self, *args, **kwargs)

    module.Accelerator.prepare_model = prepare


def _refuse(cls: type) -> None:
    if any(base.__module__.partition(".")[0] == "hf_zero" for base in cls.__mro__):
        return
    stage = ZeroConfig.from_json(os.environ[CONFIG_VARIABLE]).zero_stage
    if stage == 0:
        return  # plain data parallelism is what was asked for
    stock = next(base for base in cls.__mro__ if _library(base) in _LIBRARIES)
    raise ZeroLaunchError(
        f"this run was started for ZeRO stage {stage}, but {_library(stock)}.{stock.__name__} would train under DDP, "
        f"with nothing sharded. {_what_to_change(cls, stock)}\nIf DDP is what you want, start it with --zero_stage 0"
    )


def _library(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _what_to_change(cls: type, stock: type) -> str:
    """Where the user's code gets the class, and the line to write there."""
    files = list(dict.fromkeys(_users_files(cls, stock)))
    for file in files:
        found = _find_import(file, stock.__name__)
        if found is not None:
            lines = _replacement(stock, {alias.name: alias.asname or alias.name for alias in found.names})
            indent = "\n" + " " * (4 + found.col_offset)
            return f"Below {file}:{found.end_lineno}, which imports it, write" + indent + indent.join(lines)
    frame = _users_frame()
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else f"the script {sys.argv[0]}"
    home, ours = READY_MADE.get(stock.__name__) or MIXINS[_library(stock)]
    instead = f"{home}.{ours}"
    if stock.__name__ not in READY_MADE:
        instead = f"a class X({home}.{ours}, {stock.__name__})"
    return f"In {where}, use {instead} in its place"


def _replacement(stock: type, imported: dict[str, str]) -> list[str]:
    """The lines that make ours of the names that one statement imports (by the name that the script gives them)."""
    if stock.__name__ in READY_MADE:
        home = READY_MADE[stock.__name__][0]
        ours = {name: READY_MADE[name][1] for name in imported if READY_MADE.get(name, ("",))[0] == home}
        return [f"from {home} import " + ", ".join(f"{ours[name]} as {imported[name]}" for name in ours)]
    home, mixin = MIXINS[_library(stock)]
    name = imported[stock.__name__]
    return [f"from {home} import {mixin}", f"class {name}({mixin}, {name}): pass"]


def _users_files(cls: type, stock: type) -> Iterator[str]:
    """Files that may import `stock`: of the user's subclasses of it, on the stack, and the script itself."""
    for base in cls.__mro__[: cls.__mro__.index(stock)]:
        yield getattr(sys.modules.get(base.__module__), "__file__", None) or ""
    frame = _users_frame()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            yield frame.f_code.co_filename
        frame = frame.f_back
    yield getattr(sys.modules["__main__"], "__file__", None) or ""


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
