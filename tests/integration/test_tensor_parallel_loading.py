"""Models that transformers shares out while it loads them, or that zero_init loads, train and are saved as others."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DistributedConfig

import hf_zero
from tests.support import zoo
from tests.support.harness import run_ranks
from tests.support.reference import SGD
from tests.support.tensor_models import whole_weights


def _train(model, config, width, steps=2):
    optimizer = SGD(model.parameters())
    engine = hf_zero.shard(model, optimizer, config)
    assert width == 1 or any(isinstance(param, DTensor) for param in model.parameters())
    for step in range(steps):
        engine.backward(model(**zoo.batch("llama", dist.get_rank() // width, step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return engine


def _from_pretrained(source, target, how):
    config = {"zero_stage": 3}
    if how == "distributed_config":
        model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(tp_size=2))
    elif how == "distributed_config under zero_init":
        with hf_zero.zero_init(config):
            model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(tp_size=2))
    elif how == "zero_init":
        config["tp_size"] = 2
        with hf_zero.zero_init(config):
            model = AutoModelForCausalLM.from_pretrained(source)
    else:
        model = AutoModelForCausalLM.from_pretrained(source)
    width = 1 if how == "plain" else 2
    engine = _train(model.train(), config, width)
    engine.save_model(target)
    return whole_weights(model)


HOWS = ["zero_init", "distributed_config", "distributed_config under zero_init"]


@pytest.mark.parametrize("how", HOWS)
def test_loaded_models_train_and_are_saved_alike(how, tmp_path, monkeypatch):
    zoo.build("llama_tied").save_pretrained(tmp_path / "stock")
    (theirs,) = run_ranks(_from_pretrained, tmp_path / "stock", tmp_path / "theirs", "plain", world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ours = run_ranks(_from_pretrained, tmp_path / "stock", tmp_path / "ours", how, world_size=2)[0]
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=0, atol=1e-6), name
    files = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == files
    for name in files - {"model.safetensors"}:
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text(), name
