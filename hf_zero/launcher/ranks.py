"""Joins the ranks that a launcher has started, for programs that no library joins for them."""

import os

import torch
import torch.distributed as dist

from hf_zero.comm.process_groups import join_launched
from hf_zero.errors import ZeroLaunchError
from hf_zero.launcher.environment import USE_CPU, has_accelerator, prepare_rank_environment


def join_ranks(backend: str | None = None) -> torch.device:
    """Join them, where that was not done yet, and choose this rank's device; a single process stays alone.

    Raises ZeroLaunchError for a backend that this machine has no device for.
    """
    prepare_rank_environment()
    on_device = has_accelerator() and not os.environ.get(USE_CPU)
    if backend == "nccl" and not on_device:
        raise ZeroLaunchError("backend nccl, but there is no GPU: leave it out, and CPU ranks use gloo")
    device = torch.device("cpu")
    if on_device:
        device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ and not dist.is_initialized():
        join_launched(backend or ("cpu:gloo,cuda:nccl" if on_device else "gloo"))
    return device
