"""Trains the demo's model twice, with its state in memory and with it on disk, and sets the two beside each other.

    python scripts/demo_offload.py --config recipes/demo/sft/config_demo.yaml --disk /var/tmp

What must be the same (every loss, the accuracy) is compared, and the rest is printed: bytes that tensors take at the
worst moment of a step, bytes on disk, and how fast they are moved beside what the disk can do. `make demo-offload`
writes model and data first. Options behind `--` go to scripts/sft.py in both runs.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
LAUNCHER = HERE.parent / "recipes" / "accelerate_configs" / "zero3.yaml"
REPORT = {"zero_optimization": {"stage": 3}, "wall_clock_breakdown": True}
LOSSES = ("loss", "grad_norm", "eval_loss")


def train(args: argparse.Namespace, folder: Path, *, on_disk: bool) -> dict[str, Any]:
    """One run on all ranks; what it has logged, and what rank 0 has held."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "zero.json"
    config.write_text(json.dumps(REPORT))
    command = ["accelerate", "launch", "--config_file", str(LAUNCHER), "--num_processes", str(args.num_processes)]
    command += [str(HERE / "sft.py"), "--config", args.config, "--output_dir", str(folder), *args.others]
    command += ["--zero_config", str(config), "--zero_memory_report", "true"]
    if on_disk:
        for kind in ("optimizer", "param"):
            command += [f"--zero_offload_{kind}_device", "nvme", f"--zero_offload_{kind}_nvme_path", args.disk]
    subprocess.run(command, check=True)
    (trainer,) = folder.glob("trainer_state.json")
    lines = (folder / "zero_memory" / "memory_rank0.jsonl").read_text().splitlines()
    return {"log": json.loads(trainer.read_text())["log_history"], "memory": [json.loads(line) for line in lines]}


def accuracy(args: argparse.Namespace, folder: Path) -> str:
    """What the evaluation says of a saved model; ends this process where the accuracy is too low."""
    command = [sys.executable, str(HERE / "evaluate_arithmetic.py"), "--config", args.config, "--model", str(folder)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = re.search(r"Held-out exact match of .*: (.*)", said)
    assert found is not None, said
    return found[1]


def differences(first: list[dict], second: list[dict]) -> list[str]:
    """Where two logs do not say the same, number by number."""
    wanted, found = ([{k: entry.get(k) for k in ("step", *LOSSES)} for entry in log] for log in (first, second))
    apart = [f"{one} and {other}" for one, other in zip(wanted, found, strict=False) if one != other]
    return apart + ([] if len(wanted) == len(found) else [f"{len(wanted)} entries and {len(found)}"])


def summary(resident: dict[str, Any], offloaded: dict[str, Any], raw: float) -> list[str]:
    """Lines that compare the two runs; `raw` are bytes per second that the disk reads and writes at once."""
    lines = [f"{'':<34}{'in memory':>14}{'on disk':>14}"]

    def line(name: str, *values: float) -> None:
        lines.append(f"{name:<34}" + "".join(f"{value:>14.2f}" for value in values))

    rows = resident["memory"], offloaded["memory"]
    line("state in memory, MB", *(row[-1]["state_bytes"] / 1e6 for row in rows))
    line("peak of a step's tensors, MB", *(max(one["peak"] or 0 for one in row) / 1e6 for row in rows))
    line("host buffers, MB", *(row[-1]["elsewhere"].get("host", {}).get("buffers", 0) / 1e6 for row in rows))
    line("file, MB", *(sum(row[-1]["elsewhere"].get("disk", {}).values()) / 1e6 for row in rows))
    logs = [[entry for entry in run["log"] if "zero_seconds/step" in entry] for run in (resident, offloaded)]
    means = [{k: sum(e.get(k, 0.0) for e in log) / len(log) for k in {k for e in log for k in e}} for log in logs]
    line("seconds of a step", *(mean["zero_seconds/step"] for mean in means))
    line("... in which it waits for the disk", *(mean.get("zero_seconds/wait_disk", 0.0) for mean in means))
    moved = means[1]["zero/disk_bytes_per_step"]
    rate = moved / means[1]["zero_seconds/step"]
    lines.append(
        f"A rank moves {moved / 1e6:.2f} MB in a step, both ways, {rate / 1e6:.0f} MB/s over the whole step: "
        f"{rate / raw:.1%} of the {raw / 1e6:.0f} MB/s that the disk can do."
    )
    return lines


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the recipe, with a `demo` section")
    parser.add_argument("--disk", default="/var/tmp", help="a folder on a local disk")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo/offload"))
    parser.add_argument("--no-accuracy", action="store_true", help="leave the evaluation of the saved models out")
    parser.add_argument("others", nargs="*", help="options of scripts/sft.py, behind --")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    from hf_zero.tools.disk_speed import measure

    args = parse_arguments(argv)
    raw = measure(args.disk, 256 << 20).both
    folders = args.output / "in_memory", args.output / "on_disk"
    resident, offloaded = (train(args, folder, on_disk=folder is folders[1]) for folder in folders)
    print("\n".join(summary(resident, offloaded, raw)))
    apart = differences(resident["log"], offloaded["log"])
    if apart:
        sys.exit("The two runs have not trained the same: " + "; ".join(apart[:3]))
    steps = max(entry["step"] for entry in resident["log"])
    print(f"Losses and gradient norms are the same number by number, {steps} steps.")
    if not args.no_accuracy:
        scores = [accuracy(args, folder) for folder in folders]
        print(f"Accuracy: {scores[0]} in memory, {scores[1]} on disk.")
        if scores[0] != scores[1]:
            sys.exit("The accuracy is not the same.")


if __name__ == "__main__":
    main()
