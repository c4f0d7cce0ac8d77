"""``hf-zero verify``: does this configuration compute what plain data parallelism computes?"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_zero.command_line import CommandParser, positive
from hf_zero.config.documents import load_document
from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroError


OPTIONS_VARIABLE = "HF_ZERO_VERIFY"  # what the ranks are to do
_CPU_RANKS = 2


def main(argv: Sequence[str]) -> int:
    """0 where every promise holds, 1 where one does not, 2 or ZeroError where nothing could be verified."""
    options = _parser().parse_args(argv)
    options.script = list(argv)[len(argv) - len(options.script) :]  # as they were typed, underscores and all
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ZeroError(f"--output {folder} cannot be written to: {error.strerror}") from error
    return _verify_script(options, folder) if options.script else _verify_model(options, folder)


def _verify_model(options: argparse.Namespace, folder: Path) -> int:
    from hf_zero.launcher import start

    asked = {name: getattr(options, name) for name in ("model", "steps", "seed", "against")}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        os.environ[OPTIONS_VARIABLE] = json.dumps({**asked, "output": str(folder.resolve()), "report": report.name})
        status = start.main([*_launch_options(options), "--module", "hf_zero.verify.ranks"])
        found = json.loads(report.read() or "{}")
    if status or "holds" not in found:
        return 2
    return 0 if found["holds"] else 1


def _verify_script(options: argparse.Namespace, output: Path) -> int:
    """Run the script twice, as it is configured and at stage 0, and compare what both have computed."""
    from hf_zero.launcher import start
    from hf_zero.launcher.arguments import config_of_command, parse_command
    from hf_zero.verify.script import TracedRun, compare_traces
    from hf_zero.verify.traced import FOLDER_VARIABLE, STEPS_VARIABLE

    for name in ("model", "against"):
        if getattr(options, name) is not None:
            raise ZeroError(f"--{name} and a script both say what is to be trained: leave one of them out")
    if not Path(options.script[0]).is_file():
        raise ZeroError(f"there is no script '{options.script[0]}'")
    start_words, script = _launch_options(options), ["--module", "hf_zero.verify.traced", *options.script]
    config = config_of_command(parse_command([*start_words, *script]))
    if config.zero_stage == 0 and _width(config) == 1:
        raise ZeroError(
            "the configuration is of stage 0, which is plain data parallelism: name one to compare with it"
        )
    alone = _ranks_alone(options, config)
    with tempfile.TemporaryDirectory(prefix="hf-zero-verify-") as temporary:
        runs = []
        for name, change in (("as it is configured", None), ("under plain data parallelism", _plain)):
            folder = Path(temporary, str(len(runs)))
            folder.mkdir()
            os.environ |= {FOLDER_VARIABLE: str(folder), STEPS_VARIABLE: str(options.steps)}
            print(f"hf-zero verify: {options.script[0]} {name}", flush=True)
            ranks = ["--num_processes", str(alone)] if change and alone else []
            if start.main([*start_words, *ranks, *script], change):
                raise ZeroError(f"{options.script[0]} has failed {name}")
            runs.append(TracedRun.read(folder))
        settings = {name: getattr(config, name) for name in config.chosen()}
        found = compare_traces(*runs, script=" ".join(options.script), settings=settings)
    found.write(output)
    print("\n".join([*found.lines(), f"written to {output.resolve()}"]), flush=True)
    return 0 if found.holds else 1


def _width(config: ZeroConfig) -> int:
    """How many ranks share a batch."""
    return config.tp_size * config.sp_size * config.cp_size


def _ranks_alone(options: argparse.Namespace, config: ZeroConfig) -> int | None:
    """How many ranks have as many batches where none is shared; None where that is the same number."""
    if _width(config) == 1:
        return None
    ranks = _ranks(options)
    if ranks is None:
        raise ZeroError(f"ranks share batches {_width(config)} at a time: say how many there are by --num-processes")
    if ranks % _width(config):
        raise ZeroError(f"{ranks} rank(s) cannot share batches {_width(config)} at a time: make it a multiple")
    return ranks // _width(config)


def _ranks(options: argparse.Namespace) -> int | None:
    """How many ranks to start; None: as many as the launcher finds."""
    from hf_zero.launcher.environment import has_accelerator

    return options.num_processes or (None if has_accelerator() else _CPU_RANKS)


def _plain(config: ZeroConfig) -> ZeroConfig:
    """What is left of a configuration at stage 0: precision, sizes, optimizer; no places, extents and codecs."""
    from hf_zero.config.consistency import SHARED

    scales = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    steps = ("consecutive_hysteresis", "check_grad_overflow", "max_consecutive_skips", "optimizer", "scheduler")
    kept = [name for name in (*SHARED, *scales, *steps) if name in config.chosen()]
    origins = {name: config.origins[name] for name in kept if name in config.origins}
    return type(config)(zero_stage=0, origins=origins, **{name: getattr(config, name) for name in kept})


def _launch_options(options: argparse.Namespace) -> list[str]:
    words = []
    if options.config:
        is_accelerate = "distributed_type" in load_document(options.config).data
        words += ["--config_file" if is_accelerate else "--deepspeed_config_file", options.config]
    else:
        words += ["--zero_stage", "3"]
    if options.mixed_precision:
        words += ["--mixed_precision", options.mixed_precision]
    ranks = _ranks(options)
    return words + (["--num_processes", str(ranks)] if ranks else [])


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="hf-zero verify",
        description="Train a few steps under a configuration and, from the same weights and on the same data, as "
        "plain data parallelism does. Prints a verdict on each promise, the largest difference and the rounding that "
        "explains it, or the first module or tensor that differs and why.",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a training script and its arguments, last: it is run under the configuration and under stage 0",
    )
    parser.add_argument("--config", metavar="FILE", help="Accelerate YAML or DeepSpeed JSON (default: stage 3)")
    parser.add_argument(
        "--model", help="a local folder, a config.json or a hub name (default: a small one of its own)"
    )
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="optimizer steps (default: 5)")
    parser.add_argument("--num-processes", type=positive, metavar="N", help="ranks (default: one per GPU, 2 on CPU)")
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="precision (default: of --config)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (default: 0)")
    parser.add_argument(
        "--against", choices=("ddp", "fsdp2", "deepspeed"), help="verify that system instead of hf_zero, in fp32"
    )
    parser.add_argument("--output", default="certificate", metavar="FOLDER", help="(default: certificate)")
    return parser
