"""Data x tensor parallel ranks train as one process does: losses, norms, clipping, skips, weights."""

import contextlib
import logging
import math
import types

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

import hf_zero
from hf_zero.core import drift
from hf_zero.errors import ZeroConfigError
from tests.support import sequences, zoo
from tests.support.harness import distributed, run_ranks
from tests.support.reference import ADAMW, SGD, Trace, clip_by_norm, compare, double_norm
from tests.support.tensor_models import build, whole, whole_weights


def train_alone(name, groups, optimizer, *, steps=3, accumulation=1, clip=None):
    """One process on the batches of `groups` data-parallel ranks; losses are those of each of them."""
    model = whole(name)
    stepped, losses, trace = optimizer(model.parameters()), [[] for _ in range(groups)], Trace()
    for step in range(steps):
        for number in range(accumulation):
            for group in range(groups):
                loss = model(**zoo.batch(name, group, step * accumulation + number)).loss
                (loss / (groups * accumulation)).backward()
                losses[group].append(loss.item())
        trace.norms.append(double_norm(model))
        if clip is not None:
            clip_by_norm(model, trace.norms[-1], clip)
        stepped.step()
        stepped.zero_grad()
    trace.weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    return [Trace(losses=mine, norms=trace.norms, weights=trace.weights) for mine in losses]


