"""LoRA on quantised base weights: codes are sharded as they are, and train what one process does, to the bit."""

import copy
import functools
import operator

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import hf_zero
from hf_zero.errors import ZeroAccessError, ZeroCheckpointError
from hf_zero.planning.model import PlanError, skeleton
from tests.support import packed, zoo
from tests.support.harness import distributed
from tests.support.reference import ADAMW, SGD, STAGES, Plan, check_stages


def needing(kind):
    return pytest.param(kind, marks=pytest.mark.skipif(packed.is_missing(kind), reason="its library is not installed"))


KINDS = [*packed.LAYERS, *map(needing, packed.LIBRARY)]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
STAND_INS = pytest.mark.parametrize("kind", packed.LAYERS)


def build(kind):
    model = packed.quantise(zoo.build("llama"), kind)
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def of_trained(make, params):
    return make([param for param in params if param.requires_grad])


draw = functools.partial(zoo.batch, "llama")


def prepared(kind, stage, **config):
    model = build(kind)
    optimizer = of_trained(SGD, model.parameters())
    return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})


def loss_of(model):
    model.eval()
    with torch.no_grad():
        return model(**draw(0, 9)).loss.item()


# Codes that are taken for bf16 are nan here and there, which equal nothing.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "4bit_in_bf16"])
@distributed(world_size=2)
def test_adapters_train_as_under_ddp(kind):
    check_stages(
        functools.partial(build, kind), draw, Plan(accumulation=2), optimizer=functools.partial(of_trained, ADAMW)
    )


@EVERY_KIND
@distributed(world_size=2)
def test_a_rank_keeps_its_share_of_the_codes_and_nothing_else_of_them(kind):
    """The scales stay whole on every rank: they hang on the parameters as the libraries have it."""
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2))
    model = get_peft_model(packed.quantise(model, kind), LoraConfig(r=4, target_modules=["q_proj"]))
    codes = {name: param for name, param in model.named_parameters() if type(param) is not torch.nn.Parameter}
    total = sum(part.numel() for param in codes.values() for part in packed.stored(param))
    assert len(codes) == 2 * 7
    engine = hf_zero.shard(model, of_trained(SGD, model.parameters()), {"zero_stage": 3})
    engine.backward(model(**draw(0, 0)).loss)
    is_code = operator.methodcaller("startswith", tuple(codes))
    holding = [buffer for buffer in engine.buffers if any(map(is_code, buffer.names))]
    named = [each for buffer in holding for each in zip(buffer.names, buffer.params, strict=True)]
    norms = sum(param.nbytes for name, param in named if not is_code(name))  # where codes are of bf16
    kept = sum(weight.nbytes for buffer in holding for weight in buffer.kept_weights)
    assert kept == pytest.approx((total + norms) / 2, rel=0.01)
    assert all(buffer.unsharded.untyped_storage().nbytes() == 0 for buffer in holding)
    for module in model.modules():
        for held in (module, getattr(module, "state", None), *module._parameters.values()):
            for name, value in vars(held).items() if held is not None else ():
                if isinstance(value, torch.Tensor) and value.dtype in (torch.uint8, torch.int8):
                    with torch._C.DisableTorchFunctionSubclass():  # to look is not to read
                        assert value.untyped_storage().nbytes() == 0, f"{name} keeps the codes"


@EVERY_KIND
@distributed(world_size=2)
def test_evaluation_copies_and_an_undone_engine_see_the_same_weights(kind):
    wanted = loss_of(build(kind))
    for stage in STAGES:
        model, _, engine = prepared(kind, stage)
        assert loss_of(model) == pytest.approx(wanted, abs=1e-6), stage
        assert loss_of(model) == pytest.approx(wanted, abs=1e-6), "and again"
        twin = copy.deepcopy(model)
        assert loss_of(twin) == pytest.approx(wanted, abs=1e-6), stage
        assert loss_of(model) == pytest.approx(wanted, abs=1e-6), "after the copy"
        engine.undo()
        before = {name: type(param) for name, param in build(kind).named_parameters()}
        assert {name: type(param) for name, param in model.named_parameters()} == before
        assert {name: type(param) for name, param in twin.named_parameters()} == before
        assert loss_of(model) == pytest.approx(wanted, abs=1e-6), "undone"


@STAND_INS
@distributed(world_size=2)
def test_codes_are_neither_cast_nor_quantised_again(kind):
    for precision, again in (("bf16", False), ("fp16", False), ("bf16", True)):
        config = {"mixed_precision": precision, "zero_quantized_nontrainable_weights": again}
        model, optimizer, engine = prepared(kind, 3, **config)
        engine.backward(model(**draw(0, 0)).loss)
        optimizer.step()
        with hf_zero.gathered_parameters(model):
            for (name, mine), theirs in zip(model.named_parameters(), build(kind).parameters(), strict=True):
                if type(theirs) is not torch.nn.Parameter:
                    pairs = zip(packed.stored(mine), packed.stored(theirs), strict=True)
                    same = all(torch.equal(*pair) for pair in pairs)
                    assert mine.dtype == theirs.dtype and same, (precision, name)


@distributed(world_size=2)
def test_a_cast_of_the_model_that_would_change_codes_is_refused():
    model, _, _ = prepared("4bit_in_bf16", 3)
    with pytest.raises(ValueError, match="cannot make a prepared parameter of torch.bfloat16 .* one of torch.float16"):
        model.half()


