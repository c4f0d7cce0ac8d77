"""``hf-zero config``: shows what a run would use, where each value comes from and what it does."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hf_zero.config import values
from hf_zero.config.consistency import (
    Claim,
    argument_claims,
    check_consistency,
    claim_readings,
    config_claims,
    resolve_auto,
)
from hf_zero.config.documents import Document, load_document
from hf_zero.config.fields import DESCRIPTIONS
from hf_zero.config.layer import Layer
from hf_zero.config.origin import Origin
from hf_zero.config.reader import build, read_document
from hf_zero.config.schema import FIELD_NAMES, ZeroConfig
from hf_zero.errors import ZeroConfigError


# A file with one of these keys holds training arguments (a TRL or HfArgumentParser YAML), not a ZeRO configuration.
_ARGUMENT_MARKS = {"output_dir", "learning_rate", "per_device_train_batch_size", "model_name_or_path", "max_steps"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hf-zero config", description="Show the resolved configuration, or every error in it (exit status 2)."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="Accelerate YAML, DeepSpeed JSON, training YAML")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--keys", action="store_true", help="list every key of every file format and stop")
    parser.add_argument("--world_size", type=int, help="number of ranks (default: num_processes of the YAML)")
    parser.add_argument("--hidden_size", type=int, help="model width, from which auto bucket sizes follow")
    parser.add_argument("--args", nargs=argparse.REMAINDER, default=[], help="the training script's arguments")
    options = parser.parse_args(list(argv))
    if options.keys:
        from hf_zero.config.reference import keys_page

        print(keys_page())
        return 0
    if not options.files:
        parser.error("name at least one file")
    try:
        config = explain(
            options.files, _pairs(options.args), world_size=options.world_size, hidden_size=options.hidden_size
        )
    except ZeroConfigError as error:
        _print_problems(error, as_json=options.json)
        return 2
    _print_json(config) if options.json else _print_table(config)
    return 0


def explain(
    files: Sequence[str],
    arguments: dict[str, Any],
    *,
    world_size: int | None = None,
    hidden_size: int | None = None,
) -> ZeroConfig:
    """The configuration that these files and arguments give together; one error holds every problem."""
    layers: list[Layer] = []
    claims: list[Claim] = []
    training: list[Claim] = []
    problems: list[str] = []
    # DeepSpeed's JSON is stronger than Accelerate's YAML, in whichever order they are named.
    for file in sorted(files, key=lambda name: name.endswith(".json")):
        try:
            document = load_document(file)
            if _ARGUMENT_MARKS & set(document.data):
                training += _file_claims(document)
                continue
            found = read_document(document)
            layers += found
            claims += config_claims(build(found))
            if world_size is None and "num_processes" in document.data:
                world_size = values.to_int(document.data["num_processes"])
        except ZeroConfigError as error:
            problems += error.problems
    try:
        typed = argument_claims(arguments, "command line")
        # The script's own rule: what is typed wins over its training file.
        training = [claim for claim in training if claim.name not in {other.name for other in typed}]
        agreed = check_consistency([*claims, *training, *typed], world_size=world_size)
    except ZeroConfigError as error:
        problems += error.problems
    if problems:
        raise ZeroConfigError(problems)
    return resolve_auto(build(layers), agreed=agreed, world_size=world_size, hidden_size=hidden_size)


def _file_claims(document: Document) -> list[Claim]:
    """Training arguments from a YAML, each with its line."""
    claims = []
    for key, value in document.data.items():
        origin = Origin(label=document.label, file=document.file, line=document.line((key,)), written=key)
        claims += claim_readings(key, value, origin)
    return claims


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--flag`` of a training command; everything else is left alone."""
    found: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[position + 1] if position + 1 < len(words) else "--"
        text = value if equals else ("true" if following.startswith("--") else following)
        found[name.replace("-", "_")] = values.is_true(text) if text.lower() in ("true", "false") else text
    return found


def rows(config: ZeroConfig) -> list[dict[str, Any]]:
    """One row per field: key, value, source, effect."""
    table = []
    for name in FIELD_NAMES:
        origin = config.origins.get(name)
        source = config.where(name)
        if origin is not None and origin.reason is not None:
            source = f"{source} ({origin.reason})" if source != "auto" else origin.reason
        table.append({"key": name, "value": getattr(config, name), "source": source, "does": DESCRIPTIONS[name]})
    return table


def _print_json(config: ZeroConfig) -> None:
    print(json.dumps({"config": rows(config), "notes": list(config.notes)}, indent=2))


def _print_table(config: ZeroConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "source", "what it does here"):
        table.add_column(column, overflow="fold")
    for row in rows(config):
        style = "dim" if row["source"] == "default" else None
        table.add_row(row["key"], str(row["value"]), row["source"], row["does"], style=style)
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no width: keep every row on one line
        console = Console(highlight=False, width=240)
    console.print(table, markup=False)
    for note in config.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _print_problems(error: ZeroConfigError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"problems": list(error.problems)}, indent=2))
    else:
        print(f"hf-zero config: {error}", file=sys.stderr)
