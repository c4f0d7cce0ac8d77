"""Bytes in unnamed files come back as they were written, errors say where they are, and nothing stays behind."""

import errno
import fcntl
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hf_zero.core.direct_file import PAGE, DirectFile, whole_pages
from hf_zero.errors import ZeroRuntimeError
from tests.support.small_disk import SIZE, on_a_small_disk


REQUEST = 4 * PAGE


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def memory(nbytes, seed=None):
    """Whole pages, page-aligned; random with a seed."""
    room = memoryview(mmap.mmap(-1, whole_pages(nbytes)))
    if seed is not None:
        room[:] = random.Random(seed).randbytes(len(room))
    return room


def round_trip(file, sizes=(PAGE, REQUEST, 5 * REQUEST + PAGE, 3 * PAGE)):
    """Write several extents at once, read them back at once in another order."""
    data = [memory(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    extents = [file.allocate(len(pages)) for pages in data]
    for write in [file.write(extent, pages) for extent, pages in zip(extents, data, strict=True)]:
        write.wait()
    back = [memory(len(pages)) for pages in data]
    reads = [file.read(extent, pages) for extent, pages in reversed(list(zip(extents, back, strict=True)))]
    for read in reads:
        read.wait()
        assert read.done
    assert [bytes(pages) for pages in back] == [bytes(pages) for pages in data]
    return sum(map(len, data))


def test_what_is_written_comes_back_and_is_counted(folder):
    file = DirectFile(folder, request=REQUEST, in_flight=3)
    nbytes = round_trip(file)
    assert file.moved == {"read": nbytes, "write": nbytes}
    assert file.seconds["read"] > 0 and file.seconds["write"] > 0
    assert file.nbytes == nbytes
    file.close()


def _refuse_flag(monkeypatch, flag):
    """A file system that knows no O_TMPFILE, or no O_DIRECT when asked, or no O_DIRECT when used."""
    real_open, real_fcntl, real_write = os.open, fcntl.fcntl, os.pwrite

    def open_(path, flags, *args, **kwargs):
        if flag == "O_TMPFILE" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real_open(path, flags, *args, **kwargs)

    def fcntl_(descriptor, what, *args):
        if flag == "O_DIRECT" and what == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real_fcntl(descriptor, what, *args)

    def pwrite(descriptor, data, position):
        if flag == "use of O_DIRECT" and real_fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real_write(descriptor, data, position)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("flag", ["O_TMPFILE", "O_DIRECT", "use of O_DIRECT"])
def test_a_file_system_that_refuses_a_flag_keeps_the_same_bytes(folder, monkeypatch, flag):
    _refuse_flag(monkeypatch, flag)
    file = DirectFile(folder, request=REQUEST)
    assert flag == "O_TMPFILE" or not file.direct
    round_trip(file)
    assert not list(folder.iterdir())
    file.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_memory_can_pose_as_a_disk():
    file = DirectFile("/dev/shm", request=REQUEST)
    round_trip(file)
    file.close()


def test_extents_are_used_again_and_joined(folder):
    file = DirectFile(folder)
    first, second, third = (file.allocate(pages * PAGE) for pages in (2, 3, 1))
    assert file.nbytes == 6 * PAGE
    file.free(first)
    file.free(second)
    assert file.nbytes == PAGE
    assert file.allocate(4 * PAGE + 1).start == first.start, "two neighbours that are free are one extent"
    assert file.allocate(PAGE).start > third.start
    assert file.nbytes == 7 * PAGE
    file.close()


def test_short_reads_and_writes_go_on(folder, monkeypatch):
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:PAGE]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:PAGE], at))
    file = DirectFile(folder, request=REQUEST)
    round_trip(file)
    file.close()


@pytest.mark.parametrize("kind, call", [("read", "preadv"), ("write", "pwrite")])
def test_a_failure_names_file_position_and_reason_whenever_it_is_asked(folder, monkeypatch, kind, call):
    file = DirectFile(folder, request=REQUEST, in_flight=2)
    real = getattr(os, call)
    extent = file.allocate(3 * REQUEST)

    def fail(descriptor, data, position):
        if position == extent.start + REQUEST:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, data, position)

    monkeypatch.setattr(os, call, fail)
    transfer = getattr(file, kind)(extent, memory(3 * REQUEST))
    for _ in range(2):
        with pytest.raises(ZeroRuntimeError) as caught:
            transfer.wait()
        message = str(caught.value)
        assert f"cannot {kind} {REQUEST:,} bytes at position {extent.start + REQUEST:,}" in message
        assert str(folder) in message and "[Errno 5] Input/output error" in message
    assert transfer.done, "memory is given to others only when no request uses it"
    assert file.moved[kind] == 2 * REQUEST
    file.close()


def test_a_file_that_ends_early_is_an_error(folder):
    file = DirectFile(folder, request=REQUEST)
    extent = file.allocate(2 * REQUEST)
    os.ftruncate(file._descriptor, REQUEST + PAGE)
    with pytest.raises(ZeroRuntimeError, match=f"ends {REQUEST - PAGE:,} bytes early"):
        file.read(extent, memory(2 * REQUEST)).wait()
    file.close()


