"""Losses and MLPs in tiles of tokens train as whole ones do: losses, norms, weights, at every stage."""

import copy
import functools
import pickle

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as tf

import hf_zero
from hf_zero.core import structure
from hf_zero.core.tiled_loss import tiled_loss_of
from hf_zero.errors import ZeroConfigError, ZeroRuntimeError
from tests.ranks.test_tensor_parallel import caplog_of
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import Net
from tests.support.reference import Plan, check_stages


_DECODER = {**zoo._DECODER, "head_dim": 8}
_CAPPED = {**_DECODER, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
_SCALED = {**_DECODER, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
FAMILIES = {
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, _CAPPED),
    "granite": (tf.GraniteForCausalLM, tf.GraniteConfig, _SCALED),
    "cohere": (tf.CohereForCausalLM, tf.CohereConfig, {**zoo._DECODER, "logit_scale": 0.3}),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config, zoo._DECODER),
    "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, zoo._DECODER),
    "opt": (
        tf.OPTForCausalLM,
        tf.OPTConfig,
        {**zoo._DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
}
LOSSES = ("llama", "llama_tied", "qwen3", "gemma", "gpt2", "mixtral", "qwen3_moe", "llava", *FAMILIES)
WITHOUT_MLPS = {"mixtral", "opt"}  # all experts, and linear layers that are parts of the layer itself


def build(name):
    if name not in FAMILIES:
        return zoo.build(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class, config, settings = FAMILIES[name]
        return model_class(config(**settings)).train()


def batch(name, rank, step):
    """Some labels do not count, others on each rank."""
    made = zoo.batch(name, rank, step)
    made["labels"][0, : 2 + rank] = -100
    return made


def check(name, *, plan=None, stages=(0, 1, 2, 3), prepare=lambda model: model, **config):
    unused = name in zoo.WITH_UNUSED_PARAMETERS
    check_stages(
        lambda: prepare(build(name)),
        functools.partial(batch, name),
        plan or Plan(accumulation=2),
        stages=stages,
        exact=False,
        config=config,
        ddp={"find_unused_parameters": unused},
    )


def _sampled(names, sample):
    return [name if name in sample else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", _sampled(LOSSES, ("llama_tied", "gemma2")))
@distributed(world_size=2)
def test_a_loss_in_tiles(name):
    check(name, stages=(1, 3), tile_loss=5)


def check_sizes(name, sizes, options):
    """Each size at one stage, by turns: how many tokens make a tile says nothing to those who gather and reduce."""
    for number, tokens in enumerate(sizes, LOSSES.index(name)):
        config = dict.fromkeys(options, tokens)
        check(name, plan=Plan(accumulation=2, clip=0.3), stages=(number % 4,), **config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOSSES)
@distributed(world_size=2)
def test_a_loss_in_tiles_of_any_size(name):
    check_sizes(name, (1, 3, 16, 1000), ["tile_loss"])


@pytest.mark.parametrize("name", _sampled(("llama", "qwen3", "gpt2", "phi3", "qwen3_moe"), ("gpt2", "qwen3_moe")))
@distributed(world_size=2)
def test_an_mlp_in_tiles(name):
    check(name, stages=(1, 3), tile_mlp=5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(LOSSES) - WITHOUT_MLPS))
@distributed(world_size=2)
def test_an_mlp_in_tiles_of_any_size(name):
    check_sizes(name, (1, 3, 16, 1000), ["tile_mlp", "tile_loss"])


@pytest.mark.parametrize("reentrant", _sampled([False, True], [False]))
@distributed(world_size=2)
def test_both_in_checkpointed_layers(reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    check("llama_tied", stages=(2, 3), prepare=prepare, tile_loss=3, tile_mlp=4)


@pytest.mark.parametrize("saved", _sampled([None, ["lm_head"]], [["lm_head"]]))
@distributed(world_size=2)
def test_adapters_on_the_head_and_in_mlps(saved):
    targets = ["q_proj", "down_proj"] + ([] if saved else ["lm_head"])

    def prepare(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved))

    check("llama", stages=(0, 3), prepare=prepare, tile_loss=3, tile_mlp=4)


def _uneven(name, rank, step):
    """Ranks have other numbers of tokens, and so of tiles."""
    made = batch(name, rank, step)
    return {key: value[:, : 8 - 3 * rank] for key, value in made.items()}


@distributed(world_size=2)
def test_ranks_with_other_numbers_of_tiles_make_the_same_collectives():
    config = {"tile_loss": 2, "tile_mlp": 2}
    build_one, batches = functools.partial(build, "llama_tied"), functools.partial(_uneven, "llama_tied")
    check_stages(build_one, batches, Plan(steps=4), exact=False, config=config, ddp={})


def _calls(tokens):
    """Collectives of the third step at stage 3, when the order is known, by kind."""
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.shard(model, optimizer, hf_zero.ZeroConfig(zero_stage=3, tile_loss=tokens, tile_mlp=tokens))
    for step in range(3):
        engine.comm.traffic.clear()
        engine.backward(model(**batch("llama", dist.get_rank(), step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return dict(engine.comm.traffic.calls), dict(engine.comm.traffic.bytes_sent)


@distributed(world_size=2)
def test_weights_are_gathered_and_reduced_once_for_all_tiles():
    whole, tiled, finer = _calls(0), _calls(8), _calls(2)
    assert whole == tiled == finer, (whole, tiled, finer)


def _engine(model, stage=3, **config):
    return hf_zero.shard(model, None, hf_zero.ZeroConfig(zero_stage=stage, **config))


@distributed(world_size=2)
def test_bf16_is_the_whole_loss_but_for_rounding():
    found = {}
    for tokens in (0, 3):
        model = build("llama_tied")
        engine = _engine(model, tile_loss=tokens, tile_mlp=tokens, mixed_precision="bf16")
        loss = model(**batch("llama_tied", dist.get_rank(), 0)).loss
        assert loss.dtype == torch.float32
        engine.backward(loss)
        found[tokens] = loss.item(), float(engine.clip_grad_norm_(1e9))
    assert found[0] == pytest.approx(found[3], rel=4e-3), found


@distributed(world_size=2)
def test_a_loss_is_asked_for_in_other_ways():
    ids = torch.arange(3, 27).view(2, 12)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    calls = {
        "items": {"labels": ids, "num_items_in_batch": torch.tensor(17)},
        "a count": {"labels": ids, "num_items_in_batch": 17},
        "shifted": {"labels": ids, "shift_labels": shifted},
        "ignored": {"labels": torch.where(ids % 5 == 0, 63, ids), "ignore_index": 63},
        "a tuple": {"labels": ids, "return_dict": False},
        "no label counts": {"labels": torch.full_like(ids, -100), "num_items_in_batch": 1},
    }
    whole, tiled = build("llama"), build("llama")
    engine = _engine(tiled, tile_loss=5)
    for what, kwargs in calls.items():
        theirs, ours = whole(ids, **kwargs)[0], tiled(ids, **kwargs)[0]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, msg=what)
    engine.backward(ours)  # a loss of nothing has a gradient of zero
    assert float(engine.clip_grad_norm_(1.0)) == 0


def test_who_asks_for_logits_gets_them_or_an_error(caplog):
    model, given = build("llama"), batch("llama", 0, 0)
    _engine(model, stage=0, tile_loss=5)
    output = model(**given)
    for read in (lambda: output.logits.argmax(-1), lambda: output.logits[:, -1]):
        with pytest.raises(ZeroRuntimeError, match="zero_tile_loss"):
            read()
    with torch.no_grad():
        assert model.eval()(**given).logits.shape == (2, 8, zoo.VOCAB)
    last = model.train()(**given, logits_to_keep=8)
    assert last.logits.shape == (2, 8, zoo.VOCAB)
    assert model(given["input_ids"]).logits.shape == (2, 8, zoo.VOCAB)
    assert "tile_loss has no effect" in caplog.text


@distributed(world_size=2)
def test_a_second_backward_through_one_loss_is_an_error():
    model = build("llama")
    _engine(model, stage=1, tile_loss=5)
    loss = model(**batch("llama", 0, 0)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ZeroRuntimeError, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize(
    "make, options, words",
    [
        (lambda: zoo.build("t5"), {"tile_loss": 4}, "T5ForConditionalGeneration is no decoder"),
        (lambda: zoo.build("bert"), {"tile_loss": 4}, "BertForSequenceClassification is no decoder"),
        (Net, {"tile_loss": 4}, "Net is no decoder"),
        (lambda: zoo.build("mixtral"), {"tile_mlp": 4}, "no layer of MixtralForCausalLM"),
    ],
)
def test_models_without_tiles_are_refused_by_name(make, options, words):
    with pytest.raises(ZeroConfigError, match=words):
        _engine(make(), stage=0, **options)


def test_models_with_a_loss_of_their_own_are_refused_by_name():
    config = tf.BartConfig(**zoo._BART, is_decoder=True, is_encoder_decoder=False)
    model = tf.BartForCausalLM(config)
    _engine(model, stage=0, tile_loss=4)
    with pytest.raises(ZeroConfigError, match="BartForCausalLM .* computes its loss by itself"):
        model(**zoo.batch("llama", 0, 0))


class Mixing(torch.nn.Module):
    """Looks like an MLP, and adds up tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 48), torch.nn.Linear(48, 32)

    def forward(self, x):
        return self.down(self.up(x).cumsum(-2))


def test_an_mlp_that_looks_at_other_tokens_is_left_alone_with_a_note(caplog):
    model = build("llama")
    model.model.layers[0].mlp = Mixing()
    given = batch("llama", 0, 0)
    whole = model(**given).loss
    _engine(model, stage=0, tile_mlp=3)
    torch.testing.assert_close(model(**given).loss, whole, atol=1e-6, rtol=0)
    assert "Mixing looks at several tokens" in caplog.text


@distributed(world_size=2)
def test_the_model_is_an_ordinary_one_again_and_so_are_copies():
    model = build("llama")
    kinds = [type(module) for module in model.modules()]
    engine = _engine(model, tile_loss=3, tile_mlp=3)
    assert tiled_loss_of(model) is not None and [type(m) for m in model.modules()] != kinds
    assert isinstance(model, tf.LlamaForCausalLM) and type(model).__name__ == "LlamaForCausalLM"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in twin.modules()] == kinds
        assert twin(**batch("llama", 0, 0)).logits is not None
    engine.undo()
    assert [type(module) for module in model.modules()] == kinds
    assert model(**batch("llama", 0, 0)).logits.shape[-1] == zoo.VOCAB


@pytest.mark.parametrize("size", _sampled([1000, 3000], [1000]))
@distributed(world_size=2)
def test_units_smaller_than_a_layer(size):
    check("llama_tied", stages=(3,), unit_size=size)
    check("qwen3_moe", stages=(3,), unit_size=size, tile_loss=5)


@distributed(world_size=2)
def test_units_smaller_than_a_layer_under_checkpoints_and_with_adapters():
    def prepare(model):
        torch.manual_seed(1)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        model.enable_input_require_grads()
        return model

    check("llama", stages=(3,), prepare=prepare, unit_size=1500)


def _most_unsharded(size):
    """Elements of the largest unit in a layer, how many there are of them, and what was whole at one time."""
    engine = _engine(build("llama"), unit_size=size, stage3_prefetch_bucket_size=0)
    layers = [unit for unit in engine.units if "layers" in unit.name]
    tally, most = layers[0]._unsharded, 0

    def note(unit, unshard):
        nonlocal most
        unshard()
        most = max(most, tally.numel)

    for unit in layers:
        unit.unshard = functools.partial(note, unit, unit.unshard)
    engine.backward(engine.model(**batch("llama", dist.get_rank(), 0)).loss)
    return max(unit.numel for unit in layers), len(layers), most


@distributed(world_size=2)
def test_a_layer_in_parts_is_never_whole():
    """A layer has 3,072 elements in attention, 4,608 in the MLP (3 matrices), 64 in norms; the last norm joins it."""
    whole, parts, single = map(_most_unsharded, (0, 4608, 2000))
    assert whole[:2] == (7776, 2) and parts[:2] == (4704, 4) and single[:2] == (1632, 14), (whole, parts, single)
    assert whole[2] >= 7776 and parts[2] < 7776 and single[2] < 4000, (whole, parts, single)


class Parts(torch.nn.Module):
    """A linear layer that is the sum of several, each over some of the inputs; no list, as those stay together."""

    def __init__(self, whole, number):
        super().__init__()
        for index, weight in enumerate(whole.weight.detach().chunk(number, 1)):
            part = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            part.weight = torch.nn.Parameter(weight.clone())
            self.add_module(f"part{index}", part)

    def forward(self, x):
        parts = list(self.children())
        return sum(part(y) for part, y in zip(parts, x.chunk(len(parts), -1), strict=True))


def _down_in_parts(model):
    for layer in model.model.layers:
        layer.mlp.down_proj = Parts(layer.mlp.down_proj, 4)
    return model


@distributed(world_size=2)
def test_an_operator_that_a_model_computes_in_parts_is_gathered_in_parts():
    check("llama", stages=(3,), prepare=_down_in_parts, unit_size=500)
    units = [unit for unit in _engine(_down_in_parts(build("llama")), unit_size=500).units if "down_proj" in unit.name]
    assert [unit.numel for unit in units] == [384] * 8, units


@distributed(world_size=2)
def test_parameters_that_are_larger_than_asked_for_are_named_once():
    with caplog_of(structure) as lines:
        _engine(build("llama"), unit_size=2048)
        hf_zero.shard(build("llama"), None, {"zero_stage": 2, "unit_size": 2000})
        assert lines == []
        _engine(build("llama"), unit_size=2000)
    says = "unit_size is 2000, but 2 parameter(s) have more elements ('model.embed_tokens.weight' 2048)"
    assert [says in line for line in lines] == [True] * (dist.get_rank() == 0), lines


@distributed(world_size=2)
def test_tiles_of_an_mlp_in_parts_are_refused():
    _engine(build("llama"), unit_size=4608, tile_mlp=4)
    with pytest.raises(ZeroConfigError, match="unit_size 2000"):
        _engine(build("llama"), unit_size=2000, tile_mlp=4)
