"""What `hf-zero plan` predicts where ranks share layers or sequences is what such a rank really uses and sends."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from hf_zero import ZeroAccelerator, ZeroPlugin
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import engine_of
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.trace import Scenario, trace
from tests.integration.test_plan_measured import (
    LENGTH,
    ROWS,
    agree,
    configuration,
    end_step,
    near,
    sharded,
    third_step,
)
from tests.support.harness import run_ranks
from tests.support.sequences import needs_shared_sequences
from tests.support.tensor_models import needs_shared_layers, tensor_mesh
from tests.support.trainers import forget_accelerate


def planned(name, stage, world_size=4, log=None, **settings):
    scenario = Scenario(
        config=ZeroConfig(zero_stage=stage, mixed_precision="no", **settings),
        world_size=world_size,
        batch=BatchShape(rows=ROWS, length=LENGTH),
        backend="gloo",
    )
    return trace(build(configuration(name)[1]), scenario, log=log)


def train(name, stage, width):
    """One rank of 2 x 2: what it keeps between steps, its peak, and what it sends."""
    from hf_zero.parallel.tensor_parallel import share_out

    model_class, config = configuration(name)
    torch.manual_seed(0)
    model = model_class(config).train()
    model.config.use_cache = False
    share_out(model, tensor_mesh(width))
    engine, optimizer = sharded(model, {"zero_stage": stage, "tp_size": width})
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))

    def step():
        engine.backward(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss)
        engine.clip_grad_norm_(1.0)
        end_step(engine, optimizer)

    layers = CommDebugMode()
    found = third_step(model, engine, step, beside=layers)
    calls = sum(count for kind, count in layers.get_comm_counts().items() if "functional" in str(kind))
    return {**found, "calls": calls}


@needs_shared_layers
@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("qwen3", 1)])
def test_two_by_two_ranks_of_tensor_parallelism(name, stage):
    plan = planned(name, stage, tp_size=2)
    for found in run_ranks(train, name, stage, 2, world_size=4)[:1]:
        agree(found, plan, "tensor parallelism")
        assert found["calls"] == plan.calls["tensor parallelism"]


def train_sequences(name, stage, size):
    """The same of one rank of 2 x 2 that share sequences, which an Accelerator cuts."""
    forget_accelerate()
    accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(zero_stage=stage, sp_size=size), cpu=True)
    model_class, config = configuration(name)
    torch.manual_seed(0)
    model = model_class(config).train()
    model.config.use_cache = False
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    engine = engine_of(model)
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    batch = accelerator.cut_sequences({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})

    def step():
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        end_step(engine, optimizer)

    return third_step(model, engine, step)


@needs_shared_sequences
@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("qwen3", 1)])
def test_two_by_two_ranks_that_share_sequences(name, stage):
    plan = planned(name, stage, sp_size=2)
    for found in run_ranks(train_sequences, name, stage, 2, world_size=4)[:1]:
        agree(found, plan, "sequences", "hand_over")
        near(found["sent"]["hand_over"], plan.sent["sequences"], 0.001, "exchanged")  # 16 bytes more are planned
