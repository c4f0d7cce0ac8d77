"""What holds on the code path of NCCL, at numbers of ranks that no test machine has: one process of a fake group."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.comm.communicator import Communicator
from hf_zero.comm.transport.nccl import Nccl
from hf_zero.core.placement import STAGES as STAGES_TABLE
from hf_zero.core.schedule import Phase
from hf_zero.core.unit import UnitState
from tests.ranks.test_guard_counts import Run, check_traffic, python_calls
from tests.support.fake_group import Dispatched, fake_group
from tests.support.happens_before import Compute, Section
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.networks import Spare
from tests.support.recorder import record


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FP32 = ("no", "fp32", False)
BF16 = ("bf16", "bf16", False)
DETERMINISTIC = ("no", "fp32", True)
WIRES = pytest.mark.parametrize("precision, wire, deterministic", [FP32, BF16, DETERMINISTIC])


def prepared(stage, net=Net, **config):
    model = seeded(functools.partial(net, depth=4))()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})


def step(model, optimizer, engine, number=0):
    micro(model, batches(0, number), engine.backward)
    optimizer.step()
    optimizer.zero_grad()


# -- collectives ------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("precision, wire, ranks", [("no", "fp32", 8), ("bf16", "fp32", 4), ("bf16", "bf16", 4)])
@distributed(world_size=1)
def test_collectives_and_bytes_of_a_step(stage, precision, wire, ranks):
    with fake_group(ranks):
        check_traffic(stage, 1, False, precision, wire)
        if stage:
            check_traffic(stage, 4, False, precision, wire)
        if stage > 1:
            check_traffic(stage, 4, True, precision, wire)


@STAGES
@WIRES
@distributed(world_size=1)
def test_what_is_counted_is_what_torch_is_asked_for(stage, precision, wire, deterministic):
    with fake_group(8):
        run = Run(
            stage, mixed_precision=precision, communication_data_type=wire, deterministic_reduce=deterministic
        ).settle()
        with Dispatched() as dispatched:
            run.window()
        counted = dict(run.engine.comm.traffic.calls)
    direct = (precision, wire, deterministic) == FP32
    names = {
        "all_gather": "_allgather_base_",
        "reduce_scatter": "_reduce_scatter_base_" if direct else "alltoall_",
        "all_reduce": "allreduce_",
        "scalars": "allreduce_",
    }
    assert dispatched.collectives == {names[kind]: number for kind, number in counted.items()}, (
        dispatched.collectives,
        counted,
    )


@STAGES
@distributed(world_size=1)
def test_a_step_costs_the_host_the_same_at_any_number_of_ranks(stage):
    costs = {}
    for ranks in (4, 64):
        with fake_group(ranks):
            run = Run(stage).settle()
            with Dispatched() as dispatched:
                run.window()
            dispatched.operations.pop("_foreach_mul_", 0)  # of clipping: by how much depends on the values
            costs[ranks] = sum(dispatched.operations.values()), sum(python_calls(run.window).values())
    assert costs[4] == costs[64], costs


@STAGES
def test_no_collective_is_given_memory_of_the_host(stage):
    """The meta device stands for one whose memory alone the group can send; other memory is refused, as by NCCL."""

    def program(recording):
        with torch.device("meta"):
            model = Spare(depth=3)
        body = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("head")])
        head = torch.optim.SGD(model.head.parameters(), lr=0.1)
        engine = recording.shard(model, body, zero_stage=stage)
        engine.attach_optimizer(head)
        x = torch.randn(2, 4, device="meta")
        engine.clip_grad_norm_(1.0)  # there are no gradients
        for _ in range(2):
            with engine.no_sync():
                engine.backward(model(x).sum())
            engine.backward(model(x).sum())
            engine.clip_grad_norm_(1.0, norm_type=float("inf"))
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()
            engine.clip_grad_norm_(1.0)
        head.step()
        with hf_zero.gathered_parameters(model, write=True):
            assert model.head.weight.shape == (3, 8)
        assert model.head.weight.sum().device.type == "meta"
        engine.undo()

    logs = record(program, device="meta")
    assert len(logs[0]) > 100


def _looks_at_the_device(fused=False, **config):
    """How often the host waits for a value of the device in two steps."""

    def program(recording):
        model = seeded(functools.partial(Spare, depth=3))()
        kind = functools.partial(torch.optim.AdamW, fused=True) if fused else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        engine = recording.shard(model, optimizer, **config)
        engine.control.late = engine.scaler is None  # as on a device that is not the host itself
        recording.section("training")
        for number in range(2):
            step(model, optimizer, engine, number)

    log = record(program)[0]
    begin = next(index for index, event in enumerate(log) if isinstance(event, Section))
    return sum(isinstance(event, Compute) and event.name == "_local_scalar_dense" for event in log[begin:])


@STAGES
def test_the_host_does_not_wait_for_the_device(stage):
    """Optimizers that leave a step out by themselves are told by the device; of others, and in fp16, the host asks."""
    assert _looks_at_the_device(zero_stage=stage) == 0
    assert _looks_at_the_device(zero_stage=stage, mixed_precision="bf16", fused=True) == 0
    assert _looks_at_the_device(zero_stage=stage, mixed_precision="bf16") == 2
    assert _looks_at_the_device(zero_stage=stage, mixed_precision="fp16", fused=True, initial_scale_power=0) == 2


# -- between passes ---------------------------------------------------------------------------------------------------


@STAGES
@WIRES
@distributed(world_size=1)
def test_nothing_is_held_after_backward(stage, precision, wire, deterministic):
    with fake_group(4):
        model, optimizer, engine = prepared(
            stage, mixed_precision=precision, communication_data_type=wire, deterministic_reduce=deterministic
        )
        for number in range(3):
            micro(model, batches(0, number), engine.backward)
            gradients = [gradient for unit in engine.units for gradient in unit.gradients]
            assert not any(gradient.held or gradient.is_reducing for gradient in gradients)
            assert not any(p.grad_fn or p.is_sparse for p in model.parameters())
            for unit in engine.units:
                for buffer in unit.buffers:
                    nbytes = buffer.unsharded.untyped_storage().nbytes()
                    assert nbytes == (0 if stage == 3 else buffer.layout.padded_numel * buffer.unsharded.itemsize)
            owned = sum(master.grad.nbytes for master in engine.masters)
            whole = 4 * sum(buffer.layout.padded_numel for buffer in engine.buffers)
            assert owned == (whole if stage == 0 else whole // 4)
            optimizer.step()
            optimizer.zero_grad()
            assert not any(master.grad is not None for master in engine.masters)


@STAGES
@distributed(world_size=1)
def test_phases(stage):
    with fake_group(4):
        model, optimizer, engine = prepared(stage)
        seen = []
        model.layers[1].register_forward_hook(lambda *_: seen.append(engine.schedule.phase))
        model.layers[1].register_full_backward_pre_hook(lambda *_: seen.append(engine.schedule.phase))
        step(model, optimizer, engine)
        assert seen == [Phase.FORWARD, Phase.BACKWARD], seen
        assert engine.schedule.phase is Phase.IDLE
        for failing in (model.layers[2].register_forward_pre_hook, model.layers[2].register_full_backward_pre_hook):
            handle = failing(_fail)
            with pytest.raises(InterruptedError):
                step(model, optimizer, engine)
            handle.remove()
            step(model, optimizer, engine, 1)
            assert engine.schedule.phase is Phase.IDLE


def _fail(*_):
    raise InterruptedError


# -- reads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=1)
def test_the_refresh_goes_on_beside_until_a_parameter_is_read(stage):
    """After a step the gathers of replicated weights are under way; a read waits for its own unit's only."""
    with fake_group(4):
        model, optimizer, engine = prepared(stage)
        step(model, optimizer, engine)
        assert {unit.state for unit in engine.units} == {UnitState.GATHERING}
        gathers = engine.comm.traffic.calls["all_gather"]
        assert model.layers[1].up.weight.isfinite().all()
        ready = [unit.name for unit in engine.units if unit.state is UnitState.READY]
        assert ready == ["layers.1"], ready
        with torch.no_grad():
            model(batches(0, 1)[0])
        assert {unit.state for unit in engine.units} == {UnitState.READY}
        assert engine.comm.traffic.calls["all_gather"] == gathers


