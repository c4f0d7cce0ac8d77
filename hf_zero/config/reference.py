"""Writes docs/configuration.md from the tables that the reader uses: ``python -m hf_zero.config.reference FILE``.

With ``--check`` it only compares, and ends with status 1 where the page is stale.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

from hf_zero.config import values
from hf_zero.config.consistency import Claim, check_consistency
from hf_zero.config.keys import DEEPSPEED_KEYS, Key
from hf_zero.config.keys_accelerate import DEEPSPEED_SECTION_KEYS, FSDP_KEYS, OWN_KEYS, TOP_KEYS
from hf_zero.config.optimizers import OPTIMS
from hf_zero.config.options import OPTIONS, Options
from hf_zero.config.origin import Origin
from hf_zero.errors import ZeroConfigError


_COMMAND = "python -m hf_zero.config.reference docs/configuration.md"

_HEAD = f"""# Configuration

<!-- Written by `{_COMMAND}`; change the tables in hf_zero/config, not this page. -->

A run has one `ZeroConfig`. It is read from what you already have: a DeepSpeed JSON, an Accelerate YAML with a
`deepspeed_config` or `fsdp_config` section, accelerate's plugin objects for DeepSpeed and FSDP, training arguments, or
keyword arguments. Strongest first: explicit arguments, the launcher's environment, DeepSpeed JSON, Accelerate YAML.
Options that only hf_zero has stand in a section `hf_zero` of the JSON, and in `deepspeed_config` beside the others.
Some are `ZeroTrainingArguments`, too, with `zero_` before their names; `zero_config={...}` there takes all.

`hf-zero config zero3.yaml --args --gradient_accumulation_steps 8` prints every value that is set (`--all`: every
value), where it comes from and what it does, or every error with file, line and fix. Behind `--args` stand the
training script's own arguments; one that neither transformers, TRL nor hf_zero knows is an error.

A rank finds its configuration in this order: explicit arguments, `HF_ZERO_CONFIG` (written by the launcher),
`HF_ZERO_CONFIG_FILE` (a path, for `torchrun` and `python`), `ACCELERATE_DEEPSPEED_*`, the launcher's command line.

Sizes may be written as a count of elements (`5e8`) or in bytes (`"25MB"`, `"64MiB"`). An unknown key is an error;
the message suggests the closest known key. In JSON, keys that begin with `_` or `//` are comments.
"""

_ACCUMULATION = """## Gradient accumulation: every combination

`gradient_accumulation_steps` may stand in the Accelerate YAML, in the DeepSpeed JSON and in the training arguments.
`"8"` and `8` are the same, and so are `auto` and a key that is not there. The same rule holds for
`gradient_clipping` (`max_grad_norm`), `train_micro_batch_size_per_gpu` (`per_device_train_batch_size`),
`train_batch_size` and `mixed_precision`.
"""


_OPTIMIZERS = """## Optimizers: every `optim` of TrainingArguments

Any torch optimizer can be given that needs no closure and steps each tensor by itself. Whether it steps slices of
flat tensors or needs whole matrices, which then live on one rank each, is tried when it is attached; the column says
what is expected of it. `tests/integration/test_optims.py` compares the rows that need no package with DDP at stages 2
and 3 on 2 CPU ranks, and the others where their package is installed. They were run with bitsandbytes 0.50.2, torchao
0.18.0, schedulefree 1.4.1, galore-torch 1.0, apollo-torch 1.0.3 and torch-optimi 0.3.3, to losses and weights within
1e-6. Rows of states in 8 or 4 bit are compared without clipping: a norm that is rounded in another order may turn a
code by one, and then weights differ as codes do (by 1e-5 in a small model; with Lion by a sign, which is a whole step
of that element).
"""


def page() -> str:
    """The whole of docs/configuration.md."""
    return "\n".join([_HEAD, _fields(), _OPTIMIZERS, _optimizers(), _ACCUMULATION, _accumulation(), keys_page()])


def _optimizers() -> str:
    lines = ["| `optim` | stepped in | package | what to know |", "| --- | --- | --- | --- |"]
    for name, optim in OPTIMS.items():
        package = f"`{optim.package}`" if optim.package else ""
        lines.append(f"| `{name}` | {optim.stepped.value} | {package} | {optim.note} |")
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """Every key of every file format with its treatment."""
    parts = [
        ("Keys of a DeepSpeed JSON", DEEPSPEED_KEYS),
        ("Keys of `deepspeed_config` in an Accelerate YAML", {**DEEPSPEED_SECTION_KEYS, **OWN_KEYS}),
        ("Keys of `fsdp_config` in an Accelerate YAML", FSDP_KEYS),
        ("Top level of an Accelerate YAML", TOP_KEYS),
    ]
    return "\n".join(f"## {title}\n\n{_keys(table)}" for title, table in parts)


def _keys(table: Mapping[str, Key]) -> str:
    lines = ["| key | treatment | what it means here |", "| --- | --- | --- |"]
    for path, key in table.items():
        lines.append(f"| `{path}` | {key.treatment} | {_meaning(key)} |")
    return "\n".join(lines) + "\n"


def _meaning(key: Key) -> str:
    if key.field is None:
        return key.refusal or key.note or key.doc
    hidden = key.field.startswith("_") or key.field == key.path.rpartition(".")[2] or f"`{key.field}`" in key.doc
    return key.doc if hidden else f"{key.doc} (`{key.field}`)"


def _fields() -> str:
    lines = [
        "## Fields of `ZeroConfig`",
        "",
        "| field | default | values | what it does |",
        "| --- | --- | --- | --- |",
    ]
    for name, option in OPTIONS.items():
        default = Options.default(name)
        shown = f"{default:g}" if isinstance(default, (int, float)) and not isinstance(default, bool) else default
        lines.append(f"| `{name}` | `{shown}` | {option.kind.shown} | {option.help} |")
    return "\n".join(lines) + "\n"


def accumulation_outcome(yaml: object, json: object, args: object) -> int | str:
    """The steps that result, "conflict" where sources differ, or "default" where nobody says anything."""
    sources = (("YAML", yaml), ("JSON", json), ("args", args))
    claims = [
        Claim(name="gradient_accumulation_steps", value=values.to_int(value), origin=Origin(label=label))
        for label, value in sources
        if value is not None and not values.is_auto(value)
    ]
    try:
        agreed = check_consistency(claims)
    except ZeroConfigError:
        return "conflict"
    return agreed["gradient_accumulation_steps"].value if agreed else "default"


def _accumulation() -> str:
    lines = ["| YAML | JSON | arguments | outcome |", "| --- | --- | --- | --- |"]
    for yaml, json, args in itertools.product((values.AUTO, 8, 4), repeat=3):
        outcome = accumulation_outcome(yaml, json, args)
        text = {"conflict": "error that names both places", "default": "1"}.get(str(outcome), str(outcome))
        lines.append(f"| {yaml} | {json} | {args} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the configuration page.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wanted = page()
    if not options.check:
        options.file.write_text(wanted, encoding="utf-8")
        return 0
    if options.file.is_file() and options.file.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{options.file} is stale: run `{_COMMAND}`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
