"""`ZeroTRLMixin` before other TRL trainers, pushes of weights to vLLM, and what is refused."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.generation.vllm_generation import VLLMGeneration

from hf_zero.core.engine import engine_of
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.transformers import ZeroArgumentsMixin
from hf_zero.trl import ZeroGRPOConfig, ZeroTRLMixin
from tests.support.harness import distributed
from tests.support.trl_runs import (
    CONVERSATIONS,
    compare,
    digit_share,
    make,
    make_grpo,
    outcome,
    policy,
    prompts,
)


class ZeroDPO(ZeroTRLMixin, DPOTrainer):
    pass


class ZeroKTO(ZeroTRLMixin, KTOTrainer):
    pass


class ZeroReward(ZeroTRLMixin, RewardTrainer):
    pass


class ZeroRLOO(ZeroTRLMixin, RLOOTrainer):
    pass


@dataclass
class ZeroDPOConfig(ZeroArgumentsMixin, DPOConfig):
    pass


@dataclass
class ZeroKTOConfig(ZeroArgumentsMixin, KTOConfig):
    pass


@dataclass
class ZeroRewardConfig(ZeroArgumentsMixin, RewardConfig):
    pass


@dataclass
class ZeroRLOOConfig(ZeroArgumentsMixin, RLOOConfig):
    pass


def _preferences():
    return Dataset.from_list(
        [
            {"prompt": ask[:1], "chosen": ask[1:], "rejected": other[1:]}
            for ask, other in zip(CONVERSATIONS, CONVERSATIONS[1:], strict=False)
        ]
    )


def _labelled():
    return Dataset.from_list(
        [
            {"prompt": messages[:1], "completion": messages[1:], "label": number % 3 != 0}
            for number, messages in enumerate(CONVERSATIONS)
        ]
    )


def _scorer():
    torch.manual_seed(0)
    return LlamaForSequenceClassification(policy(num_labels=1).config)


DPO = (DPOTrainer, DPOConfig, ZeroDPO, ZeroDPOConfig)
KTO = (KTOTrainer, KTOConfig, ZeroKTO, ZeroKTOConfig)
REWARD = (RewardTrainer, RewardConfig, ZeroReward, ZeroRewardConfig)
RLOO = (RLOOTrainer, RLOOConfig, ZeroRLOO, ZeroRLOOConfig)


def _run(kind, stage, folder):
    options = {"max_length": 64}
    if kind == RLOO:
        options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    data = {DPO: _preferences, KTO: _labelled, REWARD: _preferences, RLOO: prompts}[kind]()
    others = {"reward_funcs": [digit_share]} if kind == RLOO else {}
    model = _scorer() if kind == REWARD else str(folder.parent / "base")
    if kind in (DPO, KTO):
        others["ref_model"] = policy(seed=1)
    return outcome(make(kind, stage, folder, model=model, data=data, others=others, max_steps=2, **options), folder)


@pytest.mark.parametrize("kind", [DPO, KTO, REWARD, RLOO], ids=["dpo", "kto", "reward", "rloo"])
@distributed(world_size=2)
def test_equals_stock(tmp_path, kind):
    if torch.distributed.get_rank() == 0:
        policy().save_pretrained(tmp_path / "base")
    torch.distributed.barrier()
    stock = _run(kind, None, tmp_path / "stock")
    for stage in (2, 3):
        compare(_run(kind, stage, tmp_path / f"stage{stage}"), stock, f"stage {stage}")


def test_distillation_is_refused():
    module = pytest.importorskip("trl.trainer.distillation_trainer", reason="this TRL has no such trainer")

    class ZeroDistillation(ZeroTRLMixin, module.DistillationTrainer):
        pass

    with pytest.raises(ZeroConfigError, match="DistillationTrainer is not supported: .* teacher's replies instead"):
        ZeroDistillation("student", "teacher")


class Receiver:
    """Stands in for a vLLM server, which needs a GPU: it keeps what is pushed to it."""

    def __init__(self, engine):
        self.engine, self.received, self.most_whole, self.resets = engine, {}, 0, 0

    def update_named_param(self, name, value):  # so TRL 1.6 does, one by one
        self.update_named_params([(name, str(value.dtype).removeprefix("torch."), list(value.shape))], [(name, value)])

    def update_named_params(self, metadata, params):
        for (name, dtype, shape), (pushed, value) in zip(metadata, params, strict=True):
            assert (name, dtype, shape) == (pushed, str(value.dtype).removeprefix("torch."), list(value.shape))
            self.received[name] = value.clone()
            whole = sum(not unit.sharded or unit.state.value == "ready" for unit in self.engine.units)
            self.most_whole = max(self.most_whole, whole)

    def reset_prefix_cache(self):
        self.resets += 1


def _push(trainer):
    """What `trainer` pushes, through TRL's own code and our backend in its place."""
    generation = VLLMGeneration.__new__(VLLMGeneration)  # building it starts vLLM
    receiver = Receiver(engine_of(trainer.model))
    generation.model, generation.accelerator, generation._dist = trainer.model, trainer.accelerator, trainer._dist
    generation.mode, generation.enable_sleep_mode = "server", False
    generation._weight_metadata, generation.vllm_client = None, receiver
    generation.sync_weights()
    return receiver


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_push_to_vllm(tmp_path, stage):
    trainer = make_grpo(stage, tmp_path / "run", model=policy(num_hidden_layers=4), max_steps=1)
    trainer.train()
    gathers = trainer.accelerator._engines()[0].comm.traffic.calls["all_gather"]
    receiver = _push(trainer)
    gathers = trainer.accelerator._engines()[0].comm.traffic.calls["all_gather"] - gathers
    expected = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        assert receiver.received.keys() == expected.keys() and receiver.resets == 1
        for name, value in expected.items():
            assert torch.equal(receiver.received[name], value), name
    units = engine_of(trainer.model).units
    if stage == 3:
        buffers = sum(len(unit.buffers) for unit in units)
        # TRL 1.6 walks over the weights once, newer releases twice: to describe them, and to send them.
        assert gathers in (buffers, 2 * buffers), f"{gathers} gathers for walks over {buffers} buffers"
        if trainer.accelerator.is_main_process:
            assert receiver.most_whole == 1, f"{receiver.most_whole} units were whole at once"
    trainer.train()  # goes on as if nothing had happened


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_push_of_merged_lora(tmp_path, stage):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    trainer = make_grpo(stage, tmp_path / "run", others={"peft_config": lora}, max_steps=2)
    trainer.train()
    before = trainer.accelerator.get_state_dict(trainer.model)
    receiver = _push(trainer)
    after = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        assert not any("lora" in name for name in receiver.received)
        key = "base_model.model.model.layers.0.self_attn.q_proj."
        delta = 2.0 * before[key + "lora_B.default.weight"] @ before[key + "lora_A.default.weight"]
        assert delta.abs().max() > 1e-4, "the adapter has not trained"
        merged = receiver.received["model.layers.0.self_attn.q_proj.weight"]
        torch.testing.assert_close(merged, before[key + "base_layer.weight"] + delta)
        if stage == 3:  # bit for bit, where taking the adapter out again would round
            assert all(torch.equal(after[name], value) for name, value in before.items())
        else:
            assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in before.items())


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"gather_for_generation": "some"}, "choose one of auto, all, none"),
        ({"gather_for_generation": "all", "ds3_gather_for_generation": False}, "leave the latter out"),
    ],
)
def test_bad_choices_of_gathering(tmp_path, arguments, words):
    with pytest.raises(ZeroConfigError, match=words):
        ZeroGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=2, **arguments)


