"""The flags of DeepSpeed's launcher that say where to start ranks, as options of `hf-zero launch`."""

import argparse

from hf_zero.errors import ZeroLaunchError


# DeepSpeed's name -> the option of `accelerate launch` that it is (without dashes), its type, its help.
_SAME = {
    "num_nodes": ("num_machines", int, "machines; start this command on each of them"),
    "node_rank": ("machine_rank", int, "which of them this one is"),
    "master_addr": ("main_process_ip", str, "address of machine 0"),
    "master_port": ("main_process_port", int, "a free port of it"),
    "deepspeed_config": ("deepspeed_config_file", str, "DeepSpeed JSON to train by"),
}
_HOSTFILE = (
    "is for DeepSpeed's own launcher, which logs in to other machines. Start one launcher on each machine instead, "
    "under Slurm for example by\n  srun --nodes 2 --ntasks-per-node 1 bash -c 'hf-zero launch --num_gpus 8 "
    "--num_nodes 2 --node_rank $SLURM_NODEID --master_addr $(scontrol show hostnames | head -1) "
    "--master_port 29500 train.py'\n"
    "or by hand, on machine I of 2,\n  torchrun --nnodes 2 --nproc_per_node 8 --node_rank I --master_addr HOST "
    "--master_port 29500 train.py"
)


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the flags to Accelerate's parser; those that mean the same as one of its options share its value."""
    group = parser.add_argument_group("DeepSpeed's launcher", "flags of `deepspeed`, for commands that have them")
    group.add_argument("--num_gpus", type=int, help="ranks on each machine")
    for name, (option, kind, text) in _SAME.items():
        group.add_argument(f"--{name}", dest=option, type=kind, help=text)
    group.add_argument("--include", metavar="localhost:0,1", help="the GPUs of this machine to use")
    group.add_argument("--hostfile", "-H", help="says how to start ranks on several machines without it")


def translate(args: argparse.Namespace) -> argparse.Namespace:
    """Put what DeepSpeed's flags say into the options of Accelerate that they stand for.

    Raises ZeroLaunchError for what cannot be started, and for two sources of one number.
    """
    given = getattr(args, "nondefault", set())
    if args.hostfile is not None:
        raise ZeroLaunchError(f"--hostfile {args.hostfile} {_HOSTFILE}")
    if args.include is not None:
        if given & {"num_gpus", "gpu_ids"}:
            raise ZeroLaunchError("--include names the GPUs: leave out --num_gpus and --gpu_ids")
        args.gpu_ids = _gpus_of(args.include)
        args.num_gpus = len(args.gpu_ids.split(","))
        given.add("gpu_ids")
    if args.num_gpus is not None:
        if "num_processes" in given:
            raise ZeroLaunchError("--num_gpus and --num_processes both say how many ranks to start: keep one of them")
        args.num_processes = args.num_gpus * (args.num_machines or 1)
        given.add("num_processes")
    return args


def _gpus_of(text: str) -> str:
    """ "localhost:0,1" as "0,1"."""
    host, _, gpus = text.partition(":")
    if host not in ("localhost", "127.0.0.1") or not all(number.isdigit() for number in gpus.split(",")):
        raise ZeroLaunchError(
            f"--include {text}: expected GPUs of this machine, such as localhost:0,1; --hostfile says how to start "
            "ranks on others"
        )
    return gpus
