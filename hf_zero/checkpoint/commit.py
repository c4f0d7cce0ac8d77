"""Checkpoint folders that are complete or absent: built aside, renamed when finished, with a marker that proves it.

[Note: commit marker] `COMMIT` is the last file of a checkpoint. It holds the size and the hash of every small file,
and of every sliced file the hash of its header and the checksum of each tensor. A folder without it is torn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hf_zero.checkpoint.checksum import Checksums
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroCheckpointError, ZeroDamageError


MARKER = "COMMIT"
# Folders under construction stand in this folder, next to where they are going to be.
UNCOMMITTED = "uncommitted"
_REPLACED = ".replaced"  # ends the name of a folder that a finished one takes the place of
_STEP = "checkpoint-"
# In format 1 the checksums of elements of 8 bytes are of another kind.
_FORMAT, _FORMATS = 2, (1, 2)
# What resuming reads. Users may add files to a checkpoint, but none of these: a reader would take it for a part of it.
_READ = re.compile(
    r"(model|adapter_model|zero_state)[\w-]*\.safetensors|model\.safetensors\.index\.json|trainer_state\.json|"
    r"(scheduler|rng_state|random_states|client_state)\w*\.(pt|pth|pkl|bin|safetensors)"
)
# Tensor checksums by file.
Sums = Mapping[str, Mapping[str, int]]


def write_marker(folder: Path, sums: Sums) -> None:
    """Flush every file of `folder` to the disk and write its marker."""
    (folder / MARKER).unlink(missing_ok=True)
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _flush(path)
        name = path.relative_to(folder).as_posix()
        files[name] = _describe(path, sums.get(name))
    temporary = folder / (MARKER + ".tmp")
    temporary.write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1), encoding="utf-8")
    _flush(temporary)
    os.replace(temporary, folder / MARKER)
    _flush(folder)


def _describe(path: Path, tensors: Mapping[str, int] | None) -> dict[str, object]:
    described: dict[str, object] = {"size": path.stat().st_size}
    if tensors is None:
        described["sha256"] = _hash(path.read_bytes())
    else:
        described["header_sha256"] = _hash(SlicedFile.open(path).header)
        described["tensors"] = {name: f"{value:016x}" for name, value in sorted(tensors.items())}
    return described


def aside(final: Path) -> Path:
    """Where a folder is built that is going to be `final`."""
    return final.parent / UNCOMMITTED / final.name


def place(built: Path, final: Path) -> None:
    """Put a finished folder where it belongs; one that is there already goes only when the new one has its name.

    What users have put beside the old checkpoint's own files stays.
    """
    old = _replaced_by(built)
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(built, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    _flush(final.parent)
    if old.exists():
        _retire(old, final)
    with contextlib.suppress(OSError):  # others may be built there
        built.parent.rmdir()


def _replaced_by(built: Path) -> Path:
    return built.with_name(built.name + _REPLACED)


def _retire(old: Path, final: Path) -> None:
    """Remove a folder whose place another has taken; what is no part of its checkpoint moves there."""
    if old.is_symlink():  # what it leads to is the user's
        old.unlink()
        return
    own = {MARKER}
    with contextlib.suppress(ZeroCheckpointError):
        own |= {PurePosixPath(name).parts[0] for name in _read_marker(old).files}
    for path in list(old.iterdir()):
        stays = path.name in own or _READ.fullmatch(path.name) or path.suffix == ".tmp"
        if not stays and not (final / path.name).exists():
            os.rename(path, final / path.name)
    shutil.rmtree(old, ignore_errors=True)


def finish_interrupted(built: Path, final: Path) -> None:
    """Do what is left to do for a folder that was complete when its run was killed, an instant before the end."""
    if not final.exists() and is_committed(built):
        place(built, final)
    elif final.exists() and _replaced_by(built).exists():
        _retire(_replaced_by(built), final)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_committed(folder: Path) -> bool:
    return (folder / MARKER).is_file()


@dataclass(frozen=True)
class _Marker:
    """What a marker says: its format, and of every file, by its path in the folder, size and hashes."""

    version: int
    files: dict[str, dict]


def _read_marker(folder: Path) -> _Marker:
    """Read the marker of a folder.

    Raises ZeroCheckpointError where it is damaged, or of a format that this version does not know.
    """
    path = folder / MARKER
    wrong = None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, files = content["format"], content["files"]
        if version in _FORMATS:
            wrong = next((name for name, described in files.items() if not _is_sound(name, described)), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ZeroCheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version not in _FORMATS:
        raise ZeroCheckpointError(
            f"{path} has format {version!r}, and this hf_zero reads formats up to {_FORMAT}: update hf_zero"
        )
    if wrong is not None:
        raise ZeroCheckpointError(f"{path} is damaged: '{wrong}' in it is no file of the folder, or has no size")
    if not files:
        raise ZeroCheckpointError(f"{path} is damaged: it lists no files")
    return _Marker(version, files)


def checksums(folder: Path) -> Checksums | None:
    """What adds up checksums as the marker of a folder has them; None where it has no marker to compare with.

    Raises ZeroCheckpointError where the marker is damaged.
    """
    return Checksums(wide=_read_marker(folder).version == 1) if is_committed(folder) else None


def _is_sound(name: str, described: dict) -> bool:
    """Whether an entry names a file inside the folder, with its size and a hash."""
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    if "sha256" in described:
        hashes = [described["sha256"]]
    else:
        hashes = [described["header_sha256"], *described["tensors"].values()]
    return inside and isinstance(described["size"], int) and all(int(value, 16) >= 0 for value in hashes)


def check_files(folder: Path) -> None:
    """Raise ZeroCheckpointError, naming the file, where something is missing or changed; tensors are not read."""
    files = _read_marker(folder).files
    for path in folder.iterdir():
        if _READ.fullmatch(path.name) and path.name not in files:
            raise ZeroCheckpointError(f"{path} is no part of the checkpoint: {MARKER} does not list it")
    for name, described in files.items():
        path = folder / name
        if not path.is_file():
            raise ZeroCheckpointError(f"{path} is missing from a committed checkpoint")
        if path.stat().st_size != described["size"]:
            raise ZeroCheckpointError(f"{path} has {path.stat().st_size:,} bytes, {described['size']:,} were saved")
        data = path.read_bytes() if "sha256" in described else SlicedFile.open(path).header
        if _hash(data) != described.get("sha256", described.get("header_sha256")):
            raise ZeroCheckpointError(f"{path} is damaged: it has other bytes than were saved")


def check_complete(folder: Path) -> None:
    """Raise ZeroCheckpointError unless a folder is marked, and its files are those that were saved."""
    if not is_committed(folder):
        raise ZeroCheckpointError(f"{folder} was not saved completely, or not by hf_zero (it has no {MARKER} file)")
    check_files(folder)


def check_tensors(folder: Path, share: int = 0, shares: int = 1, but: Container[str] = ()) -> None:
    """Read every `shares`-th tensor of a committed folder and compare it; raises as `compare_sums` does.

    Those in the files `but` are left out.
    """
    marker = _read_marker(folder)
    for name, described in sorted(marker.files.items()):
        if "tensors" in described and name not in but:
            found = Checksums(wide=marker.version == 1)
            names = sorted(described["tensors"])[share::shares]
            SlicedFile.open(folder / name).sum_up(folder / name, names, found)
            compare_sums(folder, name, found)


def compare_sums(folder: Path, file: str, found: Mapping[str, int]) -> None:
    """Raise ZeroDamageError where a tensor is not the one that was saved; it names the file and the tensor.

    Of a folder without a marker nothing is known. Raises ZeroCheckpointError where the marker lacks file or tensor.
    """
    if not is_committed(folder):
        return
    described = _read_marker(folder).files.get(file)
    if described is None:
        raise ZeroCheckpointError(f"{folder / file} is no part of the checkpoint: {MARKER} does not list it")
    wanted = described.get("tensors")
    if wanted is None:
        return
    for tensor, value in found.items():
        if tensor not in wanted:
            raise ZeroCheckpointError(f"{folder / MARKER} is damaged: it has no checksum of '{tensor}' in {file}")
        if value != int(wanted[tensor], 16):
            raise ZeroDamageError(f"{folder / file} is damaged: tensor '{tensor}' has other values than were saved")


def step_folder(run_folder: Path, step: int) -> Path:
    """Where a run has its checkpoint of a step."""
    return run_folder / f"{_STEP}{step}"


def steps_in(run_folder: Path) -> list[int]:
    """The steps of which a run has a checkpoint folder."""
    names = [path.name for path in run_folder.iterdir() if path.is_dir()] if run_folder.is_dir() else []
    return [int(name.removeprefix(_STEP)) for name in names if re.fullmatch(_STEP + r"(0|[1-9]\d*)", name)]


def finish_run(run_folder: Path, target: Path | None = None) -> None:
    """`finish_interrupted` for all that is under construction in a run's folder; `target` is where it belongs."""
    for built in torn_folders(run_folder):
        built = built.with_name(built.name.removesuffix(_REPLACED))
        finish_interrupted(built, (target or run_folder) / built.name)


def torn_folders(run_folder: Path) -> list[Path]:
    """What a run that was killed while saving has left behind."""
    under_construction = run_folder / UNCOMMITTED
    return sorted(under_construction.iterdir()) if under_construction.is_dir() else []