def test_a_read_into_memory_that_is_being_written_waits_for_it(folder, monkeypatch):
    file, write = DirectFile(folder, request=REQUEST, in_flight=2), os.pwrite
    may_write = threading.Event()
    first, second = file.allocate(2 * REQUEST), file.allocate(2 * REQUEST)
    other, shared = memory(2 * REQUEST, 1), memory(2 * REQUEST, 2)
    file.write(second, other).wait()
    before = bytes(shared)

    def late(descriptor, data, position):
        may_write.wait(60)
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", late)
    drained = file.write(first, shared)
    fetched = file.read(second, shared, after=drained)
    assert not fetched.done
    may_write.set()
    fetched.wait()
    assert bytes(shared) == bytes(other)
    file.read(first, shared).wait()
    assert bytes(shared) == before
    file.close()


def test_a_read_behind_a_failed_write_is_made(folder, monkeypatch):
    file = DirectFile(folder, request=REQUEST)
    good, bad = file.allocate(PAGE), file.allocate(PAGE)
    file.write(good, memory(PAGE, 3)).wait()

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    pages = memory(PAGE, 4)
    drained = file.write(bad, pages)
    file.read(good, pages, after=drained).wait()
    assert bytes(pages) == bytes(memory(PAGE, 3))
    with pytest.raises(ZeroRuntimeError, match="No space left"):
        drained.wait()
    file.close()


@on_a_small_disk
def test_a_full_disk_is_an_error_when_room_is_asked_for(disk):
    file = DirectFile(disk)
    file.allocate(SIZE // 2)
    with pytest.raises(ZeroRuntimeError) as caught:
        file.allocate(SIZE)
    message = str(caught.value)
    assert f"'{disk}' has no room" in message and f"has {SIZE // 2:,} bytes there" in message
    assert f"needs {SIZE:,} more, {SIZE // 2:,} are free" in message
    file.allocate(SIZE // 4)  # what fits is still given
    file.close()
    assert os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize == SIZE


@on_a_small_disk
def test_a_full_disk_is_noticed_where_blocks_cannot_be_given_ahead(disk, monkeypatch):
    monkeypatch.setattr("hf_zero.core.direct_file.allocate_blocks", lambda *_: False)
    file = DirectFile(disk)
    with pytest.raises(ZeroRuntimeError, match="No space left"):
        file.allocate(SIZE + PAGE)
    round_trip(file)
    file.close()


@pytest.mark.parametrize("what", ["missing", "a file", "no disk"])
def test_a_folder_that_holds_no_files_is_an_error(tmp_path, what):
    place = {"missing": tmp_path / "missing", "a file": tmp_path / "file", "no disk": Path("/proc")}[what]
    (tmp_path / "file").touch()
    before = _held()
    with pytest.raises(ZeroRuntimeError, match=f"no file can be made in '{place}': .*Name an existing folder"):
        DirectFile(place)
    assert _held() == before


def test_a_folder_that_is_read_only_is_an_error(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ZeroRuntimeError, match="Read-only file system"):
        DirectFile(folder)


def test_a_folder_may_go_while_the_file_is_used(folder):
    file = DirectFile(folder, request=REQUEST)
    shutil.rmtree(folder)
    round_trip(file)
    file.close()


def test_two_files_in_one_folder_do_not_meet(folder):
    one, two = DirectFile(folder, request=REQUEST), DirectFile(folder, request=REQUEST)
    extents = [file.allocate(REQUEST) for file in (one, two)]
    for file, extent, seed in zip((one, two), extents, (1, 2), strict=True):
        file.write(extent, memory(REQUEST, seed)).wait()
    for file, extent, seed in zip((one, two), extents, (1, 2), strict=True):
        pages = memory(REQUEST)
        file.read(extent, pages).wait()
        assert bytes(pages) == bytes(memory(REQUEST, seed))
        file.close()


def _held():
    """Threads, and what this process has open."""
    names = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    return set(threading.enumerate()), {name for name in names if not name.startswith("/proc")}


def test_no_thread_and_no_descriptor_outlives_it(folder):
    before = _held()
    file = DirectFile(folder, request=REQUEST)
    round_trip(file)
    assert _held() != before
    file.close()
    file.close()
    assert _held() == before


_ENDLESS = """
import sys, mmap
from hf_zero.core.direct_file import DirectFile
file = DirectFile(sys.argv[1])
extent = file.allocate(1 << 20)
print("ready", flush=True)
while True:
    file.write(extent, memoryview(mmap.mmap(-1, 1 << 20))).wait()
"""


@on_a_small_disk
def test_a_killed_process_leaves_nothing(disk):
    with subprocess.Popen([sys.executable, "-c", _ENDLESS, disk], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert _free(disk) <= SIZE - (1 << 20)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while _free(disk) < SIZE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _free(disk) == SIZE and not list(disk.iterdir())


def _free(disk):
    status = os.statvfs(disk)
    return status.f_bfree * status.f_frsize


def _in_child(folder):
    file = DirectFile(folder, request=REQUEST)
    round_trip(file)
    file.close()


def test_processes_that_are_forked_leave_each_other_alone(folder):
    file = DirectFile(folder, request=REQUEST)
    extent = file.allocate(REQUEST)
    file.write(extent, memory(REQUEST, 7)).wait()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(folder,))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    pages = memory(REQUEST)
    file.read(extent, pages).wait()
    assert bytes(pages) == bytes(memory(REQUEST, 7))
    round_trip(file)
    file.close()
