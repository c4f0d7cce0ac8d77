"""Loops of Accelerate on four ranks that share sequences, beside the same steps on whole sequences in one process."""

from dataclasses import dataclass, field, replace
from functools import partial

import peft
import pytest
import torch
import transformers as tf
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from hf_zero import ZeroAccelerator, ZeroPlugin
from tests.support import sequences, zoo
from tests.support.harness import distributed
from tests.support.trainers import compare_weights, forget_accelerate


STEPS, ROWS, RANKS = 3, 2, 4
_SLIDING = {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _of(kind, **changes):
    config_class, model_class = getattr(tf, f"{kind}Config"), getattr(tf, f"{kind}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return model_class(config_class(**{**zoo._DECODER, **changes})).train()


def _checkpointed(reentrant):
    model = sequences.build()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def _adapted():
    model = sequences.build()
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


@dataclass(frozen=True)
class Case:
    build: partial
    stage: int = 2
    size: int = 2  # ranks that share a sequence
    batches: str = "whole"
    accumulation: int = 1
    config: dict = field(default_factory=dict)
    tolerance: float = 1e-5


_grouped = partial(partial, sequences.build)
CASES = {
    "one head of keys": Case(_grouped(heads=4, keys=1), batches="padded"),
    "keys that four ranks share": Case(_grouped(heads=4, keys=2), stage=3, size=4, batches="packed"),
    "keys that do not divide": Case(_grouped(heads=6, keys=3), stage=1, batches="padded at the beginning"),
    "heads that do not divide": Case(_grouped(heads=5, keys=5), stage=0, size=4, batches="packed"),
    "shares of unequal groups": Case(_grouped(heads=9, keys=3), stage=3, size=4),
    "lengths that do not divide": Case(partial(sequences.build), size=4, batches="long"),
    "accumulation": Case(partial(sequences.build), accumulation=3, batches="padded"),
    "accumulation at stage 3": Case(partial(sequences.build), stage=3, accumulation=3, config={"no_sync": "local"}),
    "messages": Case(partial(sequences.build), stage=3, config={"peer_memory": False}, batches="packed"),
    "replicas": Case(partial(sequences.build), stage=3, config={"mics_shard_size": 2}),
    "checkpoints": Case(partial(_checkpointed, False), stage=3, batches="packed"),
    "reentrant checkpoints": Case(partial(_checkpointed, True), stage=3, batches="padded"),
    "lora": Case(_adapted, stage=3, batches="packed"),
    "sliding window": Case(partial(_of, "Qwen3", head_dim=8, **_SLIDING), batches="packed"),
    "experts": Case(partial(_of, "Mixtral", **_EXPERTS), stage=3, batches="padded"),
    "tiles": Case(partial(sequences.build), stage=3, batches="padded", config={"tile_loss": 4, "tile_mlp": 4}),
    "offload": Case(partial(sequences.build), stage=3, batches="packed", config={"offload_optimizer_device": "cpu"}),
    "bf16": Case(partial(sequences.build), stage=3, config={"mixed_precision": "bf16"}, tolerance=3e-2),
    "positions as weights": Case(partial(zoo.build, "gpt2"), stage=3, batches="padded"),
}
USUAL = ("one head of keys", "heads that do not divide", "checkpoints", "sliding window")


def _loader(case):
    make, collate = {**sequences.BATCHES, "long": (partial(sequences.examples, length=13), None)}[case.batches]
    data = make(STEPS * case.accumulation * ROWS * RANKS // case.size)
    return DataLoader(data, batch_size=ROWS, collate_fn=collate)


def _whole(case):
    """The same steps with whole sequences, written out."""
    model = case.build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    batches, ranks, losses = iter(_loader(case)), RANKS // case.size, []
    for _ in range(STEPS):
        for _ in range(case.accumulation):
            # With a cache, which models have by default, transformers does not look for packed sequences.
            means = [model(**next(batches), use_cache=False).loss / ranks for _ in range(ranks)]
            (sum(means) / case.accumulation).backward()
            losses.append(sum(means).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def _shared(case):
    """As a script would do it."""
    forget_accelerate()
    plugin = ZeroPlugin(zero_stage=case.stage, sp_size=case.size, **case.config)
    accelerator = ZeroAccelerator(zero_plugin=plugin, gradient_accumulation_steps=case.accumulation)
    model = case.build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(case))
    assert len(loader) == STEPS * case.accumulation
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    with torch.no_grad():
        weights = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    return losses, weights


def _check(name):
    case = CASES[name]
    losses, weights = _shared(case)
    expected, whole = _whole(case)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=case.tolerance, atol=case.tolerance)
    compare_weights(weights, whole, name, tolerance=case.tolerance)


@distributed(world_size=RANKS)
def _check_all(names):
    for name in names:
        _check(name)


def test_parts_of_sequences_step_like_whole_ones():
    _check_all(USUAL)


def _flash(module, query, key, value, attention_mask, position_ids=None, **kwargs):
    """As FlashAttention's function is called, for one sequence in a row."""
    assert module.config._attn_implementation == "flash_stand_in"
    assert attention_mask is None and position_ids[0].tolist() == list(range(key.shape[2]))
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


@distributed(world_size=RANKS)
def test_flash_attention_is_told_the_positions_of_whole_sequences():
    AttentionInterface.register("flash_stand_in", _flash)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    case = CASES["keys that four ranks share"]
    build = partial(sequences.build, keys=2)

    def named():
        model = build()
        model.config._attn_implementation_internal = "flash_stand_in"
        return model

    losses, _ = _shared(replace(case, build=named, batches="whole"))
    expected, _ = _whole(replace(case, build=build, batches="whole"))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES if name not in USUAL])
def test_parts_of_sequences_of_any_model_step_like_whole_ones(name):
    _check_all([name])