def train_shared(name, width, config, optimizer, *, steps=3, accumulation=1, clip=None):
    """The same by hf_zero, `width` ranks to a group of tensor parallelism."""
    model = build(name, width)
    stepped = optimizer(model.parameters())
    engine = hf_zero.shard(model, stepped, config)
    trace = Trace()
    for step in range(steps):
        for number in range(accumulation):
            batch = zoo.batch(name, dist.get_rank() // width, step * accumulation + number)
            with engine.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                loss = model(**batch).loss
                engine.backward(loss / accumulation)
            trace.losses.append(loss.item())
        trace.norms.append(float(engine.clip_grad_norm_(math.inf if clip is None else clip)))
        stepped.step()
        stepped.zero_grad()
    trace.weights = whole_weights(model)
    return trace


def check(name, width, stages, config=None, optimizer=SGD, **loop):
    """Fail where a stage differs from one process; the largest differences of each."""
    groups, worst = dist.get_world_size() // width, {}
    stock = train_alone(name, groups, optimizer, **loop)[dist.get_rank() // width]
    for stage in stages:
        ours = train_shared(name, width, {"zero_stage": stage, **(config or {})}, optimizer, **loop)
        worst[stage] = compare(ours, stock, f"{name}, {groups} x {width} ranks, stage {stage}")
    return worst


@distributed(world_size=4)
def test_two_by_two_ranks_train_llama_as_one_process():
    check("llama", 2, (1, 3), optimizer=ADAMW, accumulation=2, clip=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks, width", [(4, 2), (4, 1)])
def test_ranks_train_llama_as_one_process_at_every_stage(ranks, width):
    run_ranks(check, "llama", width, (0, 1, 2, 3), world_size=ranks, clip=0.1)


@distributed(world_size=2)
def test_tensor_parallel_ranks_alone_train_llama_as_one_process():
    check("llama", 2, (0, 3), clip=0.1)


# Norms of single heads, other norms, packed projections, biases, experts of packed matrices, and tied embeddings.
USUAL = [("qwen3", 3), ("phi3", 3), ("mixtral", 2)]
FAMILIES = ("llama_tied", "qwen2", "qwen3", "gemma", "phi3", "gpt_neox", "mixtral", "qwen3_moe")


@pytest.mark.parametrize(
    "name, stage",
    [
        pytest.param(name, stage, marks=[pytest.mark.exhaustive] * ((name, stage) not in USUAL))
        for name in FAMILIES
        for stage in (0, 1, 2, 3)
    ],
)
@distributed(world_size=4)
def test_other_families_train_as_one_process(name, stage):
    check(name, 2, (stage,), clip=0.1, accumulation=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "gemma", "phi3"])
@pytest.mark.parametrize("ranks, width", [(2, 2), (4, 1)])
def test_other_families_train_as_one_process_in_other_layouts(ranks, width, name):
    run_ranks(check, name, width, (0, 3), world_size=ranks, clip=0.1)


@distributed(world_size=4)
def test_copies_that_have_drifted_apart_are_mended_with_a_warning(tmp_path):
    model, config = build("llama", 2), {"zero_stage": 2}
    engine = hf_zero.shard(model, SGD(model.parameters()), config)
    assert drift.mend(engine) == []
    if engine.mesh.tensor.rank == 1:
        for buffer in engine.buffers:
            for shard in buffer.resting.flats:
                for span in shard.spans():
                    if buffer.names[span.index] == "model.norm.weight":
                        shard.values[span.offset] += 1e-6
    with caplog_of(drift) as lines:
        engine.save_checkpoint(tmp_path / "state")
    assert len(lines) == (dist.get_rank() == 0), lines
    assert drift.mend(engine) == []
    found = whole_weights(model)["model.norm.weight"]
    assert torch.equal(found, torch.ones_like(found)), found


@contextlib.contextmanager
def caplog_of(module):
    """The warnings of a module."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    module.logger.addHandler(handler)
    yield lines
    module.logger.removeHandler(handler)


@distributed(world_size=2)
def test_sums_of_parts_are_left_to_hooks_that_are_there_already_and_are_given_back():
    model = build("qwen3", 2)
    model(**zoo.batch("qwen3", 0, 0)).loss.backward()  # registers the hooks of transformers
    stock = {name: p.grad for name, p in model.named_parameters() if name.endswith("q_norm.weight")}
    model.zero_grad()
    engine = hf_zero.shard(model, None, {"zero_stage": 2})
    engine.backward(model(**zoo.batch("qwen3", 0, 0)).loss)
    for name, p in model.named_parameters():
        if name in stock:
            torch.testing.assert_close(p.grad, stock[name])
    other = build("qwen3", 2)
    engine = hf_zero.shard(other, None, {"zero_stage": 2})
    engine.undo()
    other(**zoo.batch("qwen3", 0, 0)).loss.backward()
    for name, p in other.named_parameters():
        if name in stock:
            torch.testing.assert_close(p.grad, stock[name])


@distributed(world_size=2)
def test_what_is_not_built_is_refused():
    matrices = build("llama", 2)
    with pytest.raises(ValueError, match="whole matrices, of which tensor-parallel ranks have parts"):
        hf_zero.shard(matrices, torch.optim.Adafactor(matrices.parameters()), {"zero_stage": 2})
    for kind, says in (("ep_size", "expert parallelism is not supported; NeMo"), ("pp_size", "pipeline parallelism")):
        model = zoo.build("llama")
        model.config.distributed_config = types.SimpleNamespace(**{kind: 2})
        with pytest.raises(ValueError, match=says):
            hf_zero.shard(model, None, {"zero_stage": 2})
    with pytest.raises(ZeroConfigError, match="GPT2LMHeadModel has no tp_plan"):
        hf_zero.shard(zoo.build("gpt2"), None, {"zero_stage": 2, "tp_size": 2})
    with pytest.raises(ZeroConfigError, match="tp_size is 4.*there are 2 ranks"):
        hf_zero.shard(zoo.build("llama"), None, {"zero_stage": 2, "tp_size": 4})
    adapted = get_peft_model(zoo.build("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ZeroConfigError, match="has adapters"):
        hf_zero.shard(adapted, None, {"zero_stage": 2, "tp_size": 2})
    with pytest.raises(ZeroConfigError, match="not available together"):
        hf_zero.ZeroConfig.from_any({"zero_stage": 2, "tp_size": 2, "sp_size": 2})


@distributed(world_size=2)
def test_heads_that_ranks_cannot_share_are_refused_by_name():
    for heads, keys, says in (
        (4, 1, r"tp_size is 2.*layers\.0\.self_attn\.k_proj' of Llama.* makes 1 head.*set tp_size to 1, .*sp_size"),
        (6, 3, "makes 3 head.*set tp_size to 1, or"),
        (3, 3, "q_proj' of Llama.* makes 3 head"),
    ):
        model = sequences.build(heads, keys)
        with pytest.raises(ZeroConfigError, match=says):
            hf_zero.shard(model, None, {"zero_stage": 3, "tp_size": 2})
        assert not any(isinstance(param, DTensor) for param in model.parameters())


@distributed(world_size=2)
def test_heads_of_one_projection_for_all_three_are_counted():
    model = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**{**zoo._DECODER, "num_attention_heads": 3, "hidden_size": 48}))
    with pytest.raises(ZeroConfigError, match=r"query_key_value' of GPTNeoX.* makes 3 head"):
        hf_zero.shard(model, None, {"zero_stage": 3, "tp_size": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [{"intermediate_size": 49}, {"intermediate_size": 1}, {"vocab_size": 65}])
@distributed(world_size=2)
def test_other_sizes_need_not_divide(change):
    given = zoo.batch("llama", 0, 0)
    whole = sequences.build(**change).train()
    loss = whole(**given).loss
    loss.backward()
    SGD(whole.parameters()).step()
    ours = sequences.build(**change).train()
    optimizer = SGD(ours.parameters())
    engine = hf_zero.shard(ours, optimizer, {"zero_stage": 3, "tp_size": 2})
    mine = ours(**given).loss
    engine.backward(mine)
    optimizer.step()
    torch.testing.assert_close(mine, loss, rtol=0, atol=1e-6)
    weights = whole_weights(ours)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=0, atol=1e-6)


@distributed(world_size=4)
def test_gradients_are_read_whole_as_dtensors():
    model = build("llama", 2)
    engine = hf_zero.shard(model, None, {"zero_stage": 3})
    engine.backward(model(**zoo.batch("llama", 0, 0)).loss)
    alone = zoo.build("llama")
    alone(**zoo.batch("llama", 0, 0)).loss.backward()
    for name, p in alone.named_parameters():
        grad = dict(model.named_parameters())[name].grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-6)


@distributed(world_size=4)
def test_stages_agree_in_bf16_with_checkpointing():
    found = []
    for stage in (0, 3):
        model = build("llama", 2)
        model.gradient_checkpointing_enable()
        optimizer = SGD(model.parameters())
        engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, "mixed_precision": "bf16"})
        for step in range(3):
            engine.backward(model(**zoo.batch("llama", dist.get_rank() // 2, step)).loss)
            engine.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole_weights(model))
    for name, weight in found[0].items():
        assert weight.dtype == torch.bfloat16, name
        assert torch.equal(weight, found[1][name]), name
