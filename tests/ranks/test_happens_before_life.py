"""What happens between passes hangs and overruns nothing, while gathers of the last step may still be under way."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import hf_zero
from tests.support import zoo
from tests.support.happens_before import problems
from tests.support.nets import Net, batches
from tests.support.networks import diverge
from tests.support.recorder import record


class Life:
    """A network that trains on one rank; ranks lack gradients of different parameters."""

    def __init__(self, recording, stage, transport, build=Net, **config):
        torch.manual_seed(0)
        self.model = build()
        diverge(self.model)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.engine = recording.shard(self.model, self.optimizer, zero_stage=stage, transport=transport, **config)
        self.stage, self.number = stage, 0

    def loss(self):
        self.number += 1
        if hasattr(self.model, "config"):
            return self.model(**self.batch()).loss
        x, y = batches(dist.get_rank(), self.number)
        return F.cross_entropy(self.model(x), y)

    def batch(self):
        return zoo.batch("llama", dist.get_rank(), self.number)

    def step(self, factor=1.0):
        self.engine.backward(self.loss() * factor)
        self.optimizer.step()
        self.optimizer.zero_grad()


def parameters_thaw_and_freeze(start):
    def build():
        net = Net(depth=4)
        net.layers.requires_grad_(False)
        return net

    life = start(build=build)
    for layers in (False, True, False):
        life.model.layers.requires_grad_(layers)
        life.step()
        life.step()


def the_engine_is_undone(start):
    life = start()
    life.step()
    life.engine.undo()
    life.loss().backward()


def states_are_saved_and_loaded(start):
    life = start()
    life.step()
    state = life.optimizer.state_dict()
    life.step()
    life.optimizer.load_state_dict(state)
    life.step()
    life.model.load_state_dict({name: value.clone() for name, value in life.model.state_dict().items()})
    life.step()


def gradients_are_read_and_written(start):
    life = start()
    for _ in range(2):
        with life.engine.no_sync():
            life.engine.backward(life.loss())
        assert life.model.layers[1].up.weight.grad.isfinite().all()
        life.engine.backward(life.loss())
        weight = life.model.layers[2].up.weight
        weight.grad = weight.grad * 2
        life.engine.clip_grad_norm_(1.0)
        life.optimizer.step()
        life.optimizer.zero_grad()


def a_group_is_added(start):
    def build():
        net = Net(depth=4)
        net.head.requires_grad_(False)
        return net

    life = start(build=build)
    life.step()
    life.model.head.requires_grad_(True)
    life.optimizer.add_param_group({"params": list(life.model.head.parameters())})
    life.step()
    life.step()


def weights_are_read_and_written(start):
    life = start()
    for _ in range(3):
        with torch.no_grad():
            life.model.layers[1].up.weight.mul_(1.01)
        life.model.head.bias.data.fill_(0.1)
        with hf_zero.gathered_parameters(life.model.layers[2], write=True):
            life.model.layers[2].up.weight.data.fill_(0.1)
        life.step()
        kept = life.model.layers[0].up.weight.detach()
        life.step()
        if (
            life.stage == 3
        ):  # a replicated weight is brought up to date in place: its aliases are for the parameter's use
            assert kept.isfinite().all()
        assert life.model.layers[0].up.weight.isfinite().all()


def text_is_generated(start):
    life = start(build=functools.partial(zoo.build, "llama"))
    for _ in range(2):
        life.model.generate(life.batch()["input_ids"][:, :3], max_new_tokens=3, do_sample=False)
        life.step()


def embeddings_are_resized(start):
    life = start(build=functools.partial(zoo.build, "llama"))
    life.step()
    life.model.resize_token_embeddings(80, mean_resizing=False)
    life.step()


def steps_are_skipped(start):
    life = start(mixed_precision="fp16")
    for factor in (1.0, float("nan"), 1.0):
        life.step(factor)


def backward_fails(start):
    life = start()
    life.step()
    hook = life.model.layers[2].up.weight.register_hook(_fail)
    with pytest.raises(InterruptedError):
        life.step()
    hook.remove()
    life.step()
    life.step()


def _fail(grad):
    raise InterruptedError


def sums_are_dropped(start):
    life = start()
    for _ in range(2):
        with life.engine.no_sync():
            life.engine.backward(life.loss())
        life.optimizer.zero_grad()
        life.step()


PROGRAMS = [
    parameters_thaw_and_freeze,
    the_engine_is_undone,
    states_are_saved_and_loaded,
    gradients_are_read_and_written,
    a_group_is_added,
    weights_are_read_and_written,
    text_is_generated,
    embeddings_are_resized,
    steps_are_skipped,
    backward_fails,
    sums_are_dropped,
]


def _check(program, stage, transport):
    def run(recording):
        program(functools.partial(Life, recording, stage, transport))

    found = problems(record(run))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_interleaving_hangs_or_overruns_where(program, stage):
    _check(program, stage, "nccl")


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["nccl", "messages", "reads"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_interleaving_of_any_transport_hangs_or_overruns_where(program, stage, transport):
    _check(program, stage, transport)
