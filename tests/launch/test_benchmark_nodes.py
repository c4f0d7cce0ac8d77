"""The benchmarks over nodes count what they say, and their negative control is one."""

import shutil
import subprocess
import sys

import pytest
import torch

from hf_zero.comm.codec import Codec
from tests.launch.test_benchmark import ROOT
from tests.support.harness import LIMIT


sys.path.insert(0, str(ROOT / "benchmarks"))
import benchmark_codecs  # noqa: E402
import benchmark_link  # noqa: E402


def _run(row, seed, loss):
    return {"row": row, "seed": seed, "loss": loss, "errors": {"gradients": 0.01 + seed / 1000}, "off": 0.001}


def test_gaps_are_taken_seed_by_seed_and_held_against_how_far_the_seeds_are_apart():
    base = [_run(benchmark_codecs.BASE, seed, loss) for seed, loss in enumerate((1.0, 1.2, 1.4))]
    other = [_run("8-bit gradients", seed, loss) for seed, loss in enumerate((1.1, 1.3, 1.5))]
    text = benchmark_codecs.table(base + other)
    assert "0.4000 apart" in text
    assert "| 8-bit gradients | 1.3000 | +0.1000 | +0.25 | gradients 1.20 % | 0.100 % |" in text


def test_the_control_is_far_worse_than_the_codec_that_it_stands_beside():
    torch.manual_seed(0)
    values = torch.distributions.StudentT(3.0).sample((1 << 16,))

    def error(codec):
        wrong, whole = codec.error(values, codec.pack(values)).tolist()
        return (wrong / whole) ** 0.5

    assert error(benchmark_codecs.coarse_codec()) > 3 * error(Codec(4))


def _may_make_networks():
    programs = all(map(shutil.which, ("ip", "tc", "nsenter", "unshare")))
    return programs and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _may_make_networks(), reason="needs root, ip, tc and nsenter")
def test_a_slow_link_counts_what_goes_between_two_networks(tmp_path):
    rows = ["hf_zero, nodes keep weights", "FSDP2, HSDP"]
    command = [sys.executable, ROOT / "benchmarks/benchmark_link.py", "--size", "tiny", "--steps", "1"]
    command += ["--accumulation", "1", "--length", "8", "--output", tmp_path / "rows.json", "--rows", *rows]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    hybrid, theirs = benchmark_link.json.loads((tmp_path / "rows.json").read_text())
    assert 3 <= hybrid["sent"] <= 3.5 and 4 <= theirs["sent"] <= 4.5  # half of w + g; one all-reduce of half of g
    assert hybrid["resident"] == pytest.approx(2 / 2 + 12 / 4, rel=0.05)
    assert hybrid["losses"] == pytest.approx(theirs["losses"], abs=0.02)
