"""Operations whose results are remembered give what torch gives, and a plan says on stderr what it is at."""

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.planning import progress
from hf_zero.planning.remembered import Remembered


class _Twice(TorchDispatchMode):
    """Runs every operation first as it is, then as it is remembered, and notes what both give."""

    def __init__(self):
        super().__init__()
        self.known, self.remembered, self.differing = Remembered(), 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ran = []
        first = self.known(_Counted(func, ran), args, kwargs)
        calls = len(ran)
        again = self.known(_Counted(func, ran), args, kwargs)
        self.remembered += len(ran) == calls
        if _described(first) != _described(again):
            self.differing.append(func)
        return again


class _Counted:
    """An operation that notes its calls; equal to any other of the same operation."""

    def __init__(self, func, ran):
        self.func, self.ran, self.is_view, self._schema = func, ran, func.is_view, func._schema

    def __call__(self, *args, **kwargs):
        self.ran.append(self.func)
        return self.func(*args, **kwargs)

    def __eq__(self, other):
        return self.func is other.func

    def __hash__(self):
        return hash(self.func)


def _described(out):
    if isinstance(out, (tuple, list)):
        return [_described(each) for each in out]
    if isinstance(out, Tensor):
        return out.dtype, out.shape, out.stride(), out.storage_offset(), out.untyped_storage().nbytes()
    return out


def test_what_is_remembered_is_what_torch_gives():
    x, w = torch.empty(3, 8, device="meta"), torch.empty(6, 8, device="meta")
    with _Twice() as mode:
        for _ in range(2):
            y = torch.nn.functional.linear(x, w)
            y = torch.nn.functional.layer_norm(y, (6,))
            y += 1
            torch.nn.functional.silu(y.t()).sum(0, keepdim=True)
            y.max(1), y.to(torch.bfloat16), torch.cat([y, y]), y[:, 2:], y.softmax(-1), y.unbind()
    assert not mode.differing
    assert mode.remembered > 10


def test_numbers_of_other_types_and_values_are_other_calls():
    known = Remembered()
    ones = torch.empty(2, dtype=torch.int64, device="meta")
    add = torch.ops.aten.add.Tensor
    assert [known(add, (ones, number), {}).dtype for number in (1, 1.0, True, 1, 1.0)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
        torch.float32,
    ]


def test_what_changes_its_argument_gives_the_argument_and_views_stay_views():
    known, x = Remembered(), torch.empty(2, 3, device="meta")
    for _ in range(2):
        assert known(torch.ops.aten.mul_.Scalar, (x, 2), {}) is x
        view = known(torch.ops.aten.transpose.int, (x, 0, 1), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        part = known(torch.ops.aten._unsafe_view.default, (x, [3, 2]), {})
        assert part.untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("value", [torch.empty(2), object(), torch.empty(2, dtype=torch.complex64, device="meta")])
def test_nothing_is_remembered_of_values_and_of_what_is_not_known(value):
    known = Remembered()
    for _ in range(2):
        known(_Unknown(), (value,), {})
    assert not known._results


class _Unknown:
    is_view = False

    def __call__(self, *args):
        return None


def test_errors_are_torchs_own():
    known = Remembered()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            known(torch.ops.aten.mm.default, (torch.empty(2, 3, device="meta"),) * 2, {})


def test_a_pipe_gets_lines_and_a_terminal_a_bar(capsys, monkeypatch):
    with progress.shown() as tell:
        tell("building")
        tell("training stage 1", 1, 1)
        tell("training stage 3 on 4 GPUs")
    lines = ["hf-zero plan: training stage 1 (1 of 1)", "hf-zero plan: training stage 3 on 4 GPUs"]
    assert capsys.readouterr().err.splitlines() == lines
    terminal = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=terminal, force_terminal=True, width=120))
    with progress.shown() as tell:
        tell("training stage 1", 2, 8)
        tell("training stage 2", 3, 8)
    assert "training stage 2" in terminal.getvalue() and "2/8" in terminal.getvalue()
