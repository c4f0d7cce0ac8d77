"""`benchmarks/benchmark_tiles.py` counts: with a loss in tiles a micro-batch takes less than 0.35 of the whole one."""

import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
SIZES = ["--tokens", "1024", "--vocabulary", "4096", "--hidden", "32", "--intermediate", "64", "--tiles", "128"]


def test_the_table_has_lower_peaks_and_the_same_values():
    command = [sys.executable, "-m", "benchmarks.benchmark_tiles", *SIZES]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    whole, loss, both = rows[2:]
    assert float(whole[3]) == 1 and float(loss[3]) < 0.35 and float(both[3]) < float(loss[3]), output
    assert all(float(row[5]) <= 2e-6 and float(row[6]) <= 2e-6 for row in rows[2:]), output
