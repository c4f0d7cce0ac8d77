"""Models built inside `zero_init` have the weights of a plain construction with the same seed; no rank holds them."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.checkpoint import saving
from hf_zero.core.deferred import DeferredParameter
from hf_zero.lazy_init.recorder import Recorder
from hf_zero.lazy_init.replay import heap
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


def _twins(make, seed=7):
    """The model as one process builds it, and as a recorder does; the generator must be where it would be."""
    torch.manual_seed(seed)
    plain = make()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with Recorder():
        ours = make()
    assert torch.equal(torch.get_rng_state(), state), "other random numbers were drawn"
    return plain, ours


def _compare(plain, ours):
    state = torch.get_rng_state()
    theirs = dict(plain.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(theirs)
    for name, param in ours.named_parameters():
        assert param.dtype == theirs[name].dtype and param.requires_grad == theirs[name].requires_grad, name
        assert torch.equal(param, theirs[name]), name
    for (name, buffer), (_, theirs) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, theirs), name
    assert torch.equal(torch.get_rng_state(), state), "making values has moved the generator"


def _deferred(model):
    return [name for name, param in model.named_parameters() if isinstance(param, DeferredParameter)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_family(name, dtype):
    model_class, config, settings = zoo._MODELS[name]
    plain, ours = _twins(lambda: model_class._from_config(config(**settings), dtype=dtype))
    assert len(_deferred(ours)) == len(list(plain.parameters()))
    _compare(plain, ours)


class _Odd(nn.Module):
    """Initialisers of all kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(33, 17)
        self.embedding = nn.Embedding(29, 5, padding_idx=2)
        self.attention = nn.MultiheadAttention(12, 3)
        self.ones = nn.Parameter(torch.ones(3, 7))
        self.drawn = nn.Parameter(torch.randn(19, 3) * 0.1)
        self.unsharded = nn.Parameter(torch.full((5,), 2.5), requires_grad=False)
        self.late = nn.Parameter(torch.empty(40, 41))
        self.register_buffer("noise", torch.randn(4))
        nn.init.trunc_normal_(self.late, std=1.0, a=-1.0, b=1.0)
        self.ortho = nn.Parameter(torch.empty(9, 9))
        nn.init.orthogonal_(self.ortho)
        self.own = nn.Parameter(torch.empty(6, 6).uniform_(generator=torch.Generator().manual_seed(3)))
        self.linear.weight.data.mul_(2).add_(self.linear.bias.data[:, None])
        self.linear.bias.data = torch.rand(17) + 1
        with torch.no_grad():
            self.embedding.weight[3:5].normal_(mean=float(self.linear.weight.mean()))
            self.attention.out_proj.weight.copy_(self.attention.in_proj_weight[:12])
            self.attention.in_proj_weight.normal_()
        self.shared = self.linear.weight


def test_initialisers_of_all_kinds():
    plain, ours = _twins(_Odd)
    assert ours.shared is ours.linear.weight
    assert len(_deferred(ours)) == len(list(plain.parameters())), _deferred(ours)
    _compare(plain, ours)


class _Kept(nn.Module):
    """Values that leave torch, aliases that stay, and copies."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.array = self.first.weight.detach().numpy()
        self.second = nn.Linear(8, 8)
        self.alias = self.second.weight.data
        self.third = copy.deepcopy(self.second)
        self.fourth = nn.Parameter(torch.empty(3))
        self.fourth.data.numpy()[:] = 5
        self.fifth = nn.Linear(8, 8)
        self.fifth.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
        weight = self.second.weight
        del self.second.weight
        self.second.weight = weight


def test_what_cannot_be_made_again_is_whole():
    plain, ours = _twins(_Kept)
    assert _deferred(ours) == ["first.bias", "second.bias", "fifth.bias"]
    assert torch.equal(ours.alias, plain.alias) and (ours.array == plain.array).all()
    _compare(plain, ours)
    torch.nn.init.normal_(ours.second.weight)
    assert torch.equal(ours.alias, ours.second.weight)


class _Untouched(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.linear = nn.Linear(4, 1)


def test_a_parameter_that_nothing_initialises_keeps_its_memory():
    """There is nothing that could be done again: whatever is read later must stay the same."""
    _, ours = _twins(_Untouched)
    assert _deferred(ours) == ["linear.weight", "linear.bias"]
    assert ours.weight.untyped_storage().nbytes() == 64 and torch.equal(ours.weight, ours.weight.clone())


def test_a_copy_of_a_model_without_values():
    plain, ours = _twins(lambda: zoo.build("gpt2"))
    twin = copy.deepcopy(ours)
    assert len(_deferred(twin)) == len(_deferred(ours)) > 0
    _compare(plain, twin)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "bert"])
@distributed(world_size=2)
def test_shards_are_those_of_rank_0_whatever_the_seeds(name):
    torch.manual_seed(7)
    plain = zoo._MODELS[name][0](zoo._MODELS[name][1](**zoo._MODELS[name][2]))
    torch.manual_seed(7 + dist.get_rank())
    with hf_zero.zero_init({"zero_stage": 3}):
        model = zoo._MODELS[name][0](zoo._MODELS[name][1](**zoo._MODELS[name][2]))
    if dist.get_rank() == 1:
        next(model.parameters()).sum()  # a look on one rank
    engine = hf_zero.shard(model, None, {"zero_stage": 3})
    found = saving.consolidated_state_dict(model, keep=True)
    for key, tensor in plain.state_dict().items():
        assert torch.equal(found[key], tensor), key
    assert engine.comm.traffic.bytes_sent["all_gather"] > 0


def _train(folder, deferred, stage):
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.support.trainers import make_trainer

    torch.manual_seed(0)
    config = LlamaConfig(**zoo._DECODER)
    with hf_zero.zero_init({"zero_stage": 3 if deferred else 0}):
        model = AutoModelForCausalLM.from_config(config)
    assert bool(_deferred(model)) == deferred
    trainer = make_trainer("llama", stage, folder, model=model, max_steps=2, learning_rate=0.1)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@distributed(world_size=2)
def test_training_goes_as_after_a_plain_construction(tmp_path):
    losses = [_train(tmp_path, deferred, 3) for deferred in (False, True)]
    assert losses[0] == losses[1] and len(losses[0]) > 1, losses


def _build_and_watch():
    """The peak of this rank's memory over what it had before, sampled by a thread."""
    from transformers import LlamaForCausalLM

    from tests.integration.test_loading_pretrained import _big_config, _resident

    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], _resident())

    heap.has_freed(2**30)  # what is free already does not count
    begin = _resident()
    thread = threading.Thread(target=watch)
    thread.start()
    with hf_zero.zero_init({"zero_stage": 3}):
        model = LlamaForCausalLM(_big_config())
    hf_zero.shard(model, None, {"zero_stage": 3})
    done.set()
    thread.join()
    largest = max(param.numel() * 4 for param in model.parameters())
    return peak[0] - begin, sum(param.numel() * 4 for param in model.parameters()), largest


def test_no_rank_holds_the_model_while_it_is_built():
    for used, size, largest in run_ranks(_build_and_watch, world_size=4):
        # What Python and the collectives need besides, whatever the size of the model.
        overhead = 24 * 2**20
        assert used <= 1.1 * size / 4 + largest + overhead, (used / 2**20, size / 2**20, largest / 2**20)
        assert used >= size / 4, "the slices themselves were not seen"
