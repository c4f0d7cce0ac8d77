"""What the demo's training gives, as hashes: `python -m benchmarks.demo_hashes CHECKOUT [...] [--steps N]`.

Trains the demo in fp32 on two CPU ranks at stages 2 and 3 with the package and the scripts of each checkout. Prints a
line of each: the sha256 of the saved weights and of the losses, and the bytes that a rank has sent per step. So a
change that is to move no bit can be compared with the commit before it, in a worktree.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml


DEMO = "recipes/demo/sft/config_demo.yaml"


def train(checkout: Path, stage: int, steps: int) -> dict[str, object]:
    """Prepare and train the demo with the code of `checkout`; weights, losses and bytes of the run.

    Raises subprocess.CalledProcessError where a script fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        accelerate = yaml.safe_load((checkout / f"recipes/accelerate_configs/zero{stage}.yaml").read_text())
        accelerate["deepspeed_config"]["steps_per_print"] = 1
        accelerate["mixed_precision"] = "no"
        config = Path(folder, "accelerate.yaml")
        config.write_text(yaml.safe_dump(accelerate))
        # torchrun, because entry points are those of the installed package, whatever the checkout is.
        environment = {**os.environ, "PYTHONPATH": str(checkout), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["HF_ZERO_CONFIG_FILE"] = str(config)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        launch.append(str(checkout / "scripts/sft.py"))
        options = ["--max_steps", str(steps), "--logging_steps", "1", "--do_eval", "false"]
        prepare = [sys.executable, str(checkout / "scripts/prepare_demo.py")]
        recipe = ["--config", str(checkout / DEMO)]
        for command in ([*prepare, *recipe], [*launch, *recipe, *options]):
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        saved = Path(folder, "outputs/demo/sft")
        history = json.loads((saved / "trainer_state.json").read_text())["log_history"]
        weights = (saved / "model.safetensors").read_bytes()
    steps_seen = [entry for entry in history if "loss" in entry]
    losses = json.dumps([(entry["loss"], entry["grad_norm"]) for entry in steps_seen])
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "losses": hashlib.sha256(losses.encode()).hexdigest(),
        "last loss": steps_seen[-1]["loss"],
        "bytes": sorted({entry["zero/bytes_sent_per_step"] for entry in steps_seen}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for stage in (2, 3):
        for checkout in arguments.checkouts:
            print(f"ZeRO-{stage} {checkout.name}: {train(checkout.resolve(), stage, arguments.steps)}", flush=True)


if __name__ == "__main__":
    main()
