"""A whole verification on all ranks: the audit, runs of stock DDP and of one process, save and resume."""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.verify.audit import Audit, Auditor
from hf_zero.verify.certificate import Certificate, Verdict
from hf_zero.verify.measures import Measure
from hf_zero.verify.runs import compare_runs, resume, train_alone, train_ddp
from hf_zero.verify.systems import Named, System, ZeroSystem
from hf_zero.verify.task import Task


_SHOWN_APART = ("gradient_accumulation_steps", "gradient_clipping")


def verify(
    task: Task, config: ZeroConfig, comm: Communicator, *, model: str, make: Callable[[], System] | None = None
) -> Certificate:
    """Verify hf_zero with `config`, or the system that `make` makes; a collective. The result is rank 0's."""
    make = make or (lambda: ZeroSystem(task, config))
    system = make()
    auditor = Auditor(task, system, config, comm)
    audit = auditor.run()
    verdicts = [Verdict.of(measure, audit.finding) for measure in audit.measures.values()]
    if audit.finding is None:
        verdicts += _whole_runs(task, config, comm, auditor, make)
    clip = audit.limit if math.isfinite(audit.limit) else None
    clipped = "not clipped" if clip is None else f"clipped to a norm of {clip:.4g}"
    return Certificate(
        system=system.name,
        model=model,
        settings={name: getattr(config, name) for name in config.chosen() if name not in _SHOWN_APART},
        ranks=comm.world_size,
        steps=task.steps,
        micro_batches=task.accumulation,
        clip=clip,
        how=f"each step, {clipped}, is compared with plain data parallelism from the same weights on the same data",
        verdicts=verdicts,
        finding=audit.finding,
        losses=audit.losses,
        norms=audit.norms,
    )


def _whole_runs(
    task: Task, config: ZeroConfig, comm: Communicator, auditor: Auditor, make: Callable[[], System]
) -> list[Verdict]:
    system, audit, precision = auditor.system, auditor.audit, config.mixed_precision
    mine, found = system.weights(), []
    rates = task.steps * max(group["lr"] for group in auditor.reference.optimizer.param_groups)
    del auditor.reference
    for promise in ("run of DistributedDataParallel", "run of one process"):
        if precision == "fp16":
            why = "its loss scale is found in other steps by the stock classes"
            found.append(Verdict(promise=promise, verdict="not checked", why=why))
        elif promise.endswith("process"):
            found.append(_beside_one_process(promise, task, comm, audit, mine, rates, precision))
        else:
            run = train_ddp(task, audit, comm, precision)
            measure = compare_runs(promise, audit, mine, run, rates, precision)
            found.append(_worst(measure, comm))
    if isinstance(system, ZeroSystem):
        found.append(_worst(resume(make, system, task, audit.limit, comm), comm))
    else:
        why = "only hf_zero's own checkpoints are verified"
        found.append(Verdict(promise="resume", verdict="not checked", why=why))
    return found


def _beside_one_process(
    promise: str, task: Task, comm: Communicator, audit: Audit, mine: Named, rates: float, precision: str
) -> Verdict:
    states = comm.all_gather_object(audit.random)
    verdict = None
    if comm.rank == 0:
        run = train_alone(task, states, audit.limit, comm.world_size, precision)
        verdict = Verdict.of(compare_runs(promise, audit, mine, run, rates, precision), None)
    return comm.all_gather_object(verdict)[0]


def _worst(measure: Measure, comm: Communicator) -> Verdict:
    """The verdict of the rank with the largest difference; a failure on any rank is one of all."""
    verdicts = comm.all_gather_object(Verdict.of(measure, None))
    order = ("fails", "holds", "holds, bitwise", "not checked")
    return min(verdicts, key=lambda verdict: (order.index(verdict.verdict), -(verdict.largest or 0.0)))
