"""A plain torch loop saves and resumes its training: `engine.save_checkpoint` and `engine.load_checkpoint`."""

import collections
import logging
import math
import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint import commit, loading
from hf_zero.errors import ZeroCheckpointError
from tests.integration.test_save_state import no_space
from tests.ranks.test_checkpoint_faults import _die_at
from tests.ranks.test_saving import _convert
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


ROWS = 8


class Net(torch.nn.Module):
    """Draws from all generators, and has what is no trained parameter."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        noise = random.random() + np.random.rand() + torch.rand(1)
        return torch.nn.functional.dropout(self.layers(x), 0.3).square().mean() * (1 + noise)


def llama(seed):
    return zoo.build("llama", seed)


class Loop:
    """A training loop whose batches are numbered; each rank takes its rows of every batch."""

    def __init__(self, stage, make=llama, make_optimizer=torch.optim.AdamW, seed=0, **config):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = make(seed)
        self.optimizer = make_optimizer([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.engine = hf_zero.shard(self.model, self.optimizer, {"zero_stage": stage, **config})
        self.step = 0
        # The generators of each rank have states of their own.
        torch.manual_seed(10 + self.rank)
        random.seed(self.rank)
        np.random.seed(self.rank)

    def loss(self):
        generator = torch.Generator().manual_seed(self.step)
        mine = slice(self.rank * ROWS // self.world_size, (self.rank + 1) * ROWS // self.world_size)
        if isinstance(self.model, Net):
            return self.model(torch.randn(ROWS, 8, generator=generator)[mine])
        ids = torch.randint(3, zoo.VOCAB, (ROWS, zoo.LENGTH), generator=generator)[mine]
        return self.model(input_ids=ids, labels=ids).loss

    def train(self, steps):
        """The mean losses over ranks."""
        losses = []
        for _ in range(steps):
            loss = self.loss()
            self.engine.backward(loss)
            self.engine.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            mean = loss.detach().double()
            dist.all_reduce(mean)
            losses.append(mean.item() / self.world_size)
        return losses

    def save(self, folder):
        self.engine.save_checkpoint(folder, {"step": self.step, "scheduler": self.scheduler.state_dict()})

    def load(self, folder):
        state = self.engine.load_checkpoint(folder)
        self.step = state["step"]
        self.scheduler.load_state_dict(state["scheduler"])
        return self


def _save_and_go_on(folder, stage, **config):
    loop = Loop(stage, **config)
    loop.train(3)
    loop.save(folder)
    return loop.train(3)


def _go_on(folder, stage, **config):
    return Loop(stage, seed=1, **config).load(folder).train(3)


@pytest.mark.parametrize("target, ranks", [(3, 2), (2, 2), (0, 2), (3, 1), (1, 4), (3, 4)])
def test_it_goes_on_at_another_stage_and_number_of_ranks(tmp_path, target, ranks):
    whole = run_ranks(_save_and_go_on, tmp_path / "saved", 3)[0]
    resumed = run_ranks(_go_on, tmp_path / "saved", target, world_size=ranks)[0]
    apart = max(abs(a - b) for a, b in zip(whole, resumed, strict=True))
    assert apart <= (0 if (target, ranks) == (3, 2) else 1e-6), (whole, resumed)


@pytest.mark.parametrize(
    "config", [{"mixed_precision": "bf16"}, {"mixed_precision": "fp16", "initial_scale_power": 4}]
)
@distributed(world_size=2)
def test_it_goes_on_in_16_bits(tmp_path, config):
    whole = _save_and_go_on(tmp_path / "saved", 3, **config)
    assert _go_on(tmp_path / "saved", 1, **config) == whole


@distributed(world_size=2)
def test_any_module_with_its_buffers_frozen_weights_and_random_numbers(tmp_path):
    loop = Loop(3, make=Net)
    loop.train(3)
    loop.save(tmp_path / "saved")
    before = [{name: value.detach().clone() for name, value in loop.model.state_dict().items()}]
    dist.broadcast_object_list(before)  # the running means of rank 0 are saved
    whole = loop.train(3)
    again = Loop(3, make=Net, seed=1).load(tmp_path / "saved")
    torch.testing.assert_close(dict(again.model.state_dict()), before[0], rtol=0, atol=0)
    assert again.train(3) == whole
    assert (tmp_path / "saved/model.safetensors").is_file() and not (tmp_path / "saved/config.json").exists()


def with_adapters(seed):
    """On the same base."""
    from peft import LoraConfig, get_peft_model

    base = llama(0)
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


@distributed(world_size=2)
def test_adapters(tmp_path):
    whole = _save_and_go_on(tmp_path / "saved", 3, make=with_adapters)
    assert _go_on(tmp_path / "saved", 3, make=with_adapters) == whole
    assert (tmp_path / "saved/adapter_config.json").is_file()


def computed(seed):
    """Its files hold weights that a converter computes."""
    return _convert(llama(seed))


def computed_and_frozen(seed):
    model = computed(seed)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    return model


@distributed(world_size=2)
def test_weights_that_the_files_hold_in_another_form(tmp_path):
    """Those that are trained have masters; others could not be read back, which is said and not left out."""
    whole = _save_and_go_on(tmp_path / "saved", 3, make=computed)
    assert _go_on(tmp_path / "saved", 2, make=computed) == whole
    loop = Loop(3, make=computed_and_frozen)
    with pytest.raises(
        ZeroCheckpointError, match="'model.layers.0.mlp.down_proj.weight' is not trained, and the files"
    ):
        loop.save(tmp_path / "frozen")
    assert not (tmp_path / "frozen").exists()
    with pytest.raises(ZeroCheckpointError, match="down.weight' stands there in a form that is computed from weights"):
        loading.load_weights(loop.model, tmp_path / "saved", loop.engine.comm)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@distributed(world_size=2)
def test_the_folder_is_a_hugging_face_folder(tmp_path, mixed_precision):
    loop = Loop(3, mixed_precision=mixed_precision)
    loop.train(1)
    loop.save(tmp_path / "saved")
    loop.model.save_pretrained(tmp_path / "plain", is_main_process=loop.rank == 0)
    dist.barrier()
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes(), path.name
    assert os.listdir(tmp_path).count("uncommitted") == 0


# ------------------------------------------------------------------------------------------------ the loop's own state


@distributed(world_size=2)
def test_what_the_loop_gives_comes_back(tmp_path):
    engine = Loop(2).engine
    shared = torch.arange(6.0)
    given = {
        "numbers": [1, -2.5, math.inf, True, None],
        "tuple": (1, ("a", ())),
        5: {(0, "x"): "tuples and numbers are keys"},
        "tensors": {"whole": shared, "part": shared[2:4], "turned": shared.view(2, 3).t(), "none": torch.empty(0)},
        "dtypes": [torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.uint8)],
        "scalar": torch.tensor(3.5),
        "empty": {},
    }
    engine.save_checkpoint(tmp_path / "saved", given if dist.get_rank() == 0 else None)
    found = engine.load_checkpoint(tmp_path / "saved")
    torch.testing.assert_close(found.pop("tensors"), given.pop("tensors"), rtol=0, atol=0)
    torch.testing.assert_close(found.pop("dtypes"), given.pop("dtypes"), rtol=0, atol=0)
    assert found.pop("scalar").item() == given.pop("scalar").item()
    assert found == given, found


@distributed(world_size=2)
def test_mappings_come_back_as_dicts_and_nothing_may_be_given(tmp_path):
    engine = Loop(2).engine
    engine.save_checkpoint(tmp_path / "saved", collections.OrderedDict(a=collections.Counter("aab")))
    assert engine.load_checkpoint(tmp_path / "saved") == {"a": {"a": 2, "b": 1}}
    engine.save_checkpoint(tmp_path / "saved")
    assert engine.load_checkpoint(tmp_path / "saved") == {}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"a": [0, {"b": np.ones(2)}]}, r"client_state\['a'\]\[1\]\['b'\] is a ndarray"),
        ({"optimizer": object()}, r"client_state\['optimizer'\] is a object, which cannot be saved without pickle"),
        ({frozenset(): 1}, r"the key frozenset\(\) of client_state is a frozenset"),
    ],
)
@distributed(world_size=2)
def test_what_needs_pickle_is_refused_before_anything_is_written(tmp_path, given, words):
    engine = Loop(2).engine
    with pytest.raises(ZeroCheckpointError, match=f"rank 0 of 2 failed: TypeError: {words}"):
        engine.save_checkpoint(tmp_path / "saved", given)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("asynchronous", [False, True])
@distributed(world_size=2)
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, asynchronous):
    loop, folder = Loop(3, async_save=asynchronous), tmp_path / "saved"
    loop.train(2)
    loop.save(folder)
    loop.engine.wait_for_checkpoint()
    expected, working = loop.train(3), os.pwrite
    if loop.rank == 1:
        os.pwrite = no_space
    with pytest.raises(ZeroCheckpointError, match="rank 1 of 2 failed: .*No space left"):
        loop.save(folder)
        loop.engine.wait_for_checkpoint()
    os.pwrite = working
    dist.barrier()
    assert os.listdir(tmp_path) == ["saved"], os.listdir(tmp_path)
    assert loop.load(folder).train(3) == expected
    loop.save(folder)
    loop.engine.wait_for_checkpoint()
    commit.check_tensors(folder)


def _save_and_die(folder, rank, call):
    loop = Loop(3)
    loop.train(1)
    loop.save(folder)
    loop.train(1)
    count = _die_at(rank, call)
    loop.save(folder)
    return count[0]


def _losses():
    loop = Loop(3)
    return loop.train(6)


def test_a_rank_that_is_killed_while_saving_leaves_one_or_the_other(tmp_path):
    whole = run_ranks(_losses)[0]
    totals = run_ranks(_save_and_die, str(tmp_path / "whole/saved"), 0, -1)
    draw = random.Random(5)
    points = [(rank, draw.randint(1, totals[rank])) for rank in (0, 1, 0)] + [(0, totals[0] - k) for k in range(4)]
    for number, (rank, call) in enumerate(points):
        folder = tmp_path / str(number) / "saved"
        with pytest.raises(pytest.fail.Exception):
            run_ranks(_save_and_die, str(folder), rank, call)
        losses = run_ranks(_go_on, str(folder), 3)[0]
        assert losses in (whole[1:4], whole[2:5]), f"killed at operation {call} of rank {rank}: neither was read"


@distributed(world_size=2)
def test_training_goes_on_while_a_thread_writes(tmp_path):
    loop = Loop(3, async_save=True)
    loop.train(3)
    loop.save(tmp_path / "saved")
    whole = loop.train(3)
    loop.engine.wait_for_checkpoint()
    assert _go_on(tmp_path / "saved", 3) == whole


@distributed(world_size=2)
def test_what_does_not_fit_or_is_damaged_is_named_on_all_ranks(tmp_path):
    loop, folder = Loop(3), tmp_path / "saved"
    loop.train(1)
    loop.save(folder)
    with pytest.raises(ZeroCheckpointError, match="holds the state of AdamW, this run's optimizer is SGD"):
        Loop(3, make_optimizer=torch.optim.SGD).engine.load_checkpoint(folder)
    with pytest.raises(ZeroCheckpointError, match="does not fit the model"):
        Loop(3, make=Net).engine.load_checkpoint(folder)
    with pytest.raises(ZeroCheckpointError, match="nowhere was not saved completely, or not by hf_zero"):
        loop.engine.load_checkpoint(tmp_path / "nowhere")
    dist.barrier()
    if loop.rank == 0:
        path = folder / "client_state.safetensors"
        path.write_bytes(path.read_bytes().replace(b"scheduler", b"SCHEDULER"))
    dist.barrier()
    with pytest.raises(ZeroCheckpointError, match="client_state.safetensors is damaged"):
        loop.load(folder)


def _load_of_the_trainer(folder):
    from tests.ranks.test_checkpoint import trainer_for

    trainer = trainer_for(folder, 3, 3, per_device_train_batch_size=2)
    trainer.train()
    model = type(trainer.model).__bases__[-1](trainer.model.config)
    bare = [param for name, param in model.named_parameters() if "norm" in name]
    rest = [param for name, param in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": bare}])
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 1})
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_zero.integrations.plain_checkpoints").addHandler(handler)
    assert engine.load_checkpoint(folder + "/checkpoint-3") == {}
    for ours, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs.detach())
    return lines


def test_a_checkpoint_of_the_trainer_is_read_and_what_it_lacks_is_said(tmp_path):
    for rank, lines in enumerate(run_ranks(_load_of_the_trainer, str(tmp_path))):
        assert any(f"has no random state of rank {rank}" in line for line in lines), lines
