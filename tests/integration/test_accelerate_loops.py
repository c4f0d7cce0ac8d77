"""Hand-written Accelerate loops: with `ZeroAccelerator` they do what they do with `Accelerator`."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, load_checkpoint_in_model
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

import hf_zero
from hf_zero.core.engine import engine_of
from hf_zero.errors import ZeroError
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import Net, seeded
from tests.support.reference import ADAMW, SGD, Trace, compare, whole_weights
from tests.support.trainers import forget_accelerate, make_data


STAGES = (0, 1, 2, 3)


def make_accelerator(stage, **arguments):
    forget_accelerate()
    if stage is None:
        return Accelerator(cpu=True, **arguments)
    return hf_zero.ZeroAccelerator(cpu=True, zero_plugin=hf_zero.ZeroPlugin(zero_stage=stage), **arguments)


def _model_and_optimizer(name):
    model = zoo.build(name)
    return model, SGD(model.parameters())


def weights_of(model, accelerator):
    model = accelerator.unwrap_model(model)
    if isinstance(accelerator, hf_zero.ZeroAccelerator):
        return whole_weights(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def make_loader(name, batch_size=2):
    draw = torch.Generator().manual_seed(3)
    return DataLoader(make_data(name, 22), batch_size=batch_size, shuffle=True, generator=draw)


def _by_accumulate(accelerator, model, optimizer, scheduler, batch, last):
    """As accelerate's guide writes it."""
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return loss, norm


def _by_hand(accelerator, model, optimizer, scheduler, batch, last):
    """With `no_sync` and conditions of one's own; gradients are cleared through the model, before they come."""
    loss = model(**batch).loss
    if not last:
        with accelerator.no_sync(model):
            accelerator.backward(loss)
        return loss, None
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    return loss, norm


def _by_the_models_method(accelerator, model, optimizer, scheduler, batch, last):
    """As DDP's users write it, and accelerate's example of accumulation over tokens."""
    with contextlib.nullcontext() if last else model.no_sync():
        loss = model(**batch).loss
        accelerator.backward(loss)
    if not last:
        return loss, None
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss, norm


def _run(stage, name, step, make_optimizer, accumulation):
    steps = accumulation if step is _by_accumulate else 1
    accelerator = make_accelerator(stage, gradient_accumulation_steps=steps)
    model = zoo.build(name)
    optimizer = make_optimizer(model.parameters())
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=20)
    prepared = accelerator.prepare(model, optimizer, make_loader(name), scheduler)
    model, optimizer, loader, scheduler = prepared
    trace, rates = Trace(), []
    for _ in range(2):
        for number, batch in enumerate(loader):
            last = (number + 1) % accumulation == 0 or number + 1 == len(loader)
            loss, norm = step(accelerator, model, optimizer, scheduler, batch, last)
            trace.losses.append(loss.item())
            if norm is not None:
                trace.norms.append(float(norm))
            rates.append(optimizer.param_groups[0]["lr"])
    trace.weights = weights_of(model, accelerator)
    return trace, rates


@pytest.mark.parametrize("step", [_by_accumulate, _by_hand, _by_the_models_method])
@pytest.mark.parametrize("name, make_optimizer", [("llama_tied", SGD), ("qwen2", ADAMW), ("t5", SGD)])
@distributed(world_size=2)
def test_a_loop_with_accumulation_clipping_and_a_scheduler(name, make_optimizer, step):
    stock, rates = _run(None, name, step, make_optimizer, 4)
    assert len(stock.norms) == 4 and len(set(rates)) >= 4, (stock.norms, rates)
    for stage in STAGES:
        ours, our_rates = _run(stage, name, step, make_optimizer, 4)
        assert our_rates == rates, f"stage {stage}: {our_rates} {rates}"
        # Here the measure is the stock fp32 norm, which is itself not exact.
        compare(ours, stock, f"stage {stage}", norm_tolerance=1e-5)


def _two_players(stage):
    """Two models with an optimizer each, trained in turn on what the other puts out."""
    accelerator = make_accelerator(stage)
    models = [seeded(Net)(), seeded(functools.partial(Net, depth=2), seed=1)()]
    optimizers = [SGD(models[0].parameters()), ADAMW(models[1].parameters())]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    losses = []
    for number in range(4):
        draw = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(5, 4, generator=draw)
        loss = (models[0](x) - models[1](x).detach()).pow(2).mean()
        first.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(models[0].parameters(), 0.1)
        first.step()
        other = (models[1](x) * models[0](x).detach()).mean()
        second.zero_grad()
        accelerator.backward(other)
        second.step()
        losses += [loss.item(), other.item()]
    weights = [weights_of(model, accelerator) for model in models]
    return Trace(losses=losses, weights={f"{k}.{name}": w for k, one in enumerate(weights) for name, w in one.items()})


