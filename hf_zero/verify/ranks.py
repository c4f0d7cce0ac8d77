"""What each rank of ``hf-zero verify`` runs."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import torch
import transformers

from hf_zero.comm.communicator import Communicator
from hf_zero.config.consistency import resolve_auto
from hf_zero.errors import ZeroConfigError
from hf_zero.launcher.environment import resolve_from_environment
from hf_zero.launcher.ranks import join_ranks
from hf_zero.verify.command import OPTIONS_VARIABLE
from hf_zero.verify.foreign import SYSTEMS
from hf_zero.verify.runs import check_room
from hf_zero.verify.sample import make_task
from hf_zero.verify.verify import verify


def main() -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = json.loads(os.environ[OPTIONS_VARIABLE])
    device = join_ranks()
    comm = Communicator.connect(device=device)
    given = resolve_from_environment().config
    for name in ("tp_size", "sp_size", "cp_size"):
        if getattr(given, name) > 1:
            raise ZeroConfigError(
                f"{name} is {getattr(given, name)} ({given.where(name)}): verify compares ranks with batches of their "
                "own here; set it to 1, or verify a script"
            )
    task = make_task(options["model"], given, device, steps=options["steps"], seed=options["seed"])
    check_room(task.numel, device, comm)
    config = resolve_auto(given, world_size=comm.world_size, hidden_size=task.width)
    torch.manual_seed(options["seed"] + comm.rank)  # dropout differs between ranks, as it does in training
    make = None
    if options["against"] is not None:
        make = functools.partial(SYSTEMS[options["against"]], task, config)
    found = verify(task, config, comm, model=options["model"] or "the sample model", make=make)
    if comm.rank == 0:
        found.write(Path(options["output"]))
        Path(options["report"]).write_text(json.dumps({"holds": found.holds}))
        print("\n".join([*found.lines(), f"written to {options['output']}"]), flush=True)
    comm.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
