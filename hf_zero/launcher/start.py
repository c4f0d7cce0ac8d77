"""Starts the ranks of a run: behind ``hf-zero launch``, and behind the literal ``accelerate launch`` of a ZeRO YAML.

Both ways end in ``launch_ranks``, which reads the configuration, exports it, and hands over to Accelerate's
torchrun launcher. DeepSpeed is never imported and its variables never reach the ranks.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from hf_zero.config.schema import ZeroConfig
from hf_zero.errors import ZeroError, ZeroLaunchError
from hf_zero.launcher import failures
from hf_zero.launcher.arguments import config_file_of, config_of_command, parse_command
from hf_zero.launcher.environment import USE_DEEPSPEED, exported, has_accelerator


def main(argv: Sequence[str], change: Callable[[ZeroConfig], ZeroConfig] | None = None) -> int:
    """``hf-zero launch``: every option of ``accelerate launch``. Ranks are given what `change` makes of its file.

    Raises ZeroError and OSError for what cannot be started.
    """
    from accelerate.commands.launch import _validate_launch_command

    try:
        args = parse_command(argv)
        config = config_of_command(args)  # before Accelerate reads the file: our messages name lines
        config = config if change is None else change(config)
        _resolve_processes(args)
        _fill_in(args)
        args.use_parallelism_config = False  # Accelerate knows it with FSDP only; `config` has it
        args, _, _ = _validate_launch_command(args)
    except ZeroError:
        raise
    except ValueError as error:  # a message of Accelerate's
        raise ZeroLaunchError(str(error)) from error
    return launch_ranks(args, config)


def launch_from_accelerate(args: argparse.Namespace, reason: str) -> None:
    """Stands in for a launcher of Accelerate, and says why."""
    try:
        config = config_of_command(args)
        _check_machines(args)
    except ZeroError as error:
        if failures.wants_traceback():
            raise
        print(f"hf_zero: {error}", file=sys.stderr)
        raise SystemExit(failures.STATUS) from None
    print(
        f"hf_zero: {reason}, hf_zero runs this ZeRO stage {config.zero_stage} job itself "
        "(HF_ZERO_LAUNCH_HOOK=0 switches this off)",
        flush=True,
    )
    status = launch_ranks(args, config)
    if status:
        raise SystemExit(status)


def launch_ranks(args: argparse.Namespace, config: ZeroConfig) -> int:
    """Start the ranks that validated ``args`` ask for, with ``config`` in their environment.

    Waits for their end, says in a line why they ended if they failed, and returns the exit status.
    """
    from accelerate.commands.launch import multi_gpu_launcher
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _check_foreign(args)
    _check_machines(args)
    use_cpu = bool(args.cpu or getattr(args, "use_cpu", False)) or not has_accelerator()
    if use_cpu:
        _share_cores(args)
    if config.is_set("mixed_precision"):
        args.mixed_precision = config.mixed_precision
    # Accelerate's launcher picks its path from these; the ranks are plain torchrun ranks.
    args.multi_gpu, args.use_deepspeed, args.use_fsdp, args.use_parallelism_config = True, False, False, False
    os.environ.pop(USE_DEEPSPEED, None)
    _put_in_front(args)
    try:
        with patch_environment(**exported(config, use_cpu=use_cpu)):
            multi_gpu_launcher(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"hf_zero: rank {rank} {_how_it_ended(failure.exitcode)}", file=sys.stderr)
        return failures.STATUS if failure.exitcode == failures.STATUS else 1
    except (SignalException, KeyboardInterrupt) as error:
        number = getattr(error, "sigval", signal.SIGINT)
        print(f"hf_zero: ended by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number
    return 0


def _put_in_front(args: argparse.Namespace) -> None:
    """Have each rank run the script by `hf_zero.run`, which has stock classes made ours before its first line."""
    if not args.no_python:
        script = ["-m", args.training_script] if args.module else [args.training_script]
        args.training_script_args = [*script, *args.training_script_args]
        args.training_script, args.module = "hf_zero.run", True


def _how_it_ended(status: int) -> str:
    """The exit status of a process in words, as `subprocess` gives it: negative for a signal."""
    if status >= 0:
        return f"ended with exit status {status}, and the others were stopped: look above for its message"
    name = signal.Signals(-status).name
    reason = "; the system kills processes when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}, and the others were stopped{reason}"


def _resolve_processes(args: argparse.Namespace) -> None:
    """Without a file and without --num_processes: one rank per accelerator of this machine, or one on the CPU."""
    import torch

    if config_file_of(args) is None:
        if args.num_processes is None:
            on_cpu = args.cpu or not has_accelerator()
            args.num_processes = 1 if on_cpu else torch.accelerator.device_count()
        if not (args.cpu or args.tpu or args.use_deepspeed or args.use_fsdp):
            args.multi_gpu = args.num_processes > 1
    if args.multi_gpu and args.num_processes == 1:
        args.multi_gpu = False  # Accelerate refuses the pair; one rank needs no flag


def _fill_in(args: argparse.Namespace) -> None:
    """Say what Accelerate would otherwise take as a default, with a warning of several lines for every run."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    defaults = {"num_cpu_threads_per_process": threads}
    if config_file_of(args) is None:
        defaults |= {"num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _check_foreign(args: argparse.Namespace) -> None:
    for name, what in (("tpu", "TPU"), ("use_megatron_lm", "Megatron-LM")):
        if getattr(args, name, False):
            raise ZeroLaunchError(f"{what} runs are not hf_zero runs: start them with `accelerate launch`")
    if getattr(args, "mpirun_hostfile", None):
        raise ZeroLaunchError(
            "mpirun_hostfile is set: ranks are started by torchrun, one launcher per machine; remove it and set "
            "num_machines, machine_rank and main_process_ip"
        )


def _check_machines(args: argparse.Namespace) -> None:
    """One machine: any free port unless one is named. Several: everything that the ranks need to meet."""
    machines = args.num_machines or 1
    args.num_machines = machines
    processes = args.num_processes
    if processes is None or processes < 1:
        raise ZeroLaunchError(f"num_processes is {processes}: expected at least 1")
    if machines == 1:
        if not args.main_process_port:
            # torchrun in standalone mode binds the port itself, so no other process can take it in between.
            args.main_process_port, args.standalone = 0, True
        return
    foreign = args.deepspeed_multinode_launcher
    if foreign not in (None, "standard"):
        raise ZeroLaunchError(
            f"deepspeed_multinode_launcher is {foreign!r}: DeepSpeed's launchers are not available; set it to "
            "'standard' and run this command once on each machine with its own --machine_rank"
        )
    missing = [name for name in ("main_process_ip", "main_process_port") if not getattr(args, name)]
    if args.machine_rank is None:
        missing.append("machine_rank")
    if missing:
        raise ZeroLaunchError(
            f"num_machines is {machines} but {' and '.join(missing)} not set: every machine must name the same "
            "--main_process_ip and --main_process_port, and its own --machine_rank"
        )
    if not 0 <= int(args.machine_rank) < machines:
        raise ZeroLaunchError(f"machine_rank is {args.machine_rank}: expected 0 to {machines - 1}")
    if processes % machines:
        raise ZeroLaunchError(
            f"num_processes is {processes}, which is no multiple of num_machines {machines}: num_processes counts "
            "the ranks of all machines together"
        )


def _share_cores(args: argparse.Namespace) -> None:
    """Split the cores over the CPU ranks of this machine, unless the user has decided."""
    if "num_cpu_threads_per_process" in getattr(args, "nondefault", set()) or "OMP_NUM_THREADS" in os.environ:
        return
    local_ranks = max(1, args.num_processes // args.num_machines)
    args.num_cpu_threads_per_process = max(1, (os.cpu_count() or 1) // local_ranks)
