"""``hf-zero plan``: which stage does this model need on these GPUs?"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hf_zero.command_line import CommandParser, positive
from hf_zero.config import ZeroConfig, values
from hf_zero.config.documents import load_document
from hf_zero.errors import ZeroError
from hf_zero.planning.progress import Tell, shown


if TYPE_CHECKING:
    from torch import nn

    from hf_zero.planning.plan import Plan, Request

_DTYPES = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_ADAMS = ("adamw", "adam", "nadam", "radam")
_OPTIMIZERS = (*_ADAMS, "lion", "rmsprop", "adagrad", "sgd", "sgd_momentum", "muon", "adafactor")


def main(argv: Sequence[str]) -> int:
    """0; raises ZeroError for what cannot be planned."""
    options = _parser().parse_args(argv)
    # torch and transformers take seconds to import: mistakes on the command line are told before.
    checked = _checked(options)
    # What is imported stays: searching it for what could go takes a fifth of the imports, and a second at the end.
    gc.disable()
    atexit.register(gc.freeze)
    try:
        return (_time if options.time or options.fastest else _plan)(options, checked)
    finally:
        gc.enable()


def _plan(options: argparse.Namespace, checked: dict[str, Any]) -> int:
    """What stages need."""
    with shown() as tell:
        tell("importing torch and transformers")
        plan = _make_plan(options, checked, tell)
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
    if options.plot:
        report.write_plot(plan, Path(options.plot))
    if options.write:
        report.write_yaml(plan, Path(options.write))
    return 0


def _time(options: argparse.Namespace, checked: dict[str, Any]) -> int:
    """How long steps take on the machine, in place of what they need."""
    with shown() as tell:
        tell("importing torch and transformers")
        from hf_zero.planning import costs, search, step_time, time_report

        machine = costs.read_machine(options.machine)
        machine.check_ranks(options.cpu)
        if options.gpus is None and not options.config:
            checked["gpus"] = machine.ranks_per_node
        if options.gpu_memory is None:
            checked["gpu_memory"] = int(machine.memory)
        request, model = _request(options, checked, tell)
        find = search.fastest if options.fastest else search.compare
        paces = find(model, request, machine, tell)
    if options.json:
        print(time_report.to_json(paces, request, machine))
    else:
        time_report.print_paces(paces, request, machine)
    best = time_report.best_of(paces)
    if best is not None and options.tokens is not None:
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        run = step_time.whole_run(best, request, machine, options.tokens, trained)
        time_report.print_run(run, options.tokens)
    if best is not None and options.timeline:
        best.timeline.write_trace(Path(options.timeline))
    if options.write:
        time_report.write_best(paces, request, Path(options.write))
    return 0


def _check_plot(options: argparse.Namespace) -> None:
    if options.plot is None:
        return
    if options.time or options.fastest:
        raise ZeroError("--plot draws what a plan without --time and --fastest finds: leave it or them out")
    if not options.plot.endswith(".svg"):
        raise ZeroError(f"--plot writes SVG: name the file .svg, not '{options.plot}'")
    if importlib.util.find_spec("matplotlib") is None:
        raise ZeroError("--plot draws with matplotlib: pip install 'hf_zero[plot]', or leave it out")


def _checked(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that need neither torch nor the model. Raises ZeroError for mistakes."""
    _check_path(options.model)
    _check_plot(options)
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
    checked["link"] = None if options.link is None else _bandwidth(options.link)
    if options.link is not None and options.nodes == 1:
        raise ZeroError("--link is the way between nodes, and there is one: say how many with --nodes")
    if options.optimizer not in _OPTIMIZERS and ":" not in options.optimizer:
        raise ZeroError(
            f"--optimizer {options.optimizer}: known are {', '.join(_OPTIMIZERS)}; others are given by their class: "
            "package.module:Class"
        )
    timed = options.time or options.fastest
    if not timed and (options.tokens or options.timeline):
        raise ZeroError("--tokens and --timeline say something about steps in time: add --time or --fastest")
    if options.cpu and (options.offload or checked["host_memory"] or checked["nvme"]):
        raise ZeroError(
            "--cpu: the state of CPU ranks is in host memory already; leave --offload, --host-memory and --nvme out"
        )
    return checked


def _make_plan(options: argparse.Namespace, checked: dict[str, Any], tell: Tell) -> Plan:
    from hf_zero.planning import plan as plans

    request, model = _request(options, checked, tell)
    return plans.make_plan(model, request, tell)


def _request(options: argparse.Namespace, checked: dict[str, Any], tell: Tell) -> tuple[Request, nn.Module]:
    _check_shares(checked["config"], checked["gpus"], checked["nodes"])
    from hf_zero.planning import model as models
    from hf_zero.planning import plan as plans

    request = plans.Request(batch=models.BatchShape(rows=options.micro_batch, length=options.seq_len), **checked)
    lora = models.Lora(rank=options.lora, targets=tuple(options.lora_targets)) if options.lora else None
    tell(f"building {request.name} without values")
    models.silence()
    config = models.read_config(request.name)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and request.batch.length > limit:
        raise models.PlanError(f"--seq-len {request.batch.length}: {request.name} takes at most {limit} tokens")
    model = models.build(config, lora)
    gc.enable()
    return request, model