@distributed(world_size=2)
def test_two_models_with_two_optimizers():
    stock = _two_players(None)
    for stage in STAGES:
        compare(_two_players(stage), stock, f"stage {stage}")


@distributed(world_size=2)
def test_prepared_one_after_the_other():
    """Model first, optimizer later, as scripts do that build the optimizer from the prepared model."""

    def run(stage):
        accelerator = make_accelerator(stage)
        model = accelerator.prepare(zoo.build("llama"))
        optimizer = accelerator.prepare(SGD(model.parameters()))
        for number in range(2):
            accelerator.backward(model(**zoo.batch("llama", dist.get_rank(), number)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return Trace(weights=weights_of(model, accelerator))

    stock = run(None)
    for stage in STAGES:
        compare(run(stage), stock, f"stage {stage}", exact=True)


@distributed(world_size=2)
def test_objects_stay_the_users():
    for stage in STAGES:
        accelerator = make_accelerator(stage)
        model = zoo.build("llama")
        optimizer = SGD(model.parameters())
        prepared, wrapped = accelerator.prepare(model, optimizer)
        assert prepared is model and accelerator.unwrap_model(prepared) is model, f"stage {stage}"
        assert wrapped.optimizer is optimizer, f"stage {stage}"
        assert accelerator.prepare(model) is model, f"stage {stage}: preparing again"
        assert accelerator.num_processes == 2 and not accelerator.optimizer_step_was_skipped


@distributed(world_size=2)
def test_training_goes_on_after_free_memory():
    """Trainer calls it before every run and prepares the same objects again."""

    def run(stage):
        accelerator = make_accelerator(stage)
        model, optimizer = accelerator.prepare(*_model_and_optimizer("llama_tied"))
        losses = []
        for number in range(4):
            if number == 2 and stage is not None:
                accelerator.free_memory()
                model, optimizer = accelerator.prepare(model, optimizer)
            loss = model(**zoo.batch("llama_tied", dist.get_rank(), number)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Trace(losses=losses, weights=weights_of(model, accelerator))

    stock = run(None)
    for stage in STAGES:
        compare(run(stage), stock, f"stage {stage}", exact=True)


@distributed(world_size=2)
def test_state_dict_and_saved_model_are_whole(tmp_path):
    for stage in STAGES:
        accelerator = make_accelerator(stage)
        model, _ = accelerator.prepare(*_model_and_optimizer("llama_tied"))
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, tmp_path / str(stage))
        if accelerator.is_main_process:
            wanted = zoo.build("llama_tied").state_dict()
            assert state.keys() == wanted.keys(), f"stage {stage}: {state.keys() ^ wanted.keys()}"
            assert all(torch.equal(state[name], wanted[name]) for name in wanted), f"stage {stage}"
            loaded = zoo.build("llama_tied", seed=9)
            load_checkpoint_in_model(loaded, tmp_path / str(stage))
            loaded.tie_weights()
            for name, p in loaded.named_parameters():
                assert torch.equal(p, wanted[name]), f"stage {stage}: {name}"
        dist.barrier()


@distributed(world_size=2)
def test_state_is_saved_and_loaded_in_the_middle(tmp_path):
    """What is trained after loading equals what was trained without the stop, bit by bit."""

    def run(stage, start, stop):
        accelerator = make_accelerator(stage)
        model = zoo.build("llama_tied", seed=start)
        optimizer = ADAMW(model.parameters())
        scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=20)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if start:
            accelerator.load_state(tmp_path / str(stage))
        for number in range(start, stop):
            if number == 2 and start == 0:
                accelerator.save_state(tmp_path / str(stage))
            accelerator.backward(model(**zoo.batch("llama_tied", dist.get_rank(), number)).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return Trace(weights=weights_of(model, accelerator))

    for stage in STAGES:
        whole = run(stage, 0, 4)
        compare(run(stage, 2, 4), whole, f"stage {stage}", exact=True)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_models_that_cannot_be_prepared_are_refused(stage):
    accelerator = make_accelerator(stage)
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*model\.module"):
        accelerator.prepare(DistributedDataParallel(zoo.build("llama")))
    with torch.device("meta"):
        empty = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"'weight' is on the meta device.*zero_init"):
        accelerator.prepare(empty)


@distributed(world_size=2)
def test_what_cannot_work_is_refused():
    for stage in STAGES:
        accelerator = make_accelerator(stage)
        model, optimizer = accelerator.prepare(*_model_and_optimizer("llama"))
        with pytest.raises((ValueError, ZeroError), match="clip_grad_norm_"):
            accelerator.clip_grad_value_(model.parameters(), 0.1)
        with pytest.raises((ValueError, ZeroError), match="even_batches"):
            with accelerator.join_uneven_inputs([model]):
                pass


@pytest.mark.parametrize("hook", ["FP16", "BF16", "POWER_SGD"])
def test_hooks_that_only_ddp_calls_are_refused(hook):
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType[hook], find_unused_parameters=True)
    with pytest.raises(ZeroError, match=f"comm_hook={hook.lower()}.*communication_data_type"):
        make_accelerator(2, kwargs_handlers=[handler])
    make_accelerator(2, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    forget_accelerate()


def test_stand_ins_for_sections_of_a_deepspeed_file_are_refused():
    accelerator = make_accelerator(2)
    model = zoo.build("llama")
    optimizer = DummyOptim(model.parameters())
    for given, words in [
        ((model, optimizer), "DummyOptim.*optimizer section.*torch.optim.AdamW"),
        ((model, DummyScheduler(optimizer)), "DummyScheduler.*scheduler section.*get_scheduler"),
    ]:
        with pytest.raises(ZeroError, match=words):
            accelerator.prepare(*given)
    assert engine_of(model) is None, "nothing has been prepared"
    forget_accelerate()


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_sections_that_a_script_of_its_own_would_leave_unread_are_refused(section):
    forget_accelerate()
    written = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    plugin = hf_zero.ZeroPlugin({"zero_optimization": {"stage": 2}, section: written[section]})
    accelerator = hf_zero.ZeroAccelerator(cpu=True, zero_plugin=plugin)
    with pytest.raises(ZeroError, match=f"dict: the {section} section .*only ZeroTrainer reads.*SGD"):
        accelerator.prepare(*_model_and_optimizer("llama"))
    forget_accelerate()


@distributed(world_size=2)
def test_a_step_of_each_rank_for_itself_is_refused():
    """LocalSGD steps inside `no_sync`, and averages the weights now and then."""
    for stage in STAGES:
        accelerator = make_accelerator(stage)
        model, optimizer = accelerator.prepare(*_model_and_optimizer("llama"))
        with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=False):
            accelerator.backward(model(**zoo.batch("llama", dist.get_rank(), 0)).loss)
            optimizer.step()
        with pytest.raises(ZeroError, match="inside no_sync.*LocalSGD"):
            with LocalSGD(accelerator, model, local_sgd_steps=2):
                accelerator.backward(model(**zoo.batch("llama", dist.get_rank(), 1)).loss)
                optimizer.step()


