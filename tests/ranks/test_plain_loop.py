"""What `shard` refuses or says before a plain loop trains something other than what was meant."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.core.build import default_device
from hf_zero.errors import ZeroLaunchError
from tests.support.harness import distributed


CONFIG = {"zero_stage": 3}


def test_started_ranks_that_are_no_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    model = nn.Linear(4, 4)
    with pytest.raises(ZeroLaunchError, match=r"2 ranks were started.*init_process_group\(\) before hf_zero.shard"):
        hf_zero.shard(model, None, CONFIG)
    assert type(model) is nn.Linear and type(model.weight) is nn.Parameter, "refused before anything is changed"


def test_one_process_is_told_that_nothing_is_sharded(caplog, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with caplog.at_level(logging.WARNING, "hf_zero"):
        hf_zero.shard(nn.Linear(4, 4), None, CONFIG)
    assert "hf_zero: one process, so stage 3 shards nothing" in caplog.text and "torchrun" in caplog.text
    caplog.clear()
    hf_zero.shard(nn.Linear(4, 4), None, {"zero_stage": 0})
    assert not caplog.text


@distributed(world_size=2)
def test_a_model_that_is_wrapped_already_is_refused():
    model = nn.Linear(4, 4)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*model\.module"):
        hf_zero.shard(wrapped, None, CONFIG)
    hf_zero.shard(wrapped.module, None, CONFIG)


@distributed(world_size=2)
def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device.*zero_init"):
        hf_zero.shard(model, None, CONFIG)
    assert dist.get_world_size() == 2


def test_nccl_moves_a_model_of_the_host_to_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    model = nn.Linear(4, 4)
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        assert default_device(model, backend) == torch.device("cuda", 3)
    for backend in ("gloo", "none"):
        assert default_device(model, backend) == torch.device("cpu")
    assert default_device(nn.Linear(4, 4, device="meta"), "nccl") == torch.device("meta"), "a device is kept"
