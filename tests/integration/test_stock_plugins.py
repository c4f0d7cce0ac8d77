"""Plugin objects for DeepSpeed and FSDP that a script hands to a stock Accelerator configure the adopted ranks."""

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.core.deferred import DeferredParameter
from tests.integration.test_adoption import loop, start
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


def deepspeed_loop(plugin_of, config, **options):
    start(config)
    accelerator = Accelerator(deepspeed_plugin=plugin_of(), **options)
    later = Accelerator()
    model = accelerator.prepare(zoo.build("llama"))
    stages = [made.zero_plugin.config.zero_stage for made in (accelerator, later)]
    steps = accelerator.gradient_accumulation_steps
    return stages, steps, model._zero_engine.config.zero_stage


def three():
    return DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2)


def steps_only():
    return DeepSpeedPlugin(gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    "plugin_of, config, stage",
    [(three, {"zero_stage": 2}, 3), (three, {"zero_stage": 0}, 3), (steps_only, {"zero_stage": 1}, 1)],
    ids=["over the launcher's stage", "where the launcher asks for none", "the launcher's stage where it has none"],
)
def test_what_a_deepspeed_plugin_says_holds_for_this_accelerator_and_later_ones(plugin_of, config, stage):
    assert run_ranks(deepspeed_loop, plugin_of, config) == [([stage] * 2, 2, stage)] * 2


def fsdp_loop(strategy):
    start({"zero_stage": 1})
    return loop(None, fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy=strategy))


def test_a_loop_with_an_fsdp_plugin_trains_as_under_ddp():
    stock, ours = run_ranks(loop, None)[0], run_ranks(fsdp_loop, "FULL_SHARD")[0]
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(stock[0]), rtol=0, atol=1e-6)
    assert ours[1:] == (4, True, True)


@distributed(world_size=2)
def test_models_are_loaded_in_slices_once_a_plugin_of_stage_three_is_in_use(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path)
    torch.distributed.barrier()
    start({"zero_stage": 2})
    Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(isinstance(param, DeferredParameter) for param in model.parameters())


@distributed(world_size=1)
def test_what_cannot_be_carried_out_names_the_field():
    start({"zero_stage": 2})
    changed, extended = three(), three()
    changed.zero_stage = 1
    assert Accelerator(deepspeed_plugin=changed).zero_plugin.config.zero_stage == 1
    extended.deepspeed_config["zero_optimization"]["overlap_comm"] = True
    for plugins, said in [
        ({"deepspeed_plugin": extended}, "deepspeed_config was changed after the plugin was made"),
        ({"deepspeed_plugin": DeepSpeedPlugin(enable_msamp=True)}, "DeepSpeedPlugin: enable_msamp is True"),
        ({"deepspeed_plugins": {"student": three(), "teacher": three()}}, "all its models train under one"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(ignored_modules="head")}, "Plugin: ignored_modules is 'head'"),
    ]:
        with pytest.raises(ValueError, match=said):
            Accelerator(**plugins)
    with pytest.raises(ValueError, match="and zero_plugin= were given: keep one"):
        hf_zero.ZeroAccelerator(deepspeed_plugin=three(), zero_plugin=hf_zero.ZeroPlugin())
    with pytest.raises(ValueError, match="gradient_accumulation_steps differs between its sources"):
        Accelerator(deepspeed_plugin=three(), gradient_accumulation_steps=4)


@distributed(world_size=1)
def test_outside_of_adopted_ranks_a_plugin_is_refused():
    with pytest.raises(ValueError, match="DeepSpeedPlugin cannot be combined with ZeroAccelerator: pass its settings"):
        hf_zero.ZeroAccelerator(deepspeed_plugin=three())
