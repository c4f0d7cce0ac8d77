"""A loop written for DeepSpeed trains as plain DDP does, at stages 1 to 3, and resumes at another number of ranks."""

import argparse
import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import hf_zero
import hf_zero.deepspeed as deepspeed
from hf_zero.config.builders import build_optimizer, build_scheduler
from hf_zero.deepspeed.batches import resolve
from hf_zero.errors import ZeroConfigError, ZeroRuntimeError
from hf_zero.integrations import plain_checkpoints
from tests.support import nets
from tests.support.harness import distributed, run_ranks
from tests.support.reference import whole_weights


EXAMPLE = Path(__file__).parents[2] / "examples/deepspeed_loop"
SETTINGS = json.loads((EXAMPLE / "ds_config.json").read_text())
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
# With a tiny eps Adam turns the rounding noise of a gradient that is zero (a bias of keys) into full steps.
SMOOTH = {"type": "AdamW", "params": {**SETTINGS["optimizer"]["params"], "eps": 1e-4}}


def _program():
    return runpy.run_path(str(EXAMPLE / "train.py"))


def _write(folder, name="ds.json", **changes):
    path = folder / name
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return str(path)


def _stage(number):
    return {"zero_optimization": {**SETTINGS["zero_optimization"], "stage": number}}


def _train_by_ddp(program, epochs, samples):
    """The same loop by hand, in stock torch, with the sections of the JSON."""
    torch.manual_seed(0)
    model = DistributedDataParallel(program["Reverser"]())
    optimizer = build_optimizer(SMOOTH, model.parameters())
    scheduler = build_scheduler(SETTINGS["scheduler"], optimizer)
    dataset = program["Sequences"](samples)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            model.require_backward_grad_sync = number % 2 == 1
            loss = program["loss_of"](model, inputs, targets)
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return losses, dict(model.module.named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_the_example_trains_as_ddp_does(stage, tmp_path):
    program = _program()
    config = _write(tmp_path, f"ds{dist.get_rank()}.json", optimizer=SMOOTH, **_stage(stage))
    engine, losses = program["main"](["--deepspeed", "--deepspeed_config", config, "--samples", "32"])
    stock, weights = _train_by_ddp(program, 2, 32)
    torch.testing.assert_close(losses, stock, rtol=1e-6, atol=1e-6)
    for name, value in whole_weights(engine.module).items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=0, atol=1e-6, msg=name)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 8, 64)
    sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    assert sizes == (16, 4, 2) and engine.get_global_grad_norm() > 0


def _run(folder, config, *arguments):
    torch.manual_seed(dist.get_rank())
    engine, losses = _program()["main"](
        ["--deepspeed_config", config, "--checkpoints", str(folder), "--samples", "48", *arguments]
    )
    return losses, whole_weights(engine.module), engine.global_steps, engine.get_lr()


def test_a_run_is_resumed_bit_by_bit_and_at_another_number_of_ranks_and_stage(tmp_path):
    config = _write(tmp_path)
    whole = run_ranks(_run, tmp_path / "whole", config, "--epochs", "2")
    run_ranks(_run, tmp_path / "cut", config, "--epochs", "1")
    assert (tmp_path / "cut/latest").read_text() == "epoch_0"
    resumed = run_ranks(_run, tmp_path / "cut", config, "--epochs", "2", "--resume")
    for rank in range(2):
        assert resumed[rank][0] == whole[rank][0][6:], "the losses of the second epoch"
        assert resumed[rank][2:] == whole[rank][2:], "steps and rates"
        assert all(torch.equal(value, whole[rank][1][name]) for name, value in resumed[rank][1].items())
    single = _write(tmp_path, "single.json", train_micro_batch_size_per_gpu=8, **_stage(1))
    (loaded,) = run_ranks(_resumed_weights, tmp_path / "whole", single, world_size=1)
    assert loaded[1:] == (6, {"epoch": 1}, whole[0][3])
    assert all(torch.equal(value, whole[0][1][name]) for name, value in loaded[0].items())


def _resumed_weights(folder, config):
    program = _program()
    engine, *_ = deepspeed.initialize(model=program["Reverser"](), config=config)
    path, state = engine.load_checkpoint(folder)
    assert path.endswith("epoch_1"), path
    return whole_weights(engine.module), engine.global_steps, state, engine.get_lr()


@distributed(world_size=2)
def test_a_checkpoint_that_only_rank_0_saves_names_the_rank_that_is_missing(tmp_path):
    plain_checkpoints.MEETING_SECONDS = 1.0
    engine, *_ = deepspeed.initialize(model=nets.Net(), config={**SETTINGS, "scheduler": None})
    if engine.local_rank == 0:
        with pytest.raises(ZeroRuntimeError, match=r"rank\(s\) \[1\] of 2 did not call it.*call it on all ranks"):
            engine.save_checkpoint(tmp_path, tag="epoch_0")
    dist.barrier()
    assert not list(tmp_path.iterdir()), "nothing half-written"