@distributed(world_size=2)
def test_accumulation_that_contradicts_the_plugin_is_refused():
    forget_accelerate()
    plugin = hf_zero.ZeroPlugin({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8})
    with pytest.raises(ZeroError, match="gradient_accumulation_steps") as caught:
        hf_zero.ZeroAccelerator(cpu=True, zero_plugin=plugin, gradient_accumulation_steps=4)
    assert "8" in str(caught.value) and "4" in str(caught.value), caught.value
    forget_accelerate()
    accelerator = hf_zero.ZeroAccelerator(cpu=True, zero_plugin=plugin)
    assert accelerator.gradient_accumulation_steps == 8


def _clipped_loop(stage, limit, call):
    """Weights after two steps whose gradients are clipped by the configuration, or by a call; `stage` None: DDP."""
    forget_accelerate()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if stage is not None:
        plugin = hf_zero.ZeroPlugin(zero_stage=stage, gradient_clipping=limit)
        forget_accelerate()
        accelerator = hf_zero.ZeroAccelerator(cpu=True, zero_plugin=plugin, gradient_accumulation_steps=2)
    model, optimizer = _model_and_optimizer("llama")
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader("llama"))
    for batch, _ in zip(loader, range(4), strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients and call:
                accelerator.clip_grad_norm_(model.parameters(), call)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model, accelerator)


@distributed(world_size=2)
def test_gradients_are_clipped_as_the_configuration_says_where_the_script_does_not():
    """As by DeepSpeed, whose engine does it; and once, where the script does it, too."""
    wanted = _clipped_loop(None, None, 0.1)
    free = _clipped_loop(None, None, 0.0)
    assert any((free[name] - weight).abs().max() > 1e-3 for name, weight in wanted.items()), "nothing is clipped here"
    for stage in (1, 3):
        for call in (0.0, 0.1, float("inf")):
            for name, weight in _clipped_loop(stage, 0.1, call).items():
                torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6, msg=f"{stage} {call} {name}")
    with pytest.raises(ValueError, match="gradient_clipping is 0.1 .*, and the script clips to 0.5: write"):
        _clipped_loop(2, 0.1, 0.5)
