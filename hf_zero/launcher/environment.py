"""Carries the configuration from the launcher to the ranks, and finds it again there."""

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.config import values
from hf_zero.config.documents import load_document
from hf_zero.config.reader import read_source
from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroConfigError, ZeroError, ZeroLaunchError
from hf_zero.launcher import failures
from hf_zero.launcher.arguments import config_file_of, config_of_command, parse_command, resolve_path


CONFIG_VARIABLE = "HF_ZERO_CONFIG"
FILE_VARIABLE = "HF_ZERO_CONFIG_FILE"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_USE_FSDP = "ACCELERATE_USE_FSDP"
_USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
USE_CPU = "ACCELERATE_USE_CPU"
# torch reads it at its first allocation. Weights that are gathered and released come from the system page by page;
# with huge pages a 64 MB buffer costs 6 ms instead of 31 (measured, torch 2.13 on Linux).
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# Units of unequal sizes come and go between activations: segments that grow leave no holes that nothing fits in.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

# What Accelerate's DeepSpeed launcher exports, and the key each one stands for.
_DEEPSPEED_VARIABLES = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
}
_SHARED_VARIABLES = {ACCUMULATION: "gradient_accumulation_steps", "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping"}
_ANCESTORS = 5  # a rank's parent is the launcher; a shell or a container's init may stand between


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The configuration of this rank, and the source that it came from."""

    config: ZeroConfig
    source: str
    launched: ZeroConfig | None = None  # what the launcher's side alone said, for consistency checks

    def describe(self) -> str:
        count = len(self.config.notes)
        notes = f" ({count} note{'s' if count > 1 else ''}: see `hf-zero config FILE`)" if count else ""
        return f"hf_zero: ZeRO stage {self.config.zero_stage}, configured by {self.source}{notes}"


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The arguments of a process and the folder it was started in."""

    argv: tuple[str, ...]
    folder: str | None = None


