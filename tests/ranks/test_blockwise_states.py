"""Optimizers that quantise their states by blocks train, and resume, to the bit as without hf_zero."""

import functools

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.matrix_optimizers import BlockwiseAdam, BlockwiseLion
from tests.support.reference import Plan, check_stages, train_stock, whole_weights


BOTH = pytest.mark.parametrize("make", [BlockwiseAdam, BlockwiseLion])
BATCHES = functools.partial(zoo.batch, "llama")


def build():
    """Some of its matrices are of many blocks, of which the last is not full, and some are too small to have any."""
    sizes = {"vocab_size": 64, "hidden_size": 60, "intermediate_size": 150, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def train(model, optimizer, engine, windows):
    for number in windows:
        engine.backward(model(**BATCHES(dist.get_rank(), number)).loss)
        optimizer.step()
        optimizer.zero_grad()


@BOTH
@distributed(world_size=2)
def test_they_train_as_under_ddp_to_the_bit(make):
    check_stages(build, BATCHES, optimizer=make, ddp={}, exact=True)


def save(make, stage, folder):
    model = build()
    optimizer = make(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})
    train(model, optimizer, engine, range(2))
    states = optimizer.state_dict()["state"]
    coded = {name for name, state in states.items() if state["state1"].dtype is torch.int8}
    assert 0 < len(coded) < len(states)
    assert all(name in coded or "absmax1" not in state for name, state in states.items())
    engine.save_checkpoint(folder)


def resume(make, stage, folder):
    model = build()
    optimizer = make(model.parameters())
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})
    train(model, optimizer, engine, range(7, 8))  # codes and scales are there, and other than what is saved
    engine.load_checkpoint(folder)
    train(model, optimizer, engine, range(2, 3))
    wanted = train_stock(build(), make, functools.partial(BATCHES, dist.get_rank()), Plan(steps=3), ddp={}).weights
    for name, weight in whole_weights(model).items():
        assert torch.equal(weight, wanted[name]), f"{name} at stage {stage}"


@BOTH
@pytest.mark.parametrize("first, then", [(2, 3), (3, 0)])
def test_codes_and_scales_resume_to_the_bit(make, first, then, tmp_path):
    run_ranks(save, make, first, tmp_path, world_size=2)
    run_ranks(resume, make, then, tmp_path, world_size=2)
