"""``hf-zero plan``: which stage does this model need on these GPUs?"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

from hf_zero.command_line import CommandParser
from hf_zero.config import ZeroConfig, values
from hf_zero.config.documents import load_document
from hf_zero.errors import ZeroError


if TYPE_CHECKING:
    from hf_zero.planning.plan import Plan, Request

_DTYPES = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_OPTIMIZERS = ("adamw", "adam", "nadam", "radam", "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except ZeroError as error:
        print(f"hf-zero plan: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    # torch and transformers take seconds to import: mistakes on the command line are told before.
    checked = _checked(options)
    with Console(stderr=True).status("importing torch and transformers") as status:
        plan = _make_plan(options, checked, status.update)
    from hf_zero.planning import report

    measured = None
    if options.measure:
        from hf_zero.planning.measure import measure

        measured = measure(options.measure, config=options.config, ranks=plan.request.world_size)
    if options.json:
        print(report.to_json(plan, measured))
    else:
        report.print_table(plan)
        if measured is not None:
            print(measured)
    if options.write:
        report.write_yaml(plan, Path(options.write))
    return 0


def _checked(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that need neither torch nor the model. Raises ZeroError for mistakes."""
    _check_path(options.model)
    config, ranks = _configuration(options)
    gpus = options.gpus or max(1, ranks // options.nodes)
    checked = {
        "name": options.model,
        "config": config,
        "gpus": gpus,
        "nodes": options.nodes,
        "gpu_memory": _memory(options, gpus),
        "accumulation": options.gradient_accumulation_steps,
        "optimizer": options.optimizer,
        "backend": "gloo" if options.cpu else "nccl",
        "checkpointing": options.gradient_checkpointing,
        "offload": options.offload,
        "shares_host": options.cpu and options.gpu_memory is None,
    }
    for name, option in (("host_memory", "--host-memory"), ("nvme", "--nvme")):
        text = getattr(options, name)
        checked[name] = None if text is None else _bytes(option, text)
    if options.cpu and (options.offload or checked["host_memory"] or checked["nvme"]):
        raise ZeroError(
            "--cpu: the state of CPU ranks is in host memory already; leave --offload, --host-memory and --nvme out"
        )
    return checked


def _make_plan(options: argparse.Namespace, checked: dict[str, Any], tell: Callable[[str], object]) -> Plan:
    from hf_zero.planning import model as models
    from hf_zero.planning import plan as plans

    batch = models.BatchShape(rows=options.micro_batch, length=options.seq_len)
    request = plans.Request(batch=batch, **checked)
    lora = models.Lora(rank=options.lora, targets=tuple(options.lora_targets)) if options.lora else None
    tell(f"building {request.name} without values")
    return plans.make_plan(_build(request, lora), request, tell)


def _check_path(name: str) -> None:
    """Raise ZeroError for a path that leads nowhere; a name on the hub is left to be looked up."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ZeroError(f"folder '{name}' holds no config.json")
    is_path = name.count("/") > 1 or name.endswith(".json") or name.startswith((".", "~", "/"))
    if is_path and not path.exists():
        raise ZeroError(f"'{name}' does not exist")


def _build(request: Request, lora):
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    from hf_zero.planning import model as models

    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # its retries; the error says it in one line
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    config = models.read_config(request.name)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and request.batch.length > limit:
        raise models.PlanError(f"--seq-len {request.batch.length}: {request.name} takes at most {limit} tokens")
    return models.build(config, lora)


def _configuration(options: argparse.Namespace) -> tuple[ZeroConfig, int]:
    """The configuration of the file, if there is one, with the precision asked for; and its number of ranks."""
    config, ranks = ZeroConfig(mixed_precision="bf16"), 8
    if options.config:
        config = ZeroConfig.from_any(options.config)
        ranks = values.to_int(load_document(options.config).data.get("num_processes", ranks))
    if options.dtype:
        config = config.replace(mixed_precision=_DTYPES[options.dtype])
    return config, ranks


def _memory(options: argparse.Namespace, ranks: int) -> int:
    """The bytes of one rank: of its GPU, or its share of this machine's memory."""
    if options.gpu_memory is None and options.cpu:
        return psutil.virtual_memory().total // ranks
    return _bytes("--gpu-memory", options.gpu_memory or "80GB")


def _bytes(option: str, text: str) -> int:
    count = values.byte_size(text if not text.replace(".", "", 1).isdigit() else f"{text}GB")
    if not count:
        raise ZeroError(f"{option} {text}: write a size such as 80GB or 40GiB")
    return count


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="hf-zero plan",
        rest="--measure",
        description="Predict memory and communication of every ZeRO stage for a model, and recommend one. Nothing is "
        "downloaded but the model's configuration.",
    )
    parser.add_argument("model", metavar="MODEL", help="a local folder, a config.json, or a name on the hub")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpus", type=_positive, help="GPUs of a node (default: num_processes of --config, else 8)")
    machine.add_argument("--nodes", type=_positive, default=1)
    machine.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one GPU (default: 80GB); with --cpu of one rank (default: its share of this machine's)",
    )
    machine.add_argument(
        "--offload",
        action="store_true",
        help="show what each stage would need with its state in host memory or on disk (predicted: this version does "
        "not offload)",
    )
    machine.add_argument("--host-memory", metavar="SIZE", help="host memory of one node; shows offload to it")
    machine.add_argument("--nvme", metavar="SIZE", help="free disk of one node; shows offload to it and to the host")
    machine.add_argument("--cpu", action="store_true", help="plan for CPU ranks (gloo) instead of GPUs (NCCL)")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--micro-batch", type=_positive, default=1, metavar="ROWS", help="rows per rank (default: 1)"
    )
    training.add_argument("--seq-len", type=_positive, default=2048, metavar="TOKENS", help="(default: 2048)")
    training.add_argument("--gradient-accumulation-steps", type=_positive, default=1, metavar="N")
    training.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="plan only with, or only without (default: both)",
    )
    training.add_argument("--dtype", choices=sorted(_DTYPES), help="(default: of --config, else bf16)")
    training.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw")
    training.add_argument("--lora", type=_positive, metavar="RANK", help="train LoRA adapters of this rank only")
    training.add_argument("--lora-targets", nargs="+", default=[], metavar="NAME", help="(default: peft's choice)")
    training.add_argument("--config", metavar="FILE", help="Accelerate YAML or DeepSpeed JSON to plan with")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--write", metavar="FILE", help="write the recommended stage as an Accelerate YAML")
    output.add_argument(
        "--measure",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="last: run this training script (its arguments follow) and compare what it measures with its plan",
    )
    return parser
