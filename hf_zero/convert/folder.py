"""Builds the resulting folder under a temporary name, from files that are carried over and files that are new."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from hf_zero.checkpoint.commit import MARKER
from hf_zero.convert.pickles import verify
from hf_zero.errors import ZeroCheckpointError


CONFIG_NAME = "config.json"
# Written anew, or of no use to whoever resumes; training_args.bin is a pickle of classes of the old setup.
_REPLACED = re.compile(
    r"(model|pytorch_model|adapter_model)([-.]\w+|-\d+-of-\d+)*\.(safetensors|bin)(\.index\.json)?|"
    r"training_args\.bin|scaler\.pt|pytorch_model_fsdp\.bin|"
    rf"optimizer\.(pt|bin)|{MARKER}|\..*"
)
# What --config adds to the files of the checkpoint: the configuration, the tokenizer and the like.
_DESCRIBES = re.compile(r"(?!trainer_state\.json).*\.(json|jinja|model|txt)")


def is_accelerates(folder: Path) -> bool:
    """Whether `Accelerator.save_state` has written a folder. Raises ZeroCheckpointError for several models in one."""
    for name in ("pytorch_model_1", "pytorch_model_fsdp_1", "optimizer_1", "model_1.safetensors"):
        if (folder / name).exists():
            raise ZeroCheckpointError(f"{folder / name}: a checkpoint with several models is not supported")
    return any(folder.glob("random_states_*.pkl"))


def check_target(target: Path) -> None:
    """Raise ZeroCheckpointError unless `target` can be made: its parent is there and it is not."""
    if target.exists() or target.is_symlink():
        raise ZeroCheckpointError(f"{target} exists: give a folder that does not exist yet")
    if not target.absolute().parent.is_dir():
        raise ZeroCheckpointError(f"{target.absolute().parent} does not exist: make it first")


def find_config(folder: Path, given: Path | None) -> Path:
    """The folder with the configuration of the model. Raises ZeroCheckpointError where there is none."""
    if given is not None:
        if not (given / CONFIG_NAME).is_file():
            raise ZeroCheckpointError(f"--config {given}: this is no folder that holds a {CONFIG_NAME}")
        return given
    if not (folder / CONFIG_NAME).is_file():
        raise ZeroCheckpointError(
            f"{folder} holds no {CONFIG_NAME}: give the folder of the model that was trained with --config FOLDER"
        )
    return folder


@contextlib.contextmanager
def new_folder(target: Path, carried: Sequence[Path], nbytes: int) -> Iterator[Path]:
    """A folder with copies of the `carried` files, which is called `target` when the block ends without an error.

    Raises ZeroCheckpointError, before anything is written, where one of them is damaged or a link to another place, or
    the disk has no room for them and `nbytes` more.
    """
    for path in carried:
        _check_link(path)
        verify(path)
    parent = target.absolute().parent
    needed, free = nbytes + sum(path.stat().st_size for path in carried), shutil.disk_usage(parent).free
    if needed > free:
        raise ZeroCheckpointError(f"{parent} has {free:,} bytes free, and {needed:,} are to be written")
    prefix = f".{target.name}.{socket.gethostname()}."
    _remove_stale(parent, prefix)
    built = parent / f"{prefix}{os.getpid()}"
    built.mkdir()
    try:
        for path in carried:
            shutil.copyfile(path, built / path.name)
        yield built
        check_target(target)
        os.rename(built, target)
    except BaseException:
        shutil.rmtree(built, ignore_errors=True)
        raise


def _check_link(path: Path) -> None:
    """Links may not bring files of other places into the result, but the `snapshots` of the hub's cache are links."""
    folder, target = path.parent.resolve(), path.resolve()
    cache = next((parent.parent for parent in folder.parents if parent.name == "snapshots"), None)
    if not target.is_relative_to(folder) and not (cache and target.is_relative_to(cache / "blobs")):
        raise ZeroCheckpointError(
            f"{path} is a symbolic link to {target}, outside of its folder: put a copy in its place, or remove it"
        )


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove what conversions of this machine have left behind that were killed; a name ends in a process number."""
    for path in parent.iterdir():
        number = path.name.removeprefix(prefix)
        if not (path.name.startswith(prefix) and number.isdigit()):
            continue
        # One with our own number is another process's, which had the number before us.
        if int(number) == os.getpid() or not psutil.pid_exists(int(number)):
            shutil.rmtree(path)


def carried_files(folder: Path, config: Path | None, unread: set[str]) -> list[Path]:
    """What the result takes over as it stands: Trainer's and the tokenizer's files, `config`'s configuration."""
    files = {path.name: path for path in folder.iterdir() if path.is_file() and not _REPLACED.fullmatch(path.name)}
    if config is not None and config != folder:
        files |= {
            path.name: path
            for path in config.iterdir()
            if (path.is_file() and _DESCRIBES.fullmatch(path.name) and not _REPLACED.fullmatch(path.name))
            and (path.name not in files or path.name == CONFIG_NAME)
        }
    return [path for name, path in sorted(files.items()) if name not in unread]


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Say in the configuration in which dtype the weights are."""
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_pickle(content: object, path: Path) -> None:
    """`torch.save`, with an error that names the file."""
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch's writer of zip files has no other
        raise ZeroCheckpointError(f"{path.name} cannot be written: {str(error).splitlines()[0]}") from error
