"""`from_pretrained` inside `zero_init` gives the weights of a plain load, and no rank ever holds them all."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel

import hf_zero
from hf_zero.checkpoint import saving
from hf_zero.core.deferred import DeferredParameter
from hf_zero.errors import ZeroCheckpointError
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


def _load(name, folder, **options):
    with hf_zero.zero_init({"zero_stage": 3}, **options.pop("init", {})):
        return type(zoo.build(name)).from_pretrained(folder, **options)


def _check_family(tmp_path, build):
    """What `from_pretrained` gives inside `zero_init` is what it gives outside: names, dtypes, values, saved bytes."""
    if dist.get_rank() == 0:
        build(1).save_pretrained(tmp_path, max_shard_size="20KB")
    dist.barrier()
    for dtype in (torch.float32, torch.bfloat16):
        plain = type(build(0)).from_pretrained(tmp_path, dtype=dtype)
        with hf_zero.zero_init({"zero_stage": 3}):
            model = type(plain).from_pretrained(tmp_path, dtype=dtype)
        assert all(isinstance(param, DeferredParameter) for param in model.parameters())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        params = dict(model.named_parameters())
        hf_zero.shard(model, None, {"zero_stage": 3})
        assert all(params[n] is p for n, p in model.named_parameters())
        found = saving.consolidated_state_dict(model, keep=True)
        for key, tensor in plain.state_dict().items():
            assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), f"{dtype}: {key}"
        for (key, tensor), (_, ours) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
            assert torch.equal(tensor, ours), f"buffer {key}"
        model.save_pretrained(tmp_path / f"again-{dtype}")
        dist.barrier()
        if dist.get_rank() == 0:
            from tests.ranks.test_saving import check_same_folder

            plain.save_pretrained(tmp_path / f"plain-{dtype}")
            check_same_folder(tmp_path / f"again-{dtype}", tmp_path / f"plain-{dtype}")


@pytest.mark.parametrize("name", zoo.NAMES)
@distributed(world_size=2)
def test_every_family_loads_as_on_one_process(tmp_path, name):
    _check_family(tmp_path, functools.partial(zoo.build, name))


class _SmallShapesConfig(PreTrainedConfig):
    model_type = "small_shapes"


class _SmallShapes(PreTrainedModel):
    """Parameters and buffers of one element and of none, beside an ordinary one."""

    config_class = _SmallShapesConfig

    def __init__(self, config):
        super().__init__(config)
        shapes = {"scalar": (), "one": (1,), "one_by_one": (1, 1), "empty": (0,), "rowless": (0, 3), "matrix": (5, 7)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
            self.register_buffer(f"{name}_buffer", torch.zeros(shape))
        self.linear = torch.nn.Linear(3, 1)
        self.post_init()


def _small(name, seed):
    """Models with parameters of one element, whose values the seed decides."""
    makes = {
        "small shapes": lambda: _SmallShapes(_SmallShapesConfig()),
        "clip": lambda: tf.CLIPModel(tf.CLIPConfig(projection_dim=8, text_config=_TEXT, vision_config=zoo._VISION)),
        "siglip": lambda: tf.SiglipModel(tf.SiglipConfig(text_config=_TEXT, vision_config=zoo._VISION)),
        "regression": lambda: tf.BertForSequenceClassification(tf.BertConfig(**{**zoo._BERT, "num_labels": 1})),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = makes[name]()
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.normal_()
    return model


_TEXT = {**zoo._ENCODER, "vocab_size": zoo.VOCAB, "max_position_embeddings": 32}


@pytest.mark.parametrize("name", ["small shapes", "clip", "siglip", "regression"])
@distributed(world_size=2)
def test_parameters_of_one_element_and_of_none_load_as_on_one_process(tmp_path, name):
    _check_family(tmp_path, functools.partial(_small, name))


@distributed(world_size=2)
def test_weights_that_a_converter_computes(tmp_path, monkeypatch):
    """Files of a transposed layout: these weights are read whole, and are right."""
    import transformers.modeling_utils
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    def mapping(*args, **kwargs):
        return [WeightConverter(["mlp.down.weight"], ["mlp.down_proj.weight"], operations=[Transpose(0, 1)])]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    monkeypatch.setattr(transformers.modeling_utils, "get_model_conversion_mapping", mapping)
    if dist.get_rank() == 0:
        zoo.build("llama", seed=1).save_pretrained(tmp_path)
    dist.barrier()
    model = _load("llama", tmp_path)
    assert not isinstance(model.model.layers[0].mlp.down_proj.weight, DeferredParameter)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DeferredParameter)
    hf_zero.shard(model, None, {"zero_stage": 3})
    found = saving.consolidated_state_dict(model, keep=True)
    for key, tensor in zoo.build("llama", seed=1).state_dict().items():
        assert torch.equal(found[key], tensor), key


@distributed(world_size=2)
def test_a_missing_weight_is_an_error_unless_it_is_allowed(tmp_path):
    from transformers import LlamaForSequenceClassification

    if dist.get_rank() == 0:
        zoo.build("llama", seed=1).save_pretrained(tmp_path)
    dist.barrier()
    with pytest.raises(ZeroCheckpointError, match=r"lack 'score.weight', which would start from random values"):
        with hf_zero.zero_init({"zero_stage": 3}):
            LlamaForSequenceClassification.from_pretrained(tmp_path)
    torch.manual_seed(dist.get_rank())
    with hf_zero.zero_init({"zero_stage": 3}, allow_missing=[r"^score\."]):
        model = LlamaForSequenceClassification.from_pretrained(tmp_path)
    hf_zero.shard(model, None, {"zero_stage": 3})
    heads = [None, None]
    with hf_zero.gathered_parameters(model):
        dist.all_gather_object(heads, model.score.weight.detach().clone())
    assert torch.equal(*heads) and heads[0].std() > 0
    # Outside of the block transformers is as it was.
    plain = type(zoo.build("llama")).from_pretrained(tmp_path)
    assert type(plain.lm_head.weight) is torch.nn.Parameter


@distributed(world_size=2)
def test_other_stages_load_as_always(tmp_path):
    if dist.get_rank() == 0:
        zoo.build("llama", seed=1).save_pretrained(tmp_path)
    dist.barrier()
    with hf_zero.zero_init({"zero_stage": 2}):
        model = type(zoo.build("llama")).from_pretrained(tmp_path)
    assert type(model.lm_head.weight) is torch.nn.Parameter


def _train_from(folder, deferred, adapters):
    from transformers import AutoModelForCausalLM

    from tests.support.trainers import make_trainer

    torch.manual_seed(0)
    with hf_zero.zero_init({"zero_stage": 3 if deferred else 0}):
        model = AutoModelForCausalLM.from_pretrained(folder)
    if adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
        base = [param for name, param in model.named_parameters() if "lora" not in name]
        still = [isinstance(param, DeferredParameter) for param in base]
        assert all(still) if deferred else not any(still)
    trainer = make_trainer("llama", 3, folder / "run", model=model, max_steps=2, learning_rate=0.1)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("adapters", (False, True))
@distributed(world_size=2)
def test_training_goes_as_after_a_plain_load(tmp_path, adapters):
    if dist.get_rank() == 0:
        zoo.build("llama", seed=1).save_pretrained(tmp_path)
    dist.barrier()
    losses = [_train_from(tmp_path, deferred, adapters) for deferred in (False, True)]
    assert losses[0] == losses[1] and len(losses[0]) > 1, losses


@distributed(world_size=2)
def test_what_is_used_before_prepare_is_right(tmp_path):
    """Reading, writing and copying work as on any model; tied weights that are both in the files are tied."""
    import copy

    from safetensors.torch import load_file, save_file

    wanted = zoo.build("llama_tied", seed=1)
    if dist.get_rank() == 0:
        wanted.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        if Version(tf.__version__) >= Version("5.4"):  # 5.3 leaves such weights untied, as one process would have them
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    model = _load("llama_tied", tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    twin = copy.deepcopy(model)
    assert torch.equal(model.model.norm.weight, wanted.model.norm.weight)
    with torch.no_grad():
        for changed in (model, wanted):
            changed.model.layers[0].mlp.up_proj.weight.mul_(2)
    hf_zero.shard(model, None, {"zero_stage": 3})
    found = saving.consolidated_state_dict(model, keep=True)
    for key, tensor in wanted.state_dict().items():
        assert torch.equal(found[key], tensor), key
    for key, tensor in zoo.build("llama_tied", seed=1).state_dict().items():
        assert torch.equal(twin.state_dict()[key], tensor), key


# ------------------------------------------------------------------------------------------------------------- memory


def _resident():
    """Bytes of memory of this process, pages of mapped files left out."""
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1]) * 1024


def _big_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8
    )


def _save_big(folder):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(_big_config()).save_pretrained(folder, max_shard_size="50MB")


def _load_and_watch(folder):
    """The peak of this rank's memory over what it had before, sampled by a thread, and what stays of it."""
    import threading

    from transformers import LlamaForCausalLM

    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], _resident())

    begin = _resident()
    thread = threading.Thread(target=watch)
    thread.start()
    with hf_zero.zero_init({"zero_stage": 3}):
        model = LlamaForCausalLM.from_pretrained(folder)
    hf_zero.shard(model, None, {"zero_stage": 3})
    done.set()
    thread.join()
    largest = max(param.numel() * 4 for param in model.parameters())
    return peak[0] - begin, _resident() - begin, sum(param.numel() * 4 for param in model.parameters()), largest


@pytest.mark.parametrize("ranks", (2, 4))
def test_no_rank_holds_the_model_while_it_loads(tmp_path, ranks):
    run_ranks(_save_big, tmp_path, world_size=1)
    for used, stays, size, largest in run_ranks(_load_and_watch, tmp_path, world_size=ranks):
        # What Python and the collectives need besides, whatever the size of the model.
        overhead = 24 * 2**20
        numbers = used / 2**20, stays / 2**20, size / 2**20, largest / 2**20
        assert used <= 1.1 * size / ranks + largest + overhead, numbers
        assert stays <= 1.02 * size / ranks + overhead, numbers
        assert stays >= size / ranks, "the slices themselves were not seen"
