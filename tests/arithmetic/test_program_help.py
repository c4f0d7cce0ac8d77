"""Programs that take a page or a folder tell how they are called, and take no option for a name."""

import subprocess
import sys

import pytest

from tests.support.launches import ROOT


@pytest.mark.parametrize("name", ["code_lines", "package_map", "scaling_report"])
def test_help_is_shown_and_no_file_of_that_name_is_written(tmp_path, name):
    command = (sys.executable, "-m", f"benchmarks.{name}", "--help")
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.startswith("usage:"), ended.stdout + ended.stderr
    assert not list(tmp_path.iterdir())
