"""LoRA's matrices are stepped whole, on their owners, over a base that is frozen, and may be quantised."""

import functools

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import hf_zero
from tests.support import packed, zoo
from tests.support.harness import distributed
from tests.support.matrix_optimizers import MAKERS
from tests.support.reference import STAGES, Plan, check_stages


draw = functools.partial(zoo.batch, "llama")


def build(kind=None):
    model = zoo.build("llama") if kind is None else packed.quantise(zoo.build("llama"), kind)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def make(name, params):
    (optimizer,) = MAKERS[name]([param for param in params if param.requires_grad])
    return optimizer


@pytest.mark.parametrize(
    "name, kind",
    [("lamb", None), ("adafactor", None), ("muon_with_adam", None), ("lamb", "4bit"), ("lamb", "tensors")],
)
@distributed(world_size=2)
def test_adapters_train_as_under_ddp(name, kind):
    check_stages(
        functools.partial(build, kind),
        draw,
        Plan(accumulation=2),
        optimizer=functools.partial(make, name),
        exact=False,
    )


@distributed(world_size=2)
def test_every_adapter_has_one_owner():
    for stage in STAGES[1:]:
        model = build("tensors")
        optimizer = make("lamb", model.parameters())
        engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})
        engine.backward(model(**draw(dist.get_rank(), 0)).loss)
        optimizer.step()
        (binding,) = engine.bindings
        mine = sorted(tuple(state["exp_avg"].shape) for state in optimizer.state.values())
        everyone = [None, None]
        dist.all_gather_object(everyone, mine)
        trained = [tuple(param.shape) for param in model.parameters() if param.requires_grad]
        assert binding.owned == [True] and sorted(everyone[0] + everyone[1]) == sorted(trained), f"stage {stage}"
        assert all(everyone), "each has some"
