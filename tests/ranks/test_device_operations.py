"""How much a device is told to do for a step beyond plain torch, counted in a fake group on the code path of NCCL."""

from collections import Counter

import pytest
import torch

import hf_zero
from hf_zero.core import grad_norm
from tests.support.fake_group import Dispatched, fake_group
from tests.support.harness import distributed


RANKS = 8
HIDDEN = 512  # what ranks own is then as long as what parameters have: nothing is padded
# These make another view of memory, or ask for some, and give the device nothing to do.
VIEWS = {"alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "resize_", "select",
         "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
         "_unsafe_view"}  # fmt: skip


def operations_of(action):
    with Dispatched() as dispatched:
        action()
    counted = dispatched.operations + dispatched.collectives
    return Counter({name: count for name, count in counted.items() if name not in VIEWS})


def llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
    )


def of_a_step(layers, config):
    """Operations of forward and backward, and of clipping and the step; `config` None: plain torch in bf16."""
    model = llama(layers)
    if config is None:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = None if config is None else hf_zero.shard(model, optimizer, config)
    backward = torch.Tensor.backward if engine is None else engine.backward

    def passes():
        ids = torch.arange(8)[None]
        backward(model(input_ids=ids, labels=ids).loss)

    def step():
        if engine is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # until the order of units is known
        passes()
        step()
    return operations_of(passes), operations_of(step)


def per_layer(config):
    few, many = of_a_step(2, config), of_a_step(6, config)
    found = []
    for a, b in zip(few, many, strict=True):
        found.append(Counter({name: (b[name] - a[name]) / 4 for name in a.keys() | b.keys()}))
    return found


@pytest.mark.parametrize("stage, most", [(2, (5, 9)), (3, (9, 7))])
@distributed(world_size=1)
def test_operations_of_a_layer(stage, most):
    """Stage 3: two gathers, each of a cast; gradients brought together by three; a sum, put where it belongs."""
    with fake_group(RANKS):
        plain = per_layer(None)
        ours = per_layer({"zero_stage": stage, "mixed_precision": "bf16"})
    for ours_, plain_, allowed in zip(ours, plain, most, strict=True):
        ours_.subtract(plain_)
        beyond = {name: count for name, count in ours_.items() if count}
        assert sum(beyond.values()) <= allowed, beyond


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@distributed(world_size=1)
def test_the_norm_and_clipping_take_the_same_kernels_for_any_number_of_masters(norm_type):
    """The meta device stands for one that is not the host, whose norms are exact in fp32 (see `grad_norm`)."""
    counts = []
    for number in (2, 6):
        masters = [torch.zeros(64, device="meta", requires_grad=True) for _ in range(number)]
        for master in masters:
            master.grad = torch.empty_like(master)

        def clip(masters=masters):
            grads = [master.grad for master in masters]
            norm = grad_norm.global_norm(grads, None, False, norm_type, device=torch.device("meta"))
            grad_norm.clip_(masters, norm, 1.0)

        counts.append(operations_of(clip))
    assert counts[0] == counts[1] and sum(counts[0].values()) <= 14, counts
