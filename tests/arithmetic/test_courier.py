"""Copies between a device and its host come in order, keep what they were given, and take a few buffers in turn."""

import pytest
import torch

from hf_zero.comm.work import Work
from hf_zero.core.courier import AtOnce, BufferedCourier
from hf_zero.core.twins import Snapshot
from tests.support.late_lanes import LateLanes


BUFFER, COUNT = 64, 3  # bytes


def _courier():
    lanes = LateLanes()
    return BufferedCourier(lanes, nbytes=BUFFER, count=COUNT), lanes


def _number(start, numel):
    return torch.arange(start, start + numel, dtype=torch.float32)


@pytest.mark.parametrize("numel", [1, 16, 17, 100])
def test_what_goes_down_is_as_it_was_and_comes_in_order(numel):
    courier, lanes = _courier()
    found = []
    for number in range(5):
        values = _number(1000 * number, numel)
        courier.down(values, lambda at, part, number=number: found.append((number, at, part.clone())))
        values.zero_()  # who has given them uses their memory again
    assert len(found) < 5 * -(-numel // 16), "the last ones are still on their way"
    courier.land()
    for number in range(5):
        parts = [part for which, _, part in found if which == number]
        assert torch.equal(torch.cat(parts), _number(1000 * number, numel))
    assert [(which, at) for which, at, _ in found] == sorted((which, at) for which, at, _ in found)
    assert courier.moved == {"down": 5 * numel * 4}
    assert courier.nbytes == lanes.memory_given == BUFFER * COUNT


def test_what_goes_up_is_cast_by_the_host_and_there_after_join():
    courier, _ = _courier()
    for target in (torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100)):
        source = _number(0, 100)
        courier.up(target, source)
        source.zero_()
        assert target.isnan().any(), "it has not come yet"
        courier.join()
        assert torch.equal(target, _number(0, 100).to(target.dtype))
    assert courier.moved == {"up": 200 + 400}


def test_a_copy_on_the_device_comes_after_what_goes_up():
    courier, _ = _courier()
    near, own = torch.zeros(10), torch.zeros(10)
    courier.up(near, _number(5, 10))
    courier.copy(own, near)
    assert own.isnan().all()
    courier.join()
    assert torch.equal(own, _number(5, 10))
    assert courier.moved == {"up": 40}, "what stays on the device does not count"


def test_a_collective_is_begun_when_what_goes_up_is_there():
    courier, _ = _courier()
    target, seen = torch.zeros(4), []
    courier.up(target, _number(1, 4))

    def begin():
        seen.append(target.clone())
        return Work()

    courier.send(begin).wait()
    assert torch.equal(seen[0], _number(1, 4))


def test_both_ways_share_the_buffers():
    courier, _ = _courier()
    total, target = torch.zeros(16), torch.zeros(16)
    for number in range(7):
        courier.down(_number(number, 16), lambda at, part: total.add_(part))
        courier.up(target, _number(-number, 16))
    courier.land()
    courier.join()
    assert torch.equal(total, sum(_number(number, 16) for number in range(7)))
    assert torch.equal(target, _number(-6, 16))


def test_closing_gives_the_buffers_back_and_takes_nothing_more():
    courier, lanes = _courier()
    courier.down(_number(0, 4), lambda at, part: pytest.fail("nobody wants it any more"))
    courier.close()
    courier.land()
    courier.close()
    assert courier.nbytes == 0 and lanes.closed == 2


def test_where_host_and_device_are_one_bytes_are_counted_and_nothing_is_kept():
    courier, found = AtOnce(), []
    values = _number(0, 4)
    courier.down(values, lambda at, part: found.append(part))
    target = torch.zeros(4, dtype=torch.bfloat16)
    courier.up(target, values)
    assert found[0] is values and torch.equal(target, values.bfloat16())
    assert courier.moved == {"down": 16, "up": 8}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("asked", [None, False])
def test_an_optimizer_of_a_device_takes_the_fast_kernel_on_the_host_where_there_is_one(kind, asked):
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = kind([weight], lr=torch.tensor(0.1) if kind is torch.optim.AdamW else 0.1)
    group = optimizer.param_groups[0]
    group["foreach"] = asked
    seen = []

    class Seen(kind):
        def step(self, closure=None):
            seen.append(self.param_groups[0].get("fused"))
            return super().step(closure)

    optimizer.__class__ = Seen
    weight.grad = torch.ones(8)
    Snapshot.take(optimizer).step(0, weight, on_host=True)
    fast = asked is None and kind is not torch.optim.RMSprop
    assert seen == [True] if fast else seen in ([None], [False]), seen
    assert not torch.equal(weight, torch.ones(8)) and group.get("fused") is not True
