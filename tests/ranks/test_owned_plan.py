"""The planner knows what whole matrices take, on their owners and in the slices."""

import pytest
import torch.distributed as dist

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.matrix_optimizers import MAKERS
from tests.support.planned import check_resident


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
@distributed(world_size=2)
def test_a_run_holds_what_was_planned(name, stage):
    model = zoo.build("llama")
    optimizers = MAKERS[name](model.parameters())
    engine = hf_zero.shard(model, optimizers[0], {"zero_stage": stage, "mixed_precision": "bf16"})
    for optimizer in optimizers[1:]:
        engine.attach_optimizer(optimizer)
    batch = zoo.batch("llama", dist.get_rank(), 0)
    engine.backward(model(**batch).loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    if dist.get_rank() == 0:
        check_resident(model, batch)