@distributed(world_size=2)
def test_gathering_keeps_to_the_memory(tmp_path):
    """`auto` gathers what fits into half of the memory that the poorer rank has left."""
    trainer = make_grpo(3, tmp_path, model=policy(num_hidden_layers=4))
    trainer.accelerator.prepare(trainer.model)
    units = engine_of(trainer.model).units
    sizes = [sum(buffer.unsharded.numel() * 4 for buffer in unit.buffers) for unit in units]
    free = {0: 1e12, 1: 2.0 * sum(sizes[:3])}[trainer.accelerator.process_index]
    with mock.patch("hf_zero.integrations.trl._free_bytes", return_value=free):
        with trainer._dist.summon_full_params(trainer.model):
            whole = [unit.state.value == "ready" for unit in units]
            assert whole == [True] * 3 + [False] * (len(units) - 3), whole
            assert trainer.model._is_fsdp_managed_module, "the rest is gathered in lockstep"
    with trainer._dist.summon_full_params(trainer.model):
        assert all(unit.state.value == "ready" for unit in units)
        assert not trainer.model._is_fsdp_managed_module
    assert trainer.model._is_fsdp_managed_module
    assert not any(unit.state.value == "ready" for unit in units)


@distributed(world_size=2)
def test_reward_model_from_a_language_model(tmp_path):
    """Given by name, it gets a head that its files lack."""
    if torch.distributed.get_rank() == 0:
        policy().save_pretrained(tmp_path / "base")
    torch.distributed.barrier()
    options = {"max_length": 64, "max_steps": 1, "data": _preferences(), "model": str(tmp_path / "base")}
    trainer = make(REWARD, 3, tmp_path / "run", **options)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
