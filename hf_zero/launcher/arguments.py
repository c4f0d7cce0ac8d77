"""Reads an ``accelerate launch`` command: its options, and the configuration that they and its YAML ask for."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero.config.documents import load_document
from hf_zero.config.reader import read_accelerate_dict, read_flat, read_parallelism, read_source
from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroLaunchError
from hf_zero.launcher import deepspeed_flags


# Options of `accelerate launch` that are configuration; the others say where and how to start.
_CONFIG_OPTIONS = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_moe_layer_cls_names",
    "mixed_precision",
)


def parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of ``accelerate launch`` with Accelerate's own parser, and DeepSpeed's flags.

    Raises ZeroLaunchError for flags of DeepSpeed that cannot be carried out.
    """
    from accelerate.commands.launch import launch_command_parser  # imports torch: not at module level

    parser = launch_command_parser()
    parser.prog = "hf-zero launch"
    # Accelerate shows its options for DeepSpeed only beside --use_deepspeed.
    parser.epilog = (
        f"ZeRO: {', '.join(f'--{name}' for name in _CONFIG_OPTIONS)} win over --config_file (an Accelerate YAML), or "
        "--deepspeed_config_file FILE (JSON). `hf-zero config --keys` lists what these files may say."
    )
    deepspeed_flags.declare(parser)
    return deepspeed_flags.translate(parser.parse_args(list(argv)))


def config_file_of(args: argparse.Namespace) -> str | None:
    """The YAML that the command uses: ``--config_file``, else Accelerate's default file where there is one."""
    from accelerate.commands.config.config_args import default_config_file

    if args.config_file is not None:
        return args.config_file
    return default_config_file if os.path.isfile(default_config_file) and not args.cpu else None


def config_of_command(args: argparse.Namespace, folder: str | None = None) -> ZeroConfig:
    """What the command line and its YAML ask for; options win over the file.

    ``folder`` is the folder the command was started in, where that is not the current one.
    """
    given = getattr(args, "nondefault", set())  # Accelerate's parser records there what was really typed
    options = {name: getattr(args, name) for name in _CONFIG_OPTIONS if name in given}
    fsdp = {name: getattr(args, name) for name in vars(args) if name.startswith("fsdp_") and name in given}
    layers = []
    file = config_file_of(args)
    if file is not None:
        layers += read_source(_accelerate_file(resolve_path(file, folder)))
    else:
        layers.append(read_flat({"zero_stage": _default_stage(args, options)}, "command line"))
    if fsdp and args.use_fsdp:
        layers += read_accelerate_dict({"distributed_type": "FSDP", "fsdp_config": fsdp}, "command line")
    parallelism = {name: getattr(args, name) for name in vars(args) if name.startswith("parallelism_config_")}
    layers.append(read_parallelism({name: parallelism[name] for name in parallelism if name in given}, "command line"))
    if "deepspeed_config_file" in given:
        layers += read_source(resolve_path(args.deepspeed_config_file, folder))
    layers.append(read_flat(options, "command line"))
    return ZeroConfig.from_layers(layers)


def _accelerate_file(file: str) -> str:
    if "distributed_type" not in load_document(file).data:
        raise ZeroLaunchError(
            f"{file} is no Accelerate configuration, it has no distributed_type: name a DeepSpeed JSON with "
            "--use_deepspeed --deepspeed_config_file instead of --config_file"
        )
    return file


def _default_stage(args: argparse.Namespace, options: dict[str, Any]) -> int | None:
    """Without a file: DeepSpeed's options mean stage 2, FSDP 3, anything else plain data parallelism."""
    if args.use_fsdp:
        return 3
    deepspeed = args.use_deepspeed or args.deepspeed_config_file is not None or "zero_stage" in options
    return None if deepspeed else 0


def resolve_path(file: str, folder: str | None) -> str:
    path = Path(file).expanduser()
    return file if folder is None or path.is_absolute() else str(Path(folder) / path)
