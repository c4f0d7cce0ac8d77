"""What is done to the log of a step to see what another schedule would take."""

import torch

from benchmarks.schedules import casts_aside, reductions_in_flight
from hf_zero.planning.enqueued import Mark, Move, Wait
from hf_zero.planning.timeline import replay
from hf_zero.tools.operations import Operation
from tests.support.machines import plain_machine


STEP = Mark("step")
MACHINE = plain_machine()


def _operation(seconds, name="add"):
    return Operation(name, 0, int(seconds * 1e9), torch.float32)


def _reduction(seconds):
    return Move("reduce-scatter", "a layer", int(seconds * 1e9), (0, 1), "reductions", "messages")


def _seconds(log):
    return replay([STEP, *log, STEP], MACHINE).seconds


def test_more_reductions_under_way_are_waited_for_later():
    first, second, third = (_reduction(2) for _ in range(3))
    layer = _operation(1)
    log = [layer, first, layer, second, Wait(first), layer, third, Wait(second), Wait(third), Mark("optimizer")]
    assert reductions_in_flight(log, 1) == log
    # 1, then 2 + 2 + 2 one behind the other; the second is waited for from 4 to 5, before the third is launched.
    assert _seconds(reductions_in_flight(log, 1)) == 7
    assert reductions_in_flight(log, 3)[-4:] == [Wait(first), Wait(second), Wait(third), Mark("optimizer")]
    slow = [layer, first, Wait(first), layer, second, Wait(second), Mark("optimizer")]
    assert _seconds(slow) == 6
    assert _seconds(reductions_in_flight(slow, 1)) == 5


def test_casts_beside_the_computation_are_those_right_before_a_collective():
    move = _reduction(1)
    layer, cast, other = _operation(1), _operation(0.25, "_to_copy"), _operation(0.25, "copy_")
    assert casts_aside([cast, layer, cast, other, move, Wait(move)]) == [cast, layer, move, Wait(move)]
