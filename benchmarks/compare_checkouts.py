"""Step times of two checkouts, interleaved: `python -m benchmarks.compare_checkouts BEFORE AFTER [--rounds N]`.

Every round runs `benchmark.py` of each of the two with its package, in turn, on the same work; the ratios are medians
over rounds. So a change that is to cost nothing can be compared with the commit before it, in a worktree.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def step_times(checkout: Path, systems: list[str], options: list[str]) -> dict[tuple[str, int], float]:
    """Seconds per step by (system, micro-batches), with the package of `checkout`.

    Raises subprocess.CalledProcessError where the benchmark fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        (script,) = checkout.glob("*/benchmark.py")
        command = [sys.executable, str(script), "--rounds", "1", "--output", folder]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        subprocess.run(
            [*command, "--systems", *systems, *options], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        records = json.loads(Path(folder, "results.json").read_text())["records"]
    return {(r["case"]["system"], r["case"]["accumulation"]): r["wall"]["step"] for r in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", default=["zero2", "zero3"])
    arguments, options = parser.parse_known_args()  # the others are the benchmark's
    ratios: dict[tuple[str, int], list[float]] = {}
    for round_ in range(arguments.rounds):
        pair = [arguments.before, arguments.after]
        order = pair if round_ % 2 == 0 else pair[::-1]
        times = {checkout: step_times(checkout.resolve(), arguments.systems, options) for checkout in order}
        for case, after in times[arguments.after].items():
            ratios.setdefault(case, []).append(after / times[arguments.before][case])
        print(f"round {round_ + 1}: " + ", ".join(f"{found[-1]:.3f}" for found in ratios.values()), flush=True)
    for (system, accumulation), found in ratios.items():
        shown = ", ".join(f"{ratio:.3f}" for ratio in found)
        print(f"{system}, {accumulation} micro-batches: {statistics.median(found):.3f} ({shown})")


if __name__ == "__main__":
    main()
