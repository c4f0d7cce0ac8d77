"""What a process holds of a folder on disk: threads that move bytes, and files."""

import os
import threading
import time
from pathlib import Path


def held_in(folder):
    """Threads that move bytes, and files in the folder."""
    entries = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    files = [name for entry in entries if entry.is_symlink() and str(folder) in (name := os.readlink(entry))]
    return [thread.name for thread in threading.enumerate() if "disk" in thread.name], files


def left_in(folder):
    """What is still held when an engine that nobody has any more has had time to close it."""
    deadline = time.monotonic() + 60
    while any(found := held_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
