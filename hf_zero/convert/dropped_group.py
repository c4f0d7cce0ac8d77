"""Puts back the optimizer group that DeepSpeed has dropped because nothing in it is trained.

Trainer makes two groups, with weight decay and without it. Of adapters, and wherever norms and biases are frozen, one
of them is empty. DeepSpeed goes on without it, and so does the schedule; whoever resumes has it again.
"""

from __future__ import annotations

import dataclasses
import re

from hf_zero.convert.pickles import load
from hf_zero.convert.source import Group, Source


_TRAINER_STATE, _SCHEDULE = "trainer_state.json", "scheduler.pt"
# The names of parameters that Trainer does not decay.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")


def restored(source: Source) -> Source:
    """The checkpoint with both groups of the Trainer, where it is one of the Trainer's and has a single group."""
    if len(source.groups) != 1 or not (source.folder / _TRAINER_STATE).is_file():
        return source
    group = source.groups[0]
    empty = Group(options={**group.options, "weight_decay": 0.0}, scalars={}, names=[])
    comes_first = all(_UNDECAYED.search(name.lower()) for name in group.names)
    groups = [empty, group] if comes_first else [group, empty]
    schedule, unread = source.schedule, source.unread
    path = source.folder / _SCHEDULE
    if schedule is None and path.is_file():
        schedule, unread = load(path), unread | {_SCHEDULE}
    if schedule is not None:
        schedule = {key: value * 2 if _is_single(value) else value for key, value in schedule.items()}
    return dataclasses.replace(source, groups=groups, schedule=schedule, unread=unread)


def _is_single(value: object) -> bool:
    return isinstance(value, list) and len(value) == 1
