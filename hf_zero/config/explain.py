"""``hf-zero config``: shows what a run would use, where each value comes from and what it does."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hf_zero.command_line import CommandParser, wide_console
from hf_zero.config import values
from hf_zero.config.arguments import pairs, read_arguments, unknown_arguments
from hf_zero.config.consistency import Claim, check_consistency, config_claims, resolve_auto
from hf_zero.config.documents import Document, load_document
from hf_zero.config.layer import Layer
from hf_zero.config.options import OPTIONS
from hf_zero.config.origin import Origin
from hf_zero.config.reader import read_document
from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroConfigError


if TYPE_CHECKING:
    from rich.console import Console  # slow to import

# A file with one of these keys holds training arguments (a TRL or HfArgumentParser YAML), not a ZeRO configuration.
_ARGUMENT_MARKS = {"output_dir", "learning_rate", "per_device_train_batch_size", "model_name_or_path", "max_steps"}
_TYPED = "command line"
_WIDE = 150  # columns of a terminal that has room for a table of four columns


# What tells over which ranks so many of them, on so many machines, share state out: rows of text by column.
Extents = Callable[[ZeroConfig, int, int], list[dict[str, str]]]


def main(argv: Sequence[str], extents: Extents) -> int:
    parser = CommandParser(
        prog="hf-zero config",
        rest="--args",
        description="Show the configuration that results, or every error in it (exit status 2).",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="Accelerate YAML, DeepSpeed JSON, training YAML")
    parser.add_argument("--all", action="store_true", help="show the settings that nobody has set, too")
    parser.add_argument("--json", action="store_true", help="print JSON (of all settings) instead of a table")
    parser.add_argument("--keys", action="store_true", help="list every key of every file format and stop")
    parser.add_argument("--world-size", type=int, help="number of ranks (default: num_processes of the YAML)")
    parser.add_argument("--hidden-size", type=int, help="model width, from which auto bucket sizes follow")
    parser.add_argument(
        "--args", nargs=argparse.REMAINDER, default=[], help="last: the training script's arguments, as it takes them"
    )
    options = parser.parse_args(argv)
    if options.keys:
        from hf_zero.config.reference import keys_page

        print(keys_page())
        return 0
    if not options.files:
        parser.error("name at least one file")
    try:
        config = explain(
            options.files, pairs(options.args), world_size=options.world_size, hidden_size=options.hidden_size
        )
        ranks, machines = _launched(options.files)
        ranks = options.world_size or ranks
        shared = extents(config, ranks, machines) if ranks > 1 else []
    except ZeroConfigError as error:
        _print_problems(error, as_json=options.json)
        return 2
    _print_json(config, shared) if options.json else _print_table(config, options.all, shared)
    return 0


def _launched(files: Sequence[str]) -> tuple[int, int]:
    """How many ranks on how many machines the launcher's file among these names; 0 and 1 where none does."""
    ranks, machines = 0, 1
    for data in (load_document(file).data for file in files):
        ranks = values.to_int(data.get("num_processes", ranks))
        machines = values.to_int(data.get("num_machines", machines))
    return ranks, machines


def explain(
    files: Sequence[str],
    arguments: dict[str, Any],
    *,
    world_size: int | None = None,
    hidden_size: int | None = None,
) -> ZeroConfig:
    """The configuration that these files and arguments give together; one error holds every problem.

    `--config FILE` among the arguments names one more file, as TRL's scripts take it.
    """
    arguments = dict(arguments)
    files = [*files, arguments.pop("config")] if "config" in arguments else files
    layers: list[Layer] = []
    claims: list[Claim] = []
    training: dict[str, tuple[Any, Origin]] = {}
    problems: list[str] = []
    # DeepSpeed's JSON is stronger than Accelerate's YAML, in whichever order they are named.
    for file in sorted(files, key=lambda name: name.endswith(".json")):
        try:
            document = load_document(file)
            if _ARGUMENT_MARKS & set(document.data):
                training |= _in_file(document)
                layers.append(Layer(notes=list(document.notes)))
                continue
            found = read_document(document)
            layers += found
            claims += config_claims(ZeroConfig.from_layers(found))
            if world_size is None and "num_processes" in document.data:
                world_size = values.to_int(document.data["num_processes"])
        except ZeroConfigError as error:
            problems += error.problems
    problems += unknown_arguments(arguments, _TYPED)
    # The script's own rule: what is typed wins over its training file.
    training |= {name: (value, Origin(label=_TYPED, written=name)) for name, value in arguments.items()}
    found, said, faults = read_arguments(
        {name: value for name, (value, _) in training.items()}, lambda name: training[name][1]
    )
    layers += found
    problems += faults
    try:
        agreed = check_consistency([*claims, *said], world_size=world_size)
    except ZeroConfigError as error:
        problems += error.problems
    if problems:
        raise ZeroConfigError(problems)
    return resolve_auto(ZeroConfig.from_layers(layers), agreed=agreed, world_size=world_size, hidden_size=hidden_size)


def _in_file(document: Document) -> dict[str, tuple[Any, Origin]]:
    """Training arguments from a YAML, each with its line."""
    return {
        key: (value, Origin(label=document.label, file=document.file, line=document.line((key,)), written=key))
        for key, value in document.data.items()
    }


def rows(config: ZeroConfig) -> list[dict[str, Any]]:
    """One row per field: key, value, source, effect."""
    table = []
    for name, option in OPTIONS.items():
        origin = config.origins.get(name)
        source = config.where(name)
        if origin is not None and origin.reason is not None:
            source = f"{source} ({origin.reason})" if source != "auto" else origin.reason
        table.append({"key": name, "value": getattr(config, name), "source": source, "does": option.help})
    return table


def _print_json(config: ZeroConfig, shared: list[dict[str, str]]) -> None:
    print(json.dumps({"config": rows(config), "extents": shared, "notes": list(config.notes)}, indent=2))


def _print_table(config: ZeroConfig, everything: bool, shared: list[dict[str, str]]) -> None:
    console = wide_console(1000)
    print_table(config, everything, console)
    if shared:
        from rich.table import Table

        table = Table(*shared[0], box=None, pad_edge=False)
        for row in shared:
            table.add_row(*row.values())
        console.print()
        console.print(table, markup=False)


def print_table(config: ZeroConfig, everything: bool, console: "Console") -> None:
    """Print the settings that somebody has set, or `everything`, as wide as a rich console is; then the notes."""
    from rich.table import Table
    from rich.text import Text

    shown = [row for row in rows(config) if everything or was_set(config, row["key"])]
    wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for column in ("value", "source", "what it does here") if wide else ("value, source, and what it does here",):
        table.add_column(column, overflow="fold")
    for row in shown:
        style = None if was_set(config, row["key"]) else "dim"
        cells = [str(row["value"]), row["source"], row["does"]]
        if not wide:
            cells = [Text.assemble(f"{cells[0]}, {cells[1]}\n", (cells[2], "dim"))]
        table.add_row(row["key"], *cells, style=style)
    console.print(table, markup=False)
    hidden = len(OPTIONS) - len(shown)
    if hidden:
        console.print(f"{hidden} more settings that nobody has set: --all shows them", markup=False)
    for note in config.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def was_set(config: ZeroConfig, name: str) -> bool:
    """Whether a file or an argument names the setting; what only follows from others has no place of its own."""
    return config.is_set(name) and config.origins[name].label != values.AUTO


def _print_problems(error: ZeroConfigError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"problems": list(error.problems)}, indent=2))
    else:
        print(f"hf-zero config: {error}", file=sys.stderr)
