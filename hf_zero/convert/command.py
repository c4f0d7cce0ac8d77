"""``hf-zero convert``: the command line, and what a given folder is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_zero.command_line import CommandParser
from hf_zero.errors import ZeroCheckpointError


def main(argv: Sequence[str]) -> int:
    """0; raises ZeroError and OSError for what cannot be converted."""
    options = _parser().parse_args(argv)
    for line in _run(options.source, options.target, options.config):
        print(line)
    return 0


def _run(source: Path, target: Path, config: Path | None) -> list[str]:
    # torch and transformers take seconds to import: mistakes on the command line are told before.
    if not source.is_dir():
        raise ZeroCheckpointError(f"{source} {'is no folder' if source.exists() else 'does not exist'}")
    from hf_zero.convert import adapters, deepspeed, folder, fsdp, importing, torch_optimizer

    folder.check_target(target)
    if torch_optimizer.find(source):
        written = torch_optimizer.write(source, config, _model, target)
        return [f"read a checkpoint of hf_zero from {source}", f"wrote {target}: {written}"]
    tag = deepspeed.find(source)
    if tag is None and not fsdp.find(source):
        raise ZeroCheckpointError(_unknown(source))
    with_class = not adapters.present(source) and (config is not None or not folder.is_accelerates(source))
    config = folder.find_config(source, config) if with_class else None
    found = deepspeed.read(source, tag) if tag is not None else fsdp.read(source)
    if with_class:
        model = _model(config)
    elif adapters.present(source):
        model = None
    else:
        found, model = importing.without_class(found)
    written = importing.write(found, model, config, target)
    return [f"read {found.what} from {source}", f"wrote {target}: {written}"]


def _model(config: Path):
    """The model that a configuration describes, without values."""
    from hf_zero.planning import model as models

    models.silence()
    return models.build(models.read_config(str(config)))


def _unknown(folder: Path) -> str:
    steps = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    if steps:
        return f"{folder} is a run and not a checkpoint: give one of its folders, {', '.join(steps)}"
    return f"{folder} is no training checkpoint of DeepSpeed, FSDP (sharded) or hf_zero"


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="hf-zero convert",
        description="Import: turn a training checkpoint of DeepSpeed (ZeRO-1, 2, 3) or FSDP (sharded) into one that "
        "hf_zero resumes from, at any stage and number of ranks. Export: turn a checkpoint of hf_zero into one that "
        "the stock Trainer or Accelerator resumes from in one process. What SRC is decides which; it is only read.",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="checkpoint-N, or what save_state or DeepSpeed wrote")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to make; it must not exist")
    parser.add_argument(
        "--config", metavar="FOLDER", type=Path, help="the model's config.json and tokenizer, where SRC has none"
    )
    return parser
