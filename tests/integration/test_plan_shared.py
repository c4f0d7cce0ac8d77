"""What `hf-zero plan` predicts where ranks share layers or sequences is what such a rank really uses and sends."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from hf_zero import ZeroAccelerator, ZeroPlugin
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import engine_of
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.memory import measure_peak, memory_report
from tests.integration.test_plan_measured import LENGTH, ROWS, configuration, end_step, near, sharded
from tests.support.harness import run_ranks
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

    for _ in range(2):
        step()
    engine.comm.traffic.clear()
    with CommDebugMode() as layers, measure_peak(model) as peak:
        step()
    calls = sum(count for kind, count in layers.get_comm_counts().items() if "functional" in str(kind))
    sent = dict(engine.comm.traffic.bytes_sent)
    return {"resident": memory_report(model).state_bytes, "peak": peak.value, "sent": sent, "calls": calls}


@needs_shared_layers
@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("qwen3", 1)])
def test_two_by_two_ranks_of_tensor_parallelism(name, stage):
    plan = planned(name, stage, tp_size=2)
    for found in run_ranks(train, name, stage, 2, world_size=4)[:1]:
        near(found["resident"], plan.resident_bytes, 0.01, "at rest")
        near(found["peak"], plan.peak_bytes, 0.10, "peak")
        others = ("scalars", "tensor parallelism")
        sent = {kind: count for kind, count in found["sent"].items() if kind not in others}
        assert sent == {kind: count for kind, count in plan.sent.items() if kind not in others}
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

    for _ in range(2):
        step()
    engine.comm.traffic.clear()
    with measure_peak(model) as peak:
        step()
    sent = dict(engine.comm.traffic.bytes_sent)
    return {"resident": memory_report(model).state_bytes, "peak": peak.value, "sent": sent}


@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("qwen3", 1)])
def test_two_by_two_ranks_that_share_sequences(name, stage):
    plan = planned(name, stage, sp_size=2)
    for found in run_ranks(train_sequences, name, stage, 2, world_size=4)[:1]:
        near(found["resident"], plan.resident_bytes, 0.01, "at rest")
        near(found["peak"], plan.peak_bytes, 0.10, "peak")
        sent, exchanged = found["sent"], found["sent"].pop("hand_over")
        near(exchanged, plan.sent["sequences"], 0.001, "exchanged")  # 16 bytes more are planned
        others = ("scalars", "sequences")
        assert {kind: sent[kind] for kind in sent if kind not in others} == {
            kind: count for kind, count in plan.sent.items() if kind not in others
        }
