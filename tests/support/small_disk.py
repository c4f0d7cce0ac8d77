"""A file system of 4 MiB, to be filled by tests."""

import functools
import inspect
import os
import subprocess
import sys

import pytest


SIZE = 4 * 2**20
_ALREADY = "HF_ZERO_TEST_OWN_MOUNTS"


def on_a_small_disk(test):
    """Run a test in a file system of 4 MiB; where this user may not mount one, in a namespace where it may."""

    @functools.wraps(test)
    def wrapper(tmp_path, request, **arguments):
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
        tried = subprocess.run(mount, capture_output=True, text=True)
        if tried.returncode == 0:
            try:
                test(disk, **arguments)
            finally:
                subprocess.run(["umount", "--lazy", str(disk)], check=True)
            return
        again = ["unshare", "-rm", sys.executable, "-m", "pytest", request.node.nodeid, "-q"]
        if _ALREADY in os.environ or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            pytest.skip(f"no file system of a small size can be mounted here: {tried.stderr.strip()}")
        outcome = subprocess.run(again, env={**os.environ, _ALREADY: "1"}, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stdout

    # pytest gives what the signature asks for.
    asked = [p for name, p in inspect.signature(test).parameters.items() if name != "disk"]
    own = [p for name, p in inspect.signature(wrapper, follow_wrapped=False).parameters.items() if name != "arguments"]
    wrapper.__signature__ = inspect.Signature([*own, *asked])
    return wrapper
