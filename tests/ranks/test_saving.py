"""What a prepared model saves is what one process would write, byte for byte, and nothing is gathered for it."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.model_folder import save_folder
from hf_zero.errors import ZeroCheckpointError, ZeroRuntimeError
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


def digests(folder):
    files = {path.name: path for path in Path(folder).iterdir() if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


def check_same_folder(ours, stock):
    ours, stock = digests(ours), digests(stock)
    assert ours.keys() == stock.keys(), (sorted(ours), sorted(stock))
    different = [name for name in stock if ours[name] != stock[name]]
    assert not different, f"{different} differ"


def twin_of(name, dtype=torch.float32):
    """What a single process holds: weights in the dtype that the prepared model computes in, buffers as they are."""
    model = zoo.build(name)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


@pytest.mark.parametrize("name", zoo.NAMES)
@distributed(world_size=2)
def test_every_file_equals_the_one_of_a_single_process(tmp_path, name):
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
        model = zoo.build(name)
        engine = hf_zero.shard(model, None, {"zero_stage": 3, "mixed_precision": precision})
        gathers = engine.comm.traffic.calls["all_gather"]
        for size in ("50GB", "20KB"):
            folder = tmp_path / f"{precision}-{size}"
            model.save_pretrained(folder / "ours", max_shard_size=size)
            if dist.get_rank() == 0:
                twin_of(name, dtype).save_pretrained(folder / "stock", max_shard_size=size)
                check_same_folder(folder / "ours", folder / "stock")
                assert size == "50GB" or len(list((folder / "ours").glob("model-*.safetensors"))) > 1
        assert engine.comm.traffic.calls["all_gather"] == gathers, "weights were gathered to save them"


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gpt2", "t5"])
@distributed(world_size=2)
def test_one_rank_writes_what_it_has_whole_without_a_copy_of_it(tmp_path, name, monkeypatch):
    """At stages 1 and 2 any rank may save alone, as sharded weights are saved: by pieces of the weights themselves.

    Only a checkpoint's marker holds checksums, so none are computed for a model.
    """
    for stage, precision in ((1, "no"), (2, "bf16")):
        model, folder = zoo.build(name), tmp_path / f"stage{stage}"
        hf_zero.shard(model, None, {"zero_stage": stage, "mixed_precision": precision})
        if dist.get_rank() == 0:
            twin_of(name, torch.bfloat16 if precision == "bf16" else torch.float32).save_pretrained(folder / "stock")
            monkeypatch.setattr("transformers.modeling_utils.safe_save_file", _refuse)
            monkeypatch.setattr("hf_zero.checkpoint.checksum.Checksums.add", _refuse)
            for _ in range(2):  # into what is there, too
                model.save_pretrained(folder / "ours")
            monkeypatch.undo()
            check_same_folder(folder / "ours", folder / "stock")
        dist.barrier()


def _refuse(*args, **kwargs):
    raise AssertionError("transformers was to write the weights, or a checksum to be computed")


@distributed(world_size=2)
def test_what_only_transformers_can_save_it_saves_at_stage_2(tmp_path):
    model = _convert(zoo.build("llama"))
    hf_zero.shard(model, None, {"zero_stage": 2})
    model.save_pretrained(tmp_path / "ours", is_main_process=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        _convert(zoo.build("llama")).save_pretrained(tmp_path / "stock")
        check_same_folder(tmp_path / "ours", tmp_path / "stock")


def _convert(model):
    """A converter that computes: it stands for those that transpose or permute weights."""
    from transformers.core_model_loading import Transpose, WeightConverter

    converter = WeightConverter(["mlp.down.weight"], ["mlp.down_proj.weight"], [Transpose(0, 1)])
    model._weight_conversions = [converter]
    return model


@distributed(world_size=2)
def test_weights_that_a_converter_computes(tmp_path):
    model = _convert(zoo.build("llama"))
    hf_zero.shard(model, None, {"zero_stage": 3})
    model.save_pretrained(tmp_path / "ours")
    if dist.get_rank() == 0:
        _convert(zoo.build("llama")).save_pretrained(tmp_path / "stock")
        check_same_folder(tmp_path / "ours", tmp_path / "stock")


@distributed(world_size=2)
def test_ranks_without_a_common_file_system(tmp_path, monkeypatch):
    """Each rank has a folder of its own behind the same relative name; tensors travel to those that may write."""
    home = tmp_path / f"machine{dist.get_rank()}"
    home.mkdir()
    monkeypatch.chdir(home)
    model = _convert(zoo.build("mixtral"))
    hf_zero.shard(model, None, {"zero_stage": 3})
    twin = _convert(zoo.build("mixtral"))
    twin.save_pretrained(tmp_path / "stock", max_shard_size="20KB")
    model.save_pretrained("every", max_shard_size="20KB")
    check_same_folder("every", tmp_path / "stock")
    model.save_pretrained("one", max_shard_size="20KB", is_main_process=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        check_same_folder("one", tmp_path / "stock")
    else:
        assert not Path("one").exists()


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@distributed(world_size=2)
def test_every_stage_writes_the_masters_in_fp32_where_asked(tmp_path, stage):
    config = {"zero_stage": stage, "mixed_precision": "bf16", "zero3_save_16bit_model": False}
    model = zoo.build("llama_tied")
    engine = hf_zero.shard(model, None, config)
    save_folder(
        model,
        tmp_path / "ours",
        SaveJob(comm=engine.comm, is_main=dist.get_rank() == 0),
        lambda folder, state_dict: None if stage < 3 else zoo.build("llama_tied").config.save_pretrained(folder),
        compute_dtype=False,
    )
    if dist.get_rank() == 0:
        twin_of("llama_tied").save_pretrained(tmp_path / "stock")
        weights = (tmp_path / "ours/model.safetensors").read_bytes()
        assert weights == (tmp_path / "stock/model.safetensors").read_bytes()
        assert '"dtype": "float32"' in (tmp_path / "ours/config.json").read_text()


@distributed(world_size=2)
def test_a_save_on_one_rank_raises_and_names_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.checkpoint.model_folder.MEETING_SECONDS", 0.5)
    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": 3})
    if dist.get_rank() == 0:
        with pytest.raises(ZeroRuntimeError, match=r"rank\(s\) \[1\] of 2 did not call it"):
            model.save_pretrained(tmp_path)
    dist.barrier()
    # What every rank can do alone, one rank may do alone.
    with hf_zero.gathered_parameters(model):
        if dist.get_rank() == 0:
            model.save_pretrained(tmp_path / "held")
            zoo.build("llama").save_pretrained(tmp_path / "stock")
            check_same_folder(tmp_path / "held", tmp_path / "stock")


@distributed(world_size=2)
def test_the_state_dict_of_the_main_process_is_saved_by_it_alone(tmp_path):
    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model = accelerator.prepare_model(zoo.build("llama_tied"))
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path / "ours",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        zoo.build("llama_tied").save_pretrained(tmp_path / "stock")
        check_same_folder(tmp_path / "ours", tmp_path / "stock")


@distributed(world_size=2)
def test_a_smaller_save_leaves_nothing_of_a_larger_one(tmp_path):
    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": 3})
    (tmp_path / "notes.txt").write_text("mine")
    for size in ("10KB", "20KB", "50GB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        dist.barrier()
        if dist.get_rank() == 0:
            zoo.build("llama").save_pretrained(tmp_path.with_name(f"stock{size}"), max_shard_size=size)
            (tmp_path.with_name(f"stock{size}") / "notes.txt").write_text("mine")
            check_same_folder(tmp_path, tmp_path.with_name(f"stock{size}"))
        dist.barrier()


@distributed(world_size=2)
def test_ranks_with_different_models_write_nothing(tmp_path):
    model = zoo.build("llama")
    if dist.get_rank() == 1:
        model._keys_to_ignore_on_save = ["lm_head.weight"]
    hf_zero.shard(model, None, {"zero_stage": 3})
    with pytest.raises(ZeroCheckpointError, match=r"ranks \[1\] have another model than rank 0"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@distributed(world_size=2)
def test_a_disk_that_is_too_small_is_found_before_the_first_byte(tmp_path, monkeypatch):
    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": 3})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("hf_zero.checkpoint.staging.shutil.disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(ZeroCheckpointError, match="1,000 bytes free, and .* are to be written"):
        model.save_pretrained(tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize("stage", (1, 3))
@distributed(world_size=2)
def test_a_distributed_checkpoint_is_refused_as_it_is_not_needed(tmp_path, stage):
    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": stage})
    with pytest.raises(ValueError, match="distributed_checkpoint=True is for models that torch shards: leave it out"):
        model.save_pretrained(tmp_path / "model", distributed_checkpoint=True)
    assert not (tmp_path / "model").exists()


def _with_adapters(whole_head):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"] if whole_head else None, lora_dropout=0.0
    )
    model = get_peft_model(zoo.build("llama"), config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()
    return model


@pytest.mark.parametrize("whole_head", (False, True))
@distributed(world_size=2)
def test_of_a_model_with_adapters_only_these_are_saved(tmp_path, whole_head):
    for stage in (1, 3):
        model = _with_adapters(whole_head)
        engine = hf_zero.shard(model, None, {"zero_stage": stage})
        folder = tmp_path / f"stage{stage}"
        gathers = engine.comm.traffic.bytes_sent["all_gather"]
        model.save_pretrained(folder / "ours", is_main_process=dist.get_rank() == 0)
        assert stage == 3 or engine.comm.traffic.bytes_sent["all_gather"] == gathers
        if dist.get_rank() == 0:
            _with_adapters(whole_head).save_pretrained(folder / "stock")
            check_same_folder(folder / "ours", folder / "stock")
            size = (folder / "ours/adapter_model.safetensors").stat().st_size
            assert size < 0.3 * sum(p.numel() * 4 for p in model.parameters())


def _train_on_nodes(folder, asynchronous):
    """Two machines of one rank each, with disks of their own behind the same relative path."""
    import os

    from tests.ranks.test_checkpoint import trainer_for

    home = Path(folder) / f"machine{dist.get_rank()}"
    home.mkdir(exist_ok=True)
    os.chdir(home)
    os.environ["LOCAL_RANK"] = "0"
    arguments = {"save_on_each_node": True, "save_total_limit": 1, "zero_async_save": asynchronous}
    return trainer_for("run", 3, 6, per_device_train_batch_size=4, **arguments)


def _save_on_nodes(folder, asynchronous):
    trainer = _train_on_nodes(folder, asynchronous)
    trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def _resume_on_nodes(folder, asynchronous):
    trainer = _train_on_nodes(folder, asynchronous)
    trainer.args.max_steps = 8
    trainer.train(resume_from_checkpoint=True)
    return trainer.state.global_step


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_on_each_node(tmp_path, asynchronous):
    losses = run_ranks(_save_on_nodes, tmp_path, asynchronous)
    assert sorted(losses[0]) == [1, 2, 3, 4, 5, 6]
    first, second = (tmp_path / f"machine{rank}/run/checkpoint-6" for rank in (0, 1))
    assert sorted(path.name for path in first.parent.iterdir() if path.is_dir()) == ["checkpoint-6"]
    for name in ("model.safetensors", "zero_state.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert run_ranks(_resume_on_nodes, tmp_path, asynchronous) == [8, 8]
