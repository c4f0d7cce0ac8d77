"""Tensors that rest on disk are what they would be in memory, whenever and in whatever order they are opened."""

import errno
import gc
import multiprocessing
import os
import random
import threading
import time

import pytest
import torch

from hf_zero.core.direct_file import PAGE, DirectFile, whole_pages
from hf_zero.core.disk_home import DiskHome
from hf_zero.errors import ZeroRuntimeError


NUMEL = 3 * PAGE + 5  # of fp32: pages of which the last is not full
PAGES = whole_pages(4 * NUMEL)


class LateFile(DirectFile):
    """Requests take a while; what is to be read is poisoned first. Memory or bytes used too early show."""

    def __init__(self, *args, seed=0, **kwargs):
        super().__init__(*args, **kwargs)
        self._random = random.Random(seed)

    def _begin(self, kind, call, *args):
        pause = self._random.random() / 500

        def late(descriptor, memory, position):
            if kind == "read":
                memory[:] = b"\xff" * len(memory)
            time.sleep(pause)
            return call(descriptor, memory, position)

        return super()._begin(kind, late, *args)


@pytest.fixture
def home(tmp_path):
    home = DiskHome(LateFile(tmp_path, request=4 * PAGE, in_flight=3), buffers=3)
    yield home
    home.close()