def _check_path(name: str) -> None:
    """Raise ZeroError for a path that leads nowhere; a name on the hub is left to be looked up."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ZeroError(f"folder '{name}' holds no config.json")
    is_path = name.count("/") > 1 or name.endswith(".json") or name.startswith((".", "~", "/"))
    if is_path and not path.exists():
        raise ZeroError(f"'{name}' does not exist")


def _configuration(options: argparse.Namespace) -> tuple[ZeroConfig, int]:
    """The configuration of the file, if there is one, with the precision asked for; and its number of ranks."""
    config, ranks = ZeroConfig(mixed_precision="bf16"), 8
    if options.config:
        config = ZeroConfig.from_any(options.config)
        ranks = values.to_int(load_document(options.config).data.get("num_processes", ranks))
    settings: dict[str, object] = {"mixed_precision": _DTYPES[options.dtype]} if options.dtype else {}
    settings |= {f"{name}_size": size for name in ("tp", "sp") if (size := getattr(options, name)) is not None}
    config = config.replace(**settings)
    if config.cp_size > 1:
        raise ZeroError(
            f"cp_size is {config.cp_size} ({config.where('cp_size')}): torch's ring attention does not run without a "
            f"device, so it is not planned. Plan with --sp {config.cp_size} and cp_size 1: a rank keeps as much there"
        )
    return config, ranks


def _check_shares(config: ZeroConfig, gpus: int, nodes: int) -> None:
    """Raise ZeroError where the ranks of a node or of all nodes cannot share micro-batches so."""
    if gpus % config.tp_size:
        raise ZeroError(
            f"tp_size is {config.tp_size}, and a node has {gpus} rank(s): the ranks that share layers belong inside "
            f"one node, so let it divide {gpus}"
        )
    if gpus * nodes % config.sp_size:
        raise ZeroError(f"sp_size is {config.sp_size}, which does not divide the {gpus * nodes} ranks")


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


def _bandwidth(text: str) -> int:
    """Bytes per second. Raises ZeroError for what is none: 400Gb/s are bits, and eight times less."""
    name, _, per = text.partition("/")
    bits = name.endswith("b")
    count = values.byte_size(f"{name[:-1]}B" if bits else name)
    if per != "s" or not count:
        raise ZeroError(f"--link {text}: write bytes or bits per second, such as 50GB/s or 400Gb/s")
    return count // 8 if bits else count


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="hf-zero plan",
        rest="--measure",
        description="Predict memory and communication of every ZeRO stage for a model, and recommend one. Nothing is "
        "downloaded but the model's configuration.",
    )
    parser.add_argument("model", metavar="MODEL", help="a local folder, a config.json, or a name on the hub")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpus", type=positive, help="GPUs of a node (default: num_processes of --config, else 8)")
    machine.add_argument("--nodes", type=positive, default=1)
    machine.add_argument(
        "--link",
        metavar="RATE",
        help="bandwidth of one node's way to the others, such as 50GB/s or 400Gb/s: also plans what several nodes can "
        "keep to themselves (see docs/nodes.md), and chooses by what goes over it",
    )
    machine.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one GPU (default: 80GB); with --cpu of one rank (default: its share of this machine's)",
    )
    machine.add_argument(
        "--offload",
        action="store_true",
        help="show what each stage needs with its state in host memory or on disk (not run on a GPU yet)",
    )
    machine.add_argument("--host-memory", metavar="SIZE", help="host memory of one node; shows offload to it")
    machine.add_argument("--nvme", metavar="SIZE", help="free disk of one node; shows offload to it and to the host")
    machine.add_argument("--cpu", action="store_true", help="plan for CPU ranks (gloo) instead of GPUs (NCCL)")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch", type=positive, default=1, metavar="ROWS", help="rows per rank (default: 1)")
    training.add_argument("--seq-len", type=positive, default=2048, metavar="TOKENS", help="(default: 2048)")
    training.add_argument("--gradient-accumulation-steps", type=positive, default=1, metavar="N")
    training.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="plan only with, or only without (default: both)",
    )
    training.add_argument("--dtype", choices=sorted(_DTYPES), help="(default: of --config, else bf16)")
    training.add_argument(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        help=f"{', '.join(_OPTIMIZERS)} (default: adamw), or the class of another as package.module:Class, which is "
        "tried",
    )
    training.add_argument(
        "--tp", type=positive, metavar="N", help="ranks that share layers (default: tp_size of --config, else 1)"
    )
    training.add_argument(
        "--sp", type=positive, metavar="N", help="ranks that share sequences (default: sp_size of --config, else 1)"
    )
    training.add_argument("--lora", type=positive, metavar="RANK", help="train LoRA adapters of this rank only")
    training.add_argument("--lora-targets", nargs="+", default=[], metavar="NAME", help="(default: peft's choice)")
    training.add_argument("--config", metavar="FILE", help="Accelerate YAML or DeepSpeed JSON to plan with")
    time = parser.add_argument_group("time")
    time.add_argument("--time", action="store_true", help="predict how long a step takes, and what it waits for")
    time.add_argument("--fastest", action="store_true", help="the same, with as many rows per micro-batch as fit")
    time.add_argument(
        "--machine",
        default="h100",
        metavar="NAME",
        help="a machine of docs/step_time.md, or a YAML file such as `hf-zero doctor --calibrate FILE` writes "
        "(default: h100)",
    )
    time.add_argument("--tokens", type=float, metavar="N", help="days, GPU-hours and saves of a run on N tokens")
    time.add_argument("--timeline", metavar="FILE", help="write the fastest step for Perfetto or chrome://tracing")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--plot", metavar="FILE.svg", help="draw each stage's peak by kind (needs matplotlib)")
    output.add_argument("--write", metavar="FILE", help="write the recommended stage as an Accelerate YAML")
    output.add_argument(
        "--measure",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="last: run this training script (its arguments follow) and compare what it measures with its plan",
    )
    return parser