@distributed(world_size=1)
def test_a_read_gathers_one_unit_and_metadata_none():
    with fake_group(4):
        model, optimizer, engine = prepared(3)
        step(model, optimizer, engine)
        gathers = engine.comm.traffic.calls["all_gather"]
        weight = model.layers[1].up.weight
        assert weight.shape == (12, 8) and weight.dtype == torch.float32 and "sharded" in repr(weight)
        assert engine.comm.traffic.calls["all_gather"] == gathers
        kept = weight.detach()
        assert engine.comm.traffic.calls["all_gather"] == gathers + 1
        ready = [unit.name for unit in engine.units if unit.state is not UnitState.RESTING]
        assert ready == ["layers.1"], ready
        step(model, optimizer, engine, 1)
        assert kept.isfinite().all(), "the alias of a read outlives the pass"
        assert not any(unit.state is UnitState.READY for unit in engine.units)


@distributed(world_size=1)
def test_frozen_and_trained_parameters_of_a_unit_are_waited_for_together():
    class Half(Net):
        def __init__(self, **options):
            super().__init__(**options)
            self.layers.requires_grad_(False)
            for layer in self.layers:
                layer.adapter = nn.Parameter(torch.ones(8))
                layer.register_forward_hook(lambda layer, args, out: out * layer.adapter)

    with fake_group(4):
        model, optimizer, engine = prepared(3, net=Half)
        assert [len(unit.buffers) for unit in engine.units] == [1, 2, 2, 2, 2, 1]
        for number in range(3):
            step(model, optimizer, engine, number)
        engine.comm.traffic.clear()
        micro(model, batches(0, 3), engine.backward)
        # The first unit is not needed in backward, the last is kept from forward, the layers come twice.
        assert engine.comm.traffic.calls == {"all_gather": 10 + 8, "reduce_scatter": 6}, engine.comm.traffic.calls


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=1)
def test_a_transport_that_is_handed_in_is_used_by_one_rank_too(stage):
    """The GPU tests rely on it: one process is enough for NCCL to run collectives."""
    with fake_group(1):
        comm = Communicator(Nccl(dist.group.WORLD))
        model, stock = seeded(functools.partial(Net, depth=4))(), seeded(functools.partial(Net, depth=4))()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, stock)]
        engine = hf_zero.shard(model, optimizers[0], {"zero_stage": stage}, group=comm)
        with Dispatched() as dispatched:
            step(model, optimizers[0], engine)
        assert dispatched.collectives["_allgather_base_"] and dispatched.collectives["_reduce_scatter_base_"]
        assert engine.placements == STAGES_TABLE[stage]
        micro(stock, batches(0, 0), torch.Tensor.backward)
        optimizers[1].step()
        for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
            assert torch.equal(mine.detach(), theirs)
