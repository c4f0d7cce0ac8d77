"""Inputs of checkpointed layers that rest elsewhere: no bit differs, memory is free, and nothing is left behind."""

import contextlib
import dataclasses
import errno
import gc
import itertools
import os
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.core import direct_file
from hf_zero.core import homes as places
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.homes import Homes
from hf_zero.errors import ZeroRuntimeError
from tests.support import zoo
from tests.support.far_home import FarHome, disk_homes, far_homes
from tests.support.harness import distributed, run_ranks
from tests.support.late_lanes import late_homes
from tests.support.nets import Block, Net, batches, seeded
from tests.support.networks import checkpoint_calls
from tests.support.resident import used_bytes
from tests.support.small_disk import on_a_small_disk


class Turned(Block):
    """What it returns, the next one's input, is not contiguous."""

    def forward(self, x):
        return super().forward(x).t().contiguous().t()


def _lora():
    model = peft.get_peft_model(zoo.build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model.enable_input_require_grads()
    return model


MODELS = {"net": lambda: Net(4, Turned), "llama": lambda: zoo.build("llama"), "lora": _lora}


def _loss(name, model, number):
    if name != "net":
        return model(**zoo.batch("llama", dist.get_rank(), number)).loss
    x, y = batches(dist.get_rank(), number)
    return F.cross_entropy(model(x).float(), y)


def _train(name, stage, reentrant, precision, homes):
    """Losses, norms and weights."""
    model = seeded(MODELS[name])()
    checkpoint_calls(model, reentrant)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = ZeroEngine(model, hf_zero.ZeroConfig(zero_stage=stage, mixed_precision=precision), homes=homes)
    engine.attach_optimizer(optimizer)
    seen = []
    for step in range(3):
        for micro in range(2):
            loss = _loss(name, model, 2 * step + micro)
            with contextlib.nullcontext() if micro else engine.no_sync():
                engine.backward(loss)
            seen.append(loss.item())
        seen.append(engine.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(_loss(name, model, 99).item())
        model.train()
    with hf_zero.gathered_parameters(model):
        return seen, [param.detach().clone() for param in model.parameters()]


def _far(stage):
    """Weights and states away too, where there are slices of them."""
    base = far_homes(limit=1 << 20) if stage == 3 else Homes.on_device(torch.device("cpu"))
    return dataclasses.replace(base, activations=FarHome(limit=1 << 20))


def _disk(folder):
    homes = disk_homes(folder)
    return dataclasses.replace(homes, activations=homes.optimizer)


def _late(folder=None):
    """On a host, or its disk, that copies reach late."""
    homes = late_homes(folder=folder, limit=1 << 20)
    return dataclasses.replace(homes, activations=homes.optimizer)


@distributed(world_size=2)
def _compare(cases, folder):
    for name, stage, reentrant, precision in cases:
        wanted = _train(name, stage, reentrant, precision, None)
        for homes in (_far(stage), _late(), *([_disk(folder), _late(folder)] if stage == 3 else [])):
            found = _train(name, stage, reentrant, precision, homes)
            assert found[0] == wanted[0], (name, stage, reentrant, found[0], wanted[0])
            assert all(map(torch.equal, found[1], wanted[1])), (name, stage, reentrant)
            if isinstance(homes.activations, FarHome):
                assert homes.activations.opened == homes.activations.written > 0, (name, stage, reentrant)
            homes.close()


CASES = [
    (name, stage, reentrant, precision)
    for (stage, reentrant), (name, precision) in itertools.product(
        itertools.product(range(4), (False, True)), itertools.product(MODELS, ("no", "bf16"))
    )
]


def test_no_bit_differs(tmp_path):
    _compare(CASES[::7], str(tmp_path))
    assert not os.listdir(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", range(4))
def test_no_bit_differs_in_any_case(stage, tmp_path):
    _compare([case for case in CASES if case[1] == stage], str(tmp_path))


class Deep(nn.Module):
    """Layers that are cheap and have large inputs; `fault(model)` may be called between two of them."""

    fault = None

    def __init__(self, depth, checkpoints=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
            if self.fault is not None:
                self.fault()
        return x


WIDTH, ROWS = 512, 512
NBYTES = 4 * WIDTH * ROWS  # of the input of a layer


def _shard(folder, depth=12, device="nvme", stage=2, **options):
    model = Deep(depth, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"zero_stage": stage, "offload_activations_device": device, "offload_activations_nvme_path": str(folder)}
    engine = hf_zero.shard(model, optimizer, config if folder is not None else {"zero_stage": stage})
    return model, engine


def _held_between_passes(folder):
    torch.set_num_threads(1)
    model, engine = _shard(folder)
    for step in range(2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), requires_grad=True)
        before = used_bytes()
        loss = model(x).square().mean()
        held = used_bytes() - before
        engine.backward(loss)
        del loss
    return held, None if folder is None else engine.homes.activations


def _memory(folder):
    held, home = _held_between_passes(folder)
    return held, None if home is None else (dict(home.file.moved), dict(home.held()))


def test_what_is_on_disk_is_not_in_memory(tmp_path):
    ((plain, _),) = run_ranks(_memory, None, world_size=1)
    ((offloaded, (moved, held)),) = run_ranks(_memory, str(tmp_path), world_size=1)
    layers, buffers = 12, 4
    # Both keep the input of the first layer, which is the test's, and the output; buffers stay from the first pass on.
    assert plain - offloaded >= 0.9 * (layers - 2) * NBYTES, (plain / 1e6, offloaded / 1e6)
    assert moved["write"] == 2 * layers * NBYTES
    assert 2 * (layers - buffers) * NBYTES <= moved["read"] <= 2 * layers * NBYTES, moved
    assert held[places.Place.HOST] == buffers * NBYTES


def _after_faults(folder):
    model, engine = _shard(folder)
    home, x = engine.homes.activations, torch.randn(ROWS, WIDTH)
    calls, taken, take = [], [], home.shelf
    home.shelf = lambda *args: taken.append(args) or take(*args)

    def fail(*_):
        calls.append(len(taken))
        if len(calls) == 6:
            raise KeyError("the sixth call")

    model.fault = fail
    with pytest.raises(KeyError, match="sixth"):
        model(x)
    model.fault = None
    assert calls == [1, 2, 3, 4, 5, 6], calls
    layer = nn.LayerNorm(WIDTH)  # of nobody's model
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(taken) == 6, "what is called outside of the model stays where it is"
    for _ in range(2):
        loss = model(x).square().mean()
    loss.register_hook(fail)
    calls[:] = range(5)
    with pytest.raises(KeyError):
        engine.backward(loss)
    del loss
    gc.collect()
    with torch.no_grad():
        model(x)
    in_use = home.held()[places.Place.DISK]
    engine.undo()
    assert model(x).requires_grad
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return in_use, [name for name in open_files if folder in name]


def test_nothing_stays_behind_after_an_exception(tmp_path):
    for in_use, files in run_ranks(_after_faults, str(tmp_path)):
        assert in_use == 0 and files == []
    assert not os.listdir(tmp_path)


def _until_an_error(folder, stage, call=None):
    """The error of this rank where only rank 1 has inputs that are worth a way to the disk, on which `call` fails."""
    model, engine = _shard(folder, stage=stage)
    rank = dist.get_rank()
    if call is not None and rank == 1:
        original, left = getattr(os, call), [3]

        def fail(*args):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*args)

        setattr(direct_file.os, call, fail)
    x = torch.randn(ROWS if rank else 2, WIDTH, requires_grad=True)
    with pytest.raises(ZeroRuntimeError) as caught:
        for _ in range(3):
            engine.backward(model(x).square().mean())
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
@on_a_small_disk
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(disk, stage):
    first, second = run_ranks(_until_an_error, disk, stage, timeout=60)
    assert first == second
    assert first.startswith(f"rank 1: '{disk}' has no room") and f"needs {NBYTES:,} more" in first, first
    assert "are free (No space left" in first


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind, call", [("read", "preadv"), ("write", "pwrite")])
def test_a_disk_that_fails_on_one_rank_is_an_error_on_all(kind, call, stage, tmp_path):
    first, second = run_ranks(_until_an_error, tmp_path, stage, call, timeout=60)
    assert first == second
    assert first.startswith(f"rank 1: cannot {kind} ") and f"in '{tmp_path}'" in first, first
    assert " at position " in first and "[Errno 5]" in first, first


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@distributed(world_size=1)
def test_a_model_without_checkpoints_is_an_error(device, tmp_path):
    model, _ = _shard(tmp_path, device=device, checkpoints=False)
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    with pytest.raises(ZeroRuntimeError, match="Deep checkpoints none. Set gradient_checkpointing"):
        model(torch.randn(2, WIDTH))


class Overwrites(Deep):
    def forward(self, x):
        y = super().forward(x)
        z = y.exp()  # keeps its result for backward
        return z.mul_(2)


@pytest.mark.parametrize("folder", [None, "/tmp"])
@distributed(world_size=1)
def test_what_was_overwritten_before_backward_is_still_an_error(folder):
    model = Overwrites(2)
    config = {} if folder is None else {"offload_activations_device": "nvme", "offload_activations_nvme_path": folder}
    engine = hf_zero.shard(model, None, {"zero_stage": 0, **config})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(model(torch.randn(2, WIDTH)).sum())