def leaf(seed, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_at_rest_a_tensor_is_a_shell_and_open_it_is_itself(home):
    weight = leaf(0)
    values = weight.detach().clone()
    shelf = home.shelf(NUMEL, {"weight": weight})
    assert shelf.flats["weight"] is weight and weight.is_leaf and weight.requires_grad
    for _ in range(2):
        assert weight.shape == (NUMEL,) and weight.untyped_storage().nbytes() == 4
        assert weight.isnan().all()
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            weight.add_(1)
        weight.grad = torch.ones(NUMEL)
        with shelf.open() as flats:
            assert flats["weight"] is weight
            torch.testing.assert_close(weight.detach(), values, rtol=0, atol=0)
            assert weight.grad.sum() == NUMEL


def test_only_what_is_opened_for_writing_is_kept(home):
    weight = leaf(0)
    shelf = home.shelf(NUMEL, {"weight": weight})
    with shelf.open(write=True):
        weight.data.fill_(2)
    with shelf.open():
        weight.data.fill_(3)
    for other in range(3):  # take its slot away
        home.shelf(NUMEL, {"weight": leaf(other)})
    with shelf.open():
        assert (weight == 2).all()


def test_an_optimizer_steps_what_is_open_and_its_states_rest_with_it(home):
    weight, plain = leaf(1), leaf(1)
    shelf = home.shelf(NUMEL, {"weight": weight})
    optimizers = [torch.optim.AdamW([tensor], lr=0.1, fused=True) for tensor in (weight, plain)]
    for step in range(3):
        weight.grad, plain.grad = (torch.full((NUMEL,), 0.1 * (step + 1)) for _ in range(2))
        with torch.inference_mode(step == 1), torch.inference_mode(False), shelf.open(write=True) as flats:
            for optimizer in optimizers:
                optimizer.step()
            for kind, value in optimizers[0].state[weight].items():
                if value.shape == weight.shape and value is not flats.get(kind):
                    assert step == 0
                    shelf.add(kind, value)
        state = optimizers[0].state[weight]
        assert set(shelf.flats) == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(
            shelf.flats[kind] is state[kind] and state[kind].isnan().all() for kind in ("exp_avg", "exp_avg_sq")
        )
    with shelf.open():
        assert torch.equal(weight, plain)
        assert all(torch.equal(state[kind], optimizers[1].state[plain][kind]) for kind in state)


def test_bytes_are_counted_to_the_page(home):
    shelf = home.shelf(NUMEL, {"weight": leaf(0)})
    with shelf.open(write=True):
        shelf.add("exp_avg", torch.zeros(NUMEL, dtype=torch.bfloat16))
    small = whole_pages(2 * NUMEL)
    assert home.file.nbytes == PAGES + small
    for other in range(3):
        home.shelf(NUMEL, {"weight": leaf(other)})._written.wait()
    before = home.file.moved.copy()
    with shelf.open(kinds=["exp_avg"]) as flats:
        assert (flats["exp_avg"] == 0).all() and flats["weight"].isnan().all()
        with shelf.open(write=True, kinds=["weight"]):
            assert not flats["weight"].isnan().any()
    with shelf.open(write=True):
        pass  # both are still in the slot
    home.close()
    assert home.file.moved["read"] - before["read"] == small + PAGES
    assert home.file.moved["write"] - before["write"] == PAGES + small + PAGES


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_opening_gives_what_memory_would(tmp_path, seed):
    """Shelves of different sizes, reads begun ahead or not, nested, few slots, slow disk."""
    choose = random.Random(seed)
    home = DiskHome(LateFile(tmp_path, seed=seed, request=2 * PAGE, in_flight=choose.choice([1, 4])), buffers=3)
    sizes = [choose.choice([1, 7, 2000, NUMEL, 3 * NUMEL]) for _ in range(8)]
    plain = [leaf(number, size).detach().clone() for number, size in enumerate(sizes)]
    shelves = [home.shelf(size, {"weight": leaf(number, size)}) for number, size in enumerate(sizes)]

    def visit(depth):
        number = choose.randrange(len(shelves))
        for ahead in range(choose.randrange(4)):
            shelves[(number + ahead) % len(shelves)].begin_fetch()
        writes, nests = choose.random() < 0.7, depth and choose.random() < 0.5
        with shelves[number].open(write=writes) as flats:
            assert torch.equal(flats["weight"].detach(), plain[number]), (number, depth)
            if writes:
                factor = choose.random()
                flats["weight"].data.mul_(factor)
                plain[number].mul_(factor)
            if nests:
                visit(depth - 1)
            assert torch.equal(flats["weight"].detach(), plain[number]), (number, depth)

    for _ in range(40):
        visit(depth=4)
    for shelf, values in zip(shelves, plain, strict=True):
        with shelf.open() as flats:
            assert torch.equal(flats["weight"].detach(), values)
    assert len(home.slots._slots) <= 3, "more slots are kept than were asked for"
    home.close()


def test_reads_go_on_ahead_of_what_is_opened(home):
    """Three slots for six shelves: when one is closed, its slot is for the next that is wanted."""
    shelves = [home.shelf(NUMEL, {"weight": leaf(number)}) for number in range(6)]
    for _ in range(2):
        before, waited = home.file.moved["read"], []
        for shelf in shelves:
            shelf.begin_fetch()
        for shelf in shelves:
            waited.append(shelf._slot is None)
            with shelf.open(write=True) as flats:
                flats["weight"].data.add_(1)
        assert not any(waited), "each of them was under way before it was opened"
        assert home.file.moved["read"] - before <= 6 * PAGES, "nothing is read twice"
    for number, shelf in enumerate(shelves):
        with shelf.open() as flats:
            torch.testing.assert_close(flats["weight"].detach(), leaf(number).detach() + 2)


def test_what_is_needed_at_once_goes_before_what_is_read_ahead(home):
    shelves = [home.shelf(NUMEL, {"weight": leaf(number)}) for number in range(5)]
    for shelf in shelves[:3]:
        shelf.begin_fetch()
    assert [shelf._slot is None for shelf in shelves] == [False, False, False, True, True]
    with shelves[4].open() as flats:
        assert torch.equal(flats["weight"], leaf(4))
        assert [shelf._slot is None for shelf in shelves] == [False, False, True, True, False]
    for number in (2, 1, 0):
        with shelves[number].open() as flats:
            assert torch.equal(flats["weight"], leaf(number))


def test_pages_that_are_given_back_are_used_again(home):
    first = home.shelf(NUMEL, {"weight": leaf(0)})
    first.leave()
    assert home.file.nbytes == 0
    second = home.shelf(NUMEL, {"weight": leaf(1)})
    with second.open() as flats:
        assert torch.equal(flats["weight"], leaf(1))
    assert home.file.nbytes == PAGES


def test_a_state_may_be_replaced(home):
    shelf = home.shelf(NUMEL, {"weight": leaf(0)})
    for value in (torch.ones(NUMEL), torch.full((NUMEL,), 2.0, dtype=torch.float64), torch.full((NUMEL,), 3.0)):
        with shelf.open(write=True):
            shelf.add("state", value)
        home.shelf(NUMEL, {"weight": leaf(5)}).leave()
        with shelf.open() as flats:
            assert flats["state"] is value and (value == value[0]).all() and not value.isnan().any()
    assert home.file.nbytes == 2 * PAGES


def _fail(monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(f"hf_zero.core.direct_file.os.{call}", fail)


def test_a_shelf_whose_write_failed_is_broken_and_others_are_not(home, monkeypatch):
    broken, sound = (home.shelf(NUMEL, {"weight": leaf(number)}) for number in range(2))
    with broken.open(), sound.open():
        pass
    with monkeypatch.context() as patch:
        _fail(patch, "pwrite")
        with broken.open(write=True):
            pass
        broken._written.end()
    for _ in range(2):
        with pytest.raises(ZeroRuntimeError, match="cannot write .* at position"), broken.open():
            pass
    broken.begin_fetch()
    with sound.open(write=True) as flats:
        assert torch.equal(flats["weight"], leaf(1))


def test_a_read_that_failed_is_an_error_and_may_be_tried_again(home, monkeypatch):
    shelf = home.shelf(NUMEL, {"weight": leaf(0)})
    for other in range(3):
        home.shelf(NUMEL, {"weight": leaf(other)})
    with monkeypatch.context() as patch:
        _fail(patch, "preadv")
        for _ in range(2):
            with pytest.raises(ZeroRuntimeError, match=r"cannot read .*\[Errno 5\]"), shelf.open():
                pytest.fail("it was opened")
        assert shelf.flats["weight"].isnan().all()
    with shelf.open() as flats:
        assert torch.equal(flats["weight"], leaf(0))


def test_an_exception_inside_leaves_the_shelf_in_order(home):
    shelf = home.shelf(NUMEL, {"weight": leaf(0)})
    with pytest.raises(KeyError), shelf.open(write=True) as flats:
        flats["weight"].data.fill_(1)
        raise KeyError
    assert flats["weight"].isnan().all()
    with shelf.open():
        assert (flats["weight"] == 1).all()


def test_forks_do_not_disturb_reads(home):
    shelves = [home.shelf(NUMEL, {"weight": leaf(number)}) for number in range(6)]
    for _ in range(5):
        for number, shelf in enumerate(shelves):
            shelf.begin_fetch()
            worker = multiprocessing.get_context("fork").Process(target=int)
            worker.start()
            with shelf.open(write=True) as flats:
                assert torch.equal(flats["weight"], leaf(number))
            worker.join(300)
            assert worker.exitcode == 0


def test_nothing_outlives_it(tmp_path):
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    home = DiskHome(DirectFile(tmp_path))
    shelf = home.shelf(NUMEL, {"weight": leaf(0)})
    shelf.begin_fetch()
    home.close()
    home.close()
    del shelf
    gc.collect()
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before