def has_accelerator() -> bool:
    """Whether ranks can train on a device other than the CPU (one MPS device cannot serve several ranks)."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


def exported(config: ZeroConfig, *, use_cpu: bool) -> dict[str, str]:
    """The variables that a launcher sets for its ranks."""
    variables = {CONFIG_VARIABLE: config.to_json()}
    if use_cpu:
        variables[USE_CPU] = "true"
        variables[HUGE_PAGES] = os.environ.get(HUGE_PAGES, "1")
    elif not any(name in os.environ for name in _ALLOCATOR):
        variables[_ALLOCATOR[0]] = "expandable_segments:True"
    if not values.is_auto(config.gradient_accumulation_steps):
        variables[ACCUMULATION] = str(config.gradient_accumulation_steps)
    return variables


def prepare_rank_environment(environ: MutableMapping[str, str] | None = None) -> list[str]:
    """Call before Accelerate creates its state; returns one line for each thing that was changed.

    Accelerate must not start DeepSpeed or FSDP for a script that uses hf_zero's classes, and ranks on a machine
    without an accelerator must not train alone: without ``ACCELERATE_USE_CPU`` Accelerate gives each a group of one.
    """
    failures.install()
    environ = os.environ if environ is None else environ
    said = []
    for name, what in (
        (USE_DEEPSPEED, "DeepSpeed"),
        (_USE_FSDP, "FSDP"),
        (_USE_PARALLELISM, "accelerate's ParallelismConfig"),
    ):
        if values.is_true(environ.get(name)):
            del environ[name]
            said.append(f"hf_zero: takes over from {what}, because the script uses hf_zero's classes")
    if "LOCAL_RANK" in environ and USE_CPU not in environ and not has_accelerator():
        environ[USE_CPU] = "true"
        said.append("hf_zero: no accelerator found, the ranks run on CPU with gloo")
    return said


def resolve_from_environment(
    explicit: Any = None,
    *,
    environ: Mapping[str, str] | None = None,
    commands: Iterable[CommandLine] | None = None,
) -> Resolved:
    """Find this rank's configuration.

    ``explicit`` (a ``ZeroConfig``, path or dict) wins key by key over the launcher's side, which is the first of:
    HF_ZERO_CONFIG, HF_ZERO_CONFIG_FILE, ACCELERATE_DEEPSPEED_*, the command line of the launching process.
    """
    environ = os.environ if environ is None else environ
    launched, source = _from_launcher(environ, commands)
    if explicit is None:
        return Resolved(config=launched or ZeroConfig(), source=source or "defaults", launched=launched)
    config = ZeroConfig.from_layers([*read_source(launched), *read_source(explicit)])
    where = f"arguments, then {source}" if launched is not None else "arguments"
    return Resolved(config=config, source=where, launched=launched)


def _from_launcher(
    environ: Mapping[str, str], commands: Iterable[CommandLine] | None
) -> tuple[ZeroConfig | None, str | None]:
    if environ.get(CONFIG_VARIABLE):
        try:
            return ZeroConfig.from_json(environ[CONFIG_VARIABLE]), CONFIG_VARIABLE
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ZeroConfigError):
                raise
            raise ZeroConfigError(
                f"{CONFIG_VARIABLE} holds no configuration that hf-zero launch wrote ({error}): unset it, or name a "
                f"file in {FILE_VARIABLE}"
            ) from None
    if environ.get(FILE_VARIABLE):
        return ZeroConfig.from_any(environ[FILE_VARIABLE]), f"{FILE_VARIABLE}={environ[FILE_VARIABLE]}"
    if any(name in environ for name in _DEEPSPEED_VARIABLES):
        names = {**_DEEPSPEED_VARIABLES, **_SHARED_VARIABLES}
        found = {key: environ[name] for name, key in names.items() if name in environ}
        return ZeroConfig.from_layers(read_source(found, "ACCELERATE_DEEPSPEED_* variables")), "ACCELERATE_DEEPSPEED_*"
    command = _launch_command(ancestors() if commands is None else commands)
    if command is None:
        return None, None
    args, folder = command
    file = config_file_of(args)
    if file is None and not getattr(args, "nondefault", set()) & set(_DEEPSPEED_VARIABLES.values()):
        return None, None
    return config_of_command(args, folder), f"the launcher's command line ({file or 'its options'})"


def ancestors() -> list[CommandLine]:
    """The command lines of the processes above this one, nearest first."""
    import psutil

    found = []
    for process in psutil.Process().parents()[:_ANCESTORS]:
        try:
            found.append(CommandLine(argv=tuple(process.cmdline()), folder=process.cwd()))
        except psutil.Error:  # another user's process, or one that has just ended
            continue
    return found


def launch_arguments(argv: Sequence[str]) -> list[str] | None:
    """What follows ``accelerate launch`` (or hf-zero launch) in a command line; None for any other command."""
    for position, word in enumerate(argv[:4]):  # python [-m] program launch ...
        name = os.path.basename(word).removesuffix(".exe")
        after = list(argv[position + 1 :])
        if name in ("accelerate-launch", "accelerate.commands.launch", "launch.py") and (
            name != "launch.py" or "accelerate" in word
        ):
            return after
        if name in ("accelerate", "hf-zero", "accelerate.commands.accelerate_cli") and after[:1] == ["launch"]:
            return after[1:]
    return None


def _launch_command(commands: Iterable[CommandLine]) -> tuple[Any, str | None] | None:
    for command in commands:
        arguments = launch_arguments(command.argv)
        if arguments is None:
            continue
        try:
            return parse_command(arguments), command.folder
        except SystemExit:  # argparse ends the process on options it does not know; here they mean "not ours"
            continue
    return None


def check_ranks_started(
    environ: Mapping[str, str] | None = None, commands: Iterable[CommandLine] | None = None
) -> None:
    """Raise where the launcher was asked for several ranks and started one that would train alone.

    Stock Accelerate does that for ``distributed_type: MULTI_CPU`` and for ``--cpu``.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ or CONFIG_VARIABLE in environ:
        return
    command = _launch_command(ancestors() if commands is None else commands)
    if command is None:
        return
    args, folder = command
    asked = args.num_processes
    file = config_file_of(args)
    if asked is None and file is not None:
        asked = _processes_in(file, folder)
    if asked is not None and asked > 1:
        raise ZeroLaunchError(
            f"the launcher was asked for {asked} processes and started one, which would train alone: start it with "
            "`hf-zero launch` and the same arguments, or set distributed_type to DEEPSPEED or MULTI_GPU"
        )


def _processes_in(file: str, folder: str | None) -> int | None:
    try:
        return values.to_int(load_document(resolve_path(file, folder)).data.get("num_processes"))
    except (ZeroError, ValueError):
        return None


def lone_process(stage: int) -> str:
    """What to say where a stage above 0 has nobody to share with."""
    return (
        f"hf_zero: one process, so stage {stage} shards nothing. To start more: `hf-zero launch --num_processes N` or "
        "`torchrun --nproc_per_node N`"
    )