@distributed(world_size=2)
def test_the_loop_of_a_client_optimizer_counts_skips_and_does_without_sync():
    model = nets.seeded(nets.Net)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, same, loader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda found: torch.optim.lr_scheduler.StepLR(found, 1, 0.5),
        config={"train_micro_batch_size_per_gpu": 5, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    )
    assert (
        same is optimizer and engine.module is model and loader is None and engine.gradient_accumulation_steps() == 1
    )
    batches = [nets.batches(dist.get_rank(), number) for number in range(4)]
    with engine.no_sync():
        nets.micro(engine, batches[0], engine.backward)
        with pytest.raises(ZeroRuntimeError, match="inside engine.no_sync"):
            engine.step()
    nets.micro(engine, batches[1], engine.backward)
    engine.step()
    assert engine.get_lr() == [0.05] and (engine.global_steps, engine.skipped_steps) == (1, 0)
    nets.micro(engine, batches[2], lambda loss: engine.backward(loss * float("inf")))
    engine.step()
    assert engine.get_lr() == [0.05] and (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert len(list(engine.parameters())) == len(list(model.parameters()))
    assert not engine.eval().module.training and engine.train().module.training
    with pytest.raises(AttributeError, match="neither hf_zero's engine nor Net has 'monitor'"):
        engine.monitor  # noqa: B018


@distributed(world_size=2)
def test_weights_are_built_sharded_read_changed_and_saved(tmp_path):
    with deepspeed.zero.Init():
        model = nets.seeded(nets.Net)()
    engine, *_ = deepspeed.initialize(model=model, config={**SETTINGS, "scheduler": None, "optimizer": SGD})
    plain = nets.seeded(nets.Net)()
    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        torch.testing.assert_close(model.head.weight.detach(), plain.head.weight.detach(), rtol=0, atol=0)
        if engine.global_rank == 0:
            with torch.no_grad():
                model.head.weight.fill_(0.5)
    assert (whole_weights(model)["head.weight"] == 0.5).all()
    with pytest.raises(ValueError, match="modifier_rank=1: the values of rank 0"):
        deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=1)
    assert engine.save_16bit_model(tmp_path)
    if engine.global_rank == 0:
        from safetensors.torch import load_model

        load_model(plain, tmp_path / "model.safetensors")
        assert (plain.head.weight == 0.5).all()


def test_what_deepspeed_has_and_this_has_not_says_what_to_use():
    with pytest.raises(ImportError, match=r"hf_zero\.deepspeed\.ops does not exist\. Use an optimizer of torch"):
        from hf_zero.deepspeed.ops.adam import FusedAdam  # noqa: F401
    with pytest.raises(ImportError, match="Use torch.accelerator"):
        from hf_zero.deepspeed import get_accelerator  # noqa: F401
    with pytest.raises(AttributeError, match="zero.gather_distributed_parameters does not exist. Use .with zero"):
        deepspeed.zero.gather_distributed_parameters  # noqa: B018
    with pytest.raises(AttributeError, match="hf_zero.deepspeed.Autotuner does not exist. Leave it out"):
        deepspeed.Autotuner  # noqa: B018
    assert not hasattr(deepspeed, "Autotuner") and not hasattr(deepspeed.runtime.utils, "clip_grad_norm_")
    with pytest.raises(ModuleNotFoundError):
        import hf_zero.attic  # noqa: F401


@pytest.mark.parametrize(
    "written, world_size, found",
    [
        ({"train_batch_size": 32}, 4, (8, 1, 32)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, (4, 4, 32)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 2, (2, 8, 32)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, 3, (2, 1, 6)),
        ({"gradient_accumulation_steps": 4}, 2, "write train_micro_batch_size_per_gpu or train_batch_size"),
        ({"train_batch_size": 9}, 2, "no multiple of gradient_accumulation_steps x ranks = 2"),
        (
            {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16},
            8,
            r"train_batch_size is 128 .*2 .* x 16 .* x 8 = 256",
        ),
    ],
)
def test_two_batch_sizes_decide_the_third(written, world_size, found):
    config = hf_zero.ZeroConfig.from_any({**written, "zero_optimization": {"stage": 2}})
    if isinstance(found, str):
        with pytest.raises(ZeroConfigError, match=found):
            resolve(config, world_size)
    else:
        sizes = resolve(config, world_size)
        assert (sizes.micro, sizes.accumulation, sizes.total) == found


def test_what_is_given_twice_or_not_at_all_is_an_error(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HF_ZERO_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    model = nets.Net()
    args = argparse.Namespace(deepspeed_config="ds.json")
    with pytest.raises(ZeroConfigError, match="the configuration comes from config= and from args"):
        deepspeed.initialize(args, model=model, config=SETTINGS)
    with pytest.raises(ZeroConfigError, match="no configuration: pass config=, or --deepspeed_config"):
        deepspeed.initialize(model=model)
    with pytest.raises(ZeroConfigError, match="the optimizer comes from optimizer= and from the configuration dict"):
        deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=SETTINGS)
    with pytest.raises(TypeError, match="training_data is a Stream"):
        deepspeed.initialize(model=model, config=SETTINGS, training_data=Stream())
    engine, *_ = deepspeed.initialize(model=nets.Net(), config={"train_batch_size": 4})
    with pytest.raises(ZeroRuntimeError, match="an engine without optimizer evaluates only"):
        nets.micro(engine, nets.batches(0, 0), engine.backward)


class Stream(torch.utils.data.IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        return iter(())


def test_memory_prints_say_what_the_process_holds(capsys, monkeypatch):
    from hf_zero.deepspeed.runtime.utils import memory_status, see_memory_usage

    monkeypatch.setenv("RANK", "0")
    see_memory_usage("before")
    assert capsys.readouterr().out == ""
    see_memory_usage("after", force=True)
    assert "after: " in (said := capsys.readouterr().out) and "host 0.00 GB" not in said, said
    monkeypatch.setenv("RANK", "1")
    see_memory_usage("after", force=True)
    memory_status("here", print_rank=0)
    assert capsys.readouterr().out == ""
    memory_status("here", reset_max=True)
    assert capsys.readouterr().out.startswith("rank 1: here: ")