@distributed(world_size=2)
def test_what_is_made_of_tensors_is_read_written_and_cast_from_outside_as_any_weight():
    for stage, access in ((2, "gather"), (3, "gather"), (3, "raise")):
        model, _, engine = prepared("tensors", stage, param_access=access)
        name = "base_model.model.model.layers.1.mlp.up_proj.weight"
        weight, before = model.get_parameter(name), build("tensors").get_parameter(name)
        shape, calls = weight.shape, engine.comm.traffic.calls["gather"]
        assert (shape, weight.dtype, weight.requires_grad) == (before.shape, before.dtype, False) and repr(model)
        assert engine.comm.traffic.calls["gather"] == calls, "nothing was read"
        if access == "raise":
            with pytest.raises(ZeroAccessError, match=r"reads parameter '.*layers.1.mlp.up_proj.weight"):
                weight @ torch.ones(shape[1], 1)
            continue
        assert torch.equal(weight @ torch.ones(shape[1], 1), before @ torch.ones(shape[1], 1)), stage
        with hf_zero.gathered_parameters([weight], write=True):
            weight.scale.bits.mul_(2)
        engine.backward(model(**draw(0, 0)).loss)  # lets go of it
        assert torch.equal(model.get_parameter(name).dequantize(), 2 * before.dequantize()), f"stage {stage}"
        model.to("cpu")
        with pytest.raises(ValueError, match="up_proj.weight|q_proj.* of torch.float32 one of torch.bfloat16"):
            model.bfloat16()
        with pytest.raises(PlanError, match="is quantised"):
            skeleton(model)


@distributed(world_size=2)
def test_a_layer_of_packed_weights_is_rebuilt_when_more_of_it_is_trained():
    for stage in STAGES:
        model, optimizer, engine = prepared("tensors", stage)
        norm = model.get_base_model().model.layers[0].input_layernorm.weight
        norm.requires_grad_(True)
        optimizer.add_param_group({"params": [norm]})
        before = norm.detach().clone()
        engine.backward(model(**draw(0, 0)).loss)
        optimizer.step()
        assert not torch.equal(norm.detach(), before), f"stage {stage}"
        engine.undo()
        kinds = [type(param) for param in build("tensors").parameters()]
        assert [type(param) for param in model.parameters()] == kinds, f"stage {stage}"


@distributed(world_size=2)
def test_files_of_tensors_of_tensors_are_left_to_their_library(tmp_path):
    model = packed.quantise(zoo.build("llama"), "tensors")
    hf_zero.shard(model, None, {"zero_stage": 3})
    with pytest.raises(ZeroCheckpointError, match="is a TensorOfTensors, whose library alone knows its files"):
        model.save_pretrained(tmp_path)
    twin = copy.deepcopy(model)
    for (name, theirs), mine in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert all(map(torch.equal, packed.stored(theirs), packed.stored(mine))), name


@distributed(world_size=2)
def test_packed_weights_cannot_be_trained():
    model = packed.quantise(zoo.build("llama"), "4bit_in_bf16")
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    with pytest.raises(TypeError, match="Params4bit cannot be trained.*train adapters"):
        hf_zero.shard(model, None, {"zero_stage": 3})


class Odd(torch.Tensor):
    """Nobody knows what it is made of."""


@pytest.mark.parametrize("is_trained", [True, False])
@distributed(world_size=2)
def test_other_tensors_of_tensors_are_refused_and_the_model_stays_as_it_was(is_trained):
    model = zoo.build("llama").requires_grad_(False)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(packed.TensorOfTensors.of(layer.weight), requires_grad=is_trained)
    if not is_trained:
        layer.weight.sums = layer.weight.sums.as_subclass(Odd)
    wanted, kinds = loss_of(model), [type(param) for param in model.parameters()]
    assert packed.TensorOfTensors in kinds
    for stage in STAGES:
        words = "trained" if is_trained else "sharded"
        with pytest.raises(TypeError, match=f"TensorOfTensors cannot be {words}: .*load the model without quant"):
            hf_zero.shard(model, None, {"zero_stage": stage})
        assert [type(param) for param in model.parameters()] == kinds, stage
        assert loss_of(model) == wanted, stage


@EVERY_KIND
@distributed(world_size=2)
def test_adapters_are_saved_as_without_hf_zero(kind, tmp_path):
    stock = build(kind)
    stock.save_pretrained(tmp_path / "stock", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    wanted = load_file(tmp_path / "stock" / "adapter_model.safetensors")
    for stage in (1, 3):
        model, _, engine = prepared(kind, stage)
        folder = tmp_path / f"{stage}-{engine.comm.rank}"
        model.save_pretrained(folder)
        ours = load_file(folder / "adapter_model.safetensors")
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[name], value) for name, value in wanted.items()), stage


@pytest.mark.parametrize("kind", list(map(needing, packed.LIBRARIES["bitsandbytes"])))
@distributed(world_size=2)
def test_the_base_is_saved_as_its_library_has_it(kind, tmp_path):
    """Codes, scales and what the library needs to read them again."""
    is_main = dist.get_rank() == 0
    if is_main:
        packed.quantise(zoo.build("llama"), kind).save_pretrained(tmp_path / "stock")
    for stage in (2, 3):
        model = packed.quantise(zoo.build("llama"), kind)
        hf_zero.shard(model, None, {"zero_stage": stage})
        model.save_pretrained(tmp_path / str(stage), is_main_process=is_main)
        dist.barrier()
        ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in (str(stage), "stock"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs), stage
