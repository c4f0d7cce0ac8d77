"""Builds a folder aside by all ranks, and gives it its name when it is complete; until then nothing old is touched."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_zero.checkpoint import commit
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.staging import naming, on_all_ranks
from hf_zero.errors import ZeroCheckpointError, ZeroError


@dataclass(kw_only=True)
class Construction:
    """A folder under construction."""

    folder: Path
    sums: list[commit.Sums] = field(default_factory=list)  # of the tensors in it, complete when all is written
    afterwards: Callable[[], None] = lambda: None  # what the rank that creates files does when it has its name


@contextlib.contextmanager
def built_aside(final: Path, job: SaveJob, built: Path | None = None) -> Iterator[Construction]:
    """Inside, all ranks write a folder aside, which afterwards is marked as complete and called `final`; a collective.

    `built` is where the folder is made, on the same disk. It gets its name as the last step of the job. Raises
    ZeroCheckpointError on all ranks where one fails; what was built is removed then, and what was called `final`
    before is as it was.
    """
    built, comm, later = built or commit.aside(final), job.comm, job.later
    on_all_ranks(comm, lambda: _begin(built, final, job.is_main))
    on_all_ranks(comm, lambda: built.mkdir(parents=True, exist_ok=True))
    construction, failure = Construction(folder=built), None

    def discard() -> None:
        if job.is_main:
            shutil.rmtree(built, ignore_errors=True)
            with contextlib.suppress(OSError):
                built.parent.rmdir()

    def check() -> None:
        if failure is not None:
            with naming(built):
                raise failure

    try:
        try:
            yield construction
        except ZeroError:
            raise  # the same on all ranks
        except Exception as error:
            failure = error
        on_all_ranks(comm, check)
        if later is not None:
            comm, later.folder = later.comm, str(final)
            later.leftovers.append(discard)
        job.perform(lambda: on_all_ranks(comm, lambda: _finish(construction, final) if job.is_main else None))
    except BaseException:
        discard()
        raise


def _begin(built: Path, final: Path, is_main: bool) -> None:
    if final.exists() and not final.is_dir():
        raise ZeroCheckpointError(f"{final} is a file: give a folder")
    if final.is_mount() or _holds_current_folder(final):
        what = "where a disk is mounted" if final.is_mount() else "the current folder, or above it"
        raise ZeroCheckpointError(f"{final} is {what}, so it cannot be replaced as a whole: save into a folder in it")
    if is_main:
        with naming(final):
            final.parent.mkdir(parents=True, exist_ok=True)
        commit.finish_interrupted(built, final)
        shutil.rmtree(built, ignore_errors=True)


def _holds_current_folder(final: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the current folder may have been removed
        return Path.cwd().is_relative_to(final.resolve())
    return False


def _finish(construction: Construction, final: Path) -> None:
    built = construction.folder
    with naming(built):
        commit.write_marker(built, {file: sums for part in construction.sums for file, sums in part.items()})
    with naming(final):
        commit.place(built, final)
    construction.afterwards()
