"""Models that transformers shares out while it loads them, or that zero_init loads, train and are saved as others."""

import math

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_zero
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroConfigError
from hf_zero.parallel.tensor_parallel import share_out
from tests.ranks.test_memory import batch, check_bytes, live_bytes
from tests.ranks.test_memory import build as build_large
from tests.support import sequences, zoo
from tests.support.harness import run_ranks
from tests.support.reference import SGD
from tests.support.tensor_models import EXPAND, needs_shared_layers, whole_weights


def _train(model, config, width, steps=2):
    optimizer = SGD(model.parameters())
    engine = hf_zero.shard(model, optimizer, config)
    assert width == 1 or any(isinstance(param, DTensor) for param in model.parameters())
    for step in range(steps):
        engine.backward(model(**zoo.batch("llama", dist.get_rank() // width, step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return engine


def _from_pretrained(source, target, how):
    config = {"zero_stage": 3}
    if how == "distributed_config":
        model = AutoModelForCausalLM.from_pretrained(
            source, distributed_config=transformers.DistributedConfig(tp_size=2)
        )
    elif how == "distributed_config under zero_init":
        with hf_zero.zero_init(config):
            model = AutoModelForCausalLM.from_pretrained(
                source, distributed_config=transformers.DistributedConfig(tp_size=2)
            )
    elif how == "zero_init":
        config["tp_size"] = 2
        with hf_zero.zero_init(config):
            model = AutoModelForCausalLM.from_pretrained(source)
    else:
        model = AutoModelForCausalLM.from_pretrained(source)
    width = 1 if how == "plain" else 2
    engine = _train(model.train(), config, width)
    engine.save_model(target)
    return whole_weights(model)


HOWS = [
    "zero_init",
    "distributed_config",
    pytest.param("distributed_config under zero_init", marks=pytest.mark.exhaustive),
]


@needs_shared_layers
@pytest.mark.parametrize("how", HOWS)
def test_loaded_models_train_and_are_saved_alike(how, tmp_path, monkeypatch):
    zoo.build("llama_tied").save_pretrained(tmp_path / "stock")
    (theirs,) = run_ranks(_from_pretrained, tmp_path / "stock", tmp_path / "theirs", "plain", world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ours = run_ranks(_from_pretrained, tmp_path / "stock", tmp_path / "ours", how, world_size=2)[0]
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=0, atol=1e-6), name
    files = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == files
    for name in files - {"model.safetensors"}:
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text(), name


def _shard_loaded(source):
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=transformers.DistributedConfig(tp_size=2))
    with pytest.raises(ZeroConfigError, match="k_proj' of LlamaForCausalLM makes 1 head.*set tp_size to 1, or"):
        hf_zero.shard(model, None, {"zero_stage": 3})


@needs_shared_layers
def test_heads_that_were_cut_while_loading_are_refused(tmp_path, monkeypatch):
    sequences.build(keys=1).save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    run_ranks(_shard_loaded, tmp_path, world_size=2)


def _read_and_keep(source):
    """Bytes that a rank reads of a model's files, those that it keeps of the model, and both as they should be."""
    read = [0]
    stock = SlicedFile.read

    def counting(self, path, parts, *args, **kwargs):
        parts = list(parts)
        read[0] += sum(target.nbytes for _, _, target in parts)
        stock(self, path, parts, *args, **kwargs)

    SlicedFile.read = counting
    before, config = live_bytes(), {"zero_stage": 3, "tp_size": 2}
    with hf_zero.zero_init(config):
        model = AutoModelForCausalLM.from_pretrained(source)
    engine = hf_zero.shard(model, None, config)
    loaded = read[0]
    kept = live_bytes() - before
    engine.backward(model(**batch(model)).loss)  # what was read is a model
    params = dict(model.named_parameters())
    shared = {name for name, param in params.items() if isinstance(param, DTensor)}
    whole = 4 * sum(math.prod(param.shape) for name, param in params.items() if name not in shared)
    parts = 4 * sum(math.prod(params[name].shape) for name in shared) // 2
    return loaded, kept, whole + parts


@needs_shared_layers
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_a_rank_reads_its_part_of_the_files_and_keeps_its_slice(ranks, tmp_path, monkeypatch):
    build_large().save_pretrained(tmp_path / "stock")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for loaded, kept, part in run_ranks(_read_and_keep, tmp_path / "stock", world_size=ranks):
        assert loaded == part, (loaded, part)
        check_bytes(kept, part * 2 / ranks, "after preparing")


@pytest.mark.parametrize("name", ["apply_tensor_parallelism", EXPAND])  # 5.3 has neither, and 5.21 the first
def test_releases_that_share_out_otherwise_are_refused(name, monkeypatch):
    if hasattr(PreTrainedModel, EXPAND):
        from transformers.distributed import tensor_parallel

        model_class = next(cls for cls in PreTrainedModel.__mro__ if EXPAND in vars(cls))
        monkeypatch.delattr(model_class if name == EXPAND else tensor_parallel, name)
    with pytest.raises(ZeroConfigError, match=r"\(5.23 does\), and this is \d.*: update it, or remove tp_size"):
        share_out(zoo.build("llama"), None)
