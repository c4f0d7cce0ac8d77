"""Training state on disk: it resumes at any world size and stage, and never appears half-written."""

import json
import os

import pytest
import torch

from hf_zero.checkpoint import training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.checkpoint.staging import stage
from hf_zero.comm.communicator import Communicator
from hf_zero.errors import ZeroCheckpointError
from tests.support.harness import distributed, run_ranks


def trainer_for(folder, stage, steps, model=None, **arguments):
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 96, (64, 12), generator=generator).tolist()]
    defaults = {
        "output_dir": folder,
        "zero_stage": stage,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch_fused",
    }
    args = hf_zero.ZeroTrainingArguments(**(defaults | arguments))
    model = LlamaForCausalLM(config) if model is None else model
    return hf_zero.ZeroTrainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])


def train(folder, stage, batch, steps=6, resume=None, **arguments):
    """Losses by step; `batch` times the world size stays the same, so the data order does too."""
    trainer = trainer_for(folder, stage, steps, per_device_train_batch_size=batch, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return losses if resume is None else {step: loss for step, loss in losses.items() if step > 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run of two ranks at stage 3, and its losses."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(train, str(folder), 3, 4, world_size=2)[0]


@pytest.mark.parametrize("target, ranks", [(3, 2), (2, 2), (0, 2), (3, 1), (1, 4), (3, 4)])
def test_resume_at_another_stage_and_world_size(tmp_path, run, target, ranks):
    folder, whole = run
    resume = str(folder / "checkpoint-3")
    resumed = run_ranks(train, str(tmp_path), target, 8 // ranks, resume=resume, world_size=ranks)[0]
    assert sorted(resumed) == [4, 5, 6]
    for step, loss in resumed.items():
        assert abs(loss - whole[step]) <= (0 if (target, ranks) == (3, 2) else 1e-6), (step, loss, whole[step])


def test_the_checkpoint_is_a_plain_folder(tmp_path):
    run_ranks(train, str(tmp_path), 3, 2, 3, world_size=2)
    folder = tmp_path / "checkpoint-3"
    from transformers import LlamaForCausalLM

    _, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    state = SlicedFile.open(folder / training_state.STATE_NAME)
    assert state.tensors["lm_head.weight.exp_avg_sq"] == (torch.float32, (96, 32))
    # In fp32 the model's own file holds the masters; nothing is stored twice.
    assert not any(name.endswith(".master") for name in state.tensors), list(state.tensors)
    run_ranks(train, str(tmp_path / "half"), 3, 2, 3, world_size=2, bf16=True)
    state = SlicedFile.open(tmp_path / "half/checkpoint-3" / training_state.STATE_NAME)
    assert state.tensors["model.norm.weight.master"] == (torch.float32, (32,))


@pytest.mark.parametrize("stage, target, ranks", [(2, 3, 2), (3, 3, 4), (3, 1, 1)])
def test_resume_in_bf16(tmp_path, stage, target, ranks):
    """The masters go on in full precision, whatever the saved weights have."""
    whole = run_ranks(train, str(tmp_path / "run"), stage, 4, world_size=2, bf16=True)[0]
    resume = str(tmp_path / "run/checkpoint-3")
    resumed = run_ranks(
        train, str(tmp_path / "again"), target, 8 // ranks, resume=resume, world_size=ranks, bf16=True
    )[0]
    assert sorted(resumed) == [4, 5, 6]
    for step, loss in resumed.items():
        # Gradients of other batch splits are rounded to bf16 elsewhere.
        assert abs(loss - whole[step]) <= (0 if ranks == 2 else 2e-3), (step, loss, whole[step])


def evaluate_best(folder, stage, asynchronous):
    os.chdir(folder)
    trainer = trainer_for(
        "./run",
        stage,
        6,
        per_device_train_batch_size=2,
        learning_rate=0.3,
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        save_only_model=True,
        save_total_limit=1,
        zero_async_save=asynchronous,
    )
    trainer.train()
    best = trainer.state.best_metric
    return best, trainer.evaluate()["eval_loss"], trainer.state.best_model_checkpoint


@pytest.mark.parametrize("stage, asynchronous", [(1, False), (3, False), (3, True)])
def test_load_best_model_at_end_with_save_only_model(tmp_path, stage, asynchronous):
    best, loss, folder = run_ranks(evaluate_best, str(tmp_path), stage, asynchronous, world_size=2)[0]
    assert abs(best - loss) < 1e-6, (best, loss)
    assert folder.startswith("./run/checkpoint-") and (tmp_path / folder / "COMMIT").exists(), folder
    assert not (tmp_path / folder / training_state.STATE_NAME).exists()
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


@distributed(world_size=2)
def test_raw_accelerate_loop_saves_and_loads(tmp_path):
    import hf_zero

    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return accelerator.prepare(model, optimizer)

    def step(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed + accelerator.process_index)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model, optimizer = make()
    for seed in range(3):
        step(model, optimizer, seed)
    accelerator.save_state(str(tmp_path / "state"))
    expected = [step(model, optimizer, seed) for seed in range(3, 6)]
    accelerator.free_memory()
    model, optimizer = make()
    accelerator.load_state(str(tmp_path / "state"))
    assert [step(model, optimizer, seed) for seed in range(3, 6)] == expected
    names = sorted(os.listdir(tmp_path / "state"))
    assert "zero_state.safetensors" in names and "model.safetensors" in names, names
    assert not any("optimizer" in name for name in names), names


@pytest.mark.parametrize("name", ["mixtral", "llama_tied"])
@distributed(world_size=2)
def test_accelerate_loads_models_whose_files_have_other_names(tmp_path, name):
    """accelerate writes the names of the state dict, which a weight converter makes from those of other files."""
    import hf_zero
    from tests.support import zoo

    def make(seed):
        model = zoo.build(name, seed)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(model, optimizer, seed):
        loss = model(**zoo.batch(name, accelerator.process_index, seed)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model, optimizer = make(0)
    step(model, optimizer, 0)
    accelerator.save_state(str(tmp_path / "state"))
    expected = [step(model, optimizer, seed) for seed in (1, 2)]
    accelerator.free_memory()
    model, optimizer = make(1)
    accelerator.load_state(str(tmp_path / "state"))
    assert [step(model, optimizer, seed) for seed in (1, 2)] == expected


@distributed(world_size=2)
def test_a_failing_rank_fails_all_and_leaves_no_file(tmp_path):
    files = {"state.safetensors": SlicedFile({"a": (torch.float32, (4,))}, {})}
    comm = Communicator.connect()

    def parts(**_):
        if comm.rank == 1:
            raise OSError("No space left on device")
        yield "state.safetensors", "a", 0, torch.zeros(2)

    with pytest.raises(ZeroCheckpointError, match="rank 1 of 2 failed: No space left"):
        stage(tmp_path, files, parts, SaveJob(comm=comm, is_main=comm.rank == 0))
    comm.barrier()
    assert os.listdir(tmp_path) == []


def write_alone(path, file, tensors):
    parts = [(path.name, name, 0, tensor) for name, tensor in tensors.items()]
    job = SaveJob(comm=Communicator.connect(), is_main=True)
    stage(path.parent, {path.name: file}, lambda **_: parts, job).commit()


def test_files_are_safetensors(tmp_path):
    from safetensors.torch import load_file

    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16)}
    file = SlicedFile({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"format": "pt"})
    write_alone(tmp_path / "x.safetensors", file, tensors)
    for name, loaded in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(loaded, tensors[name]) and loaded.dtype == tensors[name].dtype
    target = torch.zeros(2)
    SlicedFile.open(tmp_path / "x.safetensors").read(tmp_path / "x.safetensors", [("b", 3, target)])
    assert target.tolist() == [3.0, 4.0]


def test_a_torn_file_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    file = SlicedFile({"a": (torch.float32, (100,))}, {"optimizers": json.dumps([])})
    write_alone(path, file, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ZeroCheckpointError, match="x.safetensors is not .*, or not complete: .*not fully covered"):
        SlicedFile.open(path)
    path.write_bytes(b"garbage!")
    with pytest.raises(ZeroCheckpointError, match="is not a safetensors file"):
        SlicedFile.open(path)


def test_state_of_another_model_is_refused(tmp_path):
    model = torch.nn.Linear(4, 4)
    import hf_zero

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3})
    training_state.save_state(tmp_path, engine.buffers, engine.bindings, SaveJob(comm=engine.comm, is_main=True))
    other = torch.nn.Linear(4, 5)
    twin = hf_zero.shard(other, torch.optim.SGD(other.parameters(), lr=0.1), {"zero_stage": 3})
    with pytest.raises(ZeroCheckpointError, match=r"'weight' has shape \(4, 4\), the model's is \(5, 4\)"):
        training_state.load_state(tmp_path, twin.buffers, twin.bindings, twin.comm)
    with pytest.raises(ZeroCheckpointError, match="holds no training state"):
        training_state.load_state(tmp_path / "nowhere", twin.buffers, twin.bindings, twin.comm)


@distributed(world_size=2)
def test_the_loss_scale_goes_on(tmp_path):
    import hf_zero
    from hf_zero.integrations import engine_state

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hf_zero.shard(model, optimizer, {"zero_stage": 2, "mixed_precision": "fp16", "hysteresis": 1})

    engine = make()
    engine.scaler.update(overflow=True)
    engine.scaler.update(overflow=False)
    engine_state.save_engine(engine, tmp_path, SaveJob(comm=engine.comm, is_main=engine.comm.rank == 0))
    again = make()
    assert again.scaler.state_dict() != engine.scaler.state_dict()
    assert engine_state.load_engine(again, tmp_path) == set()
    assert again.scaler.state_dict() == engine.scaler.state_dict()


def save_and_load_two_groups(folder):
    """A matrix in one group, its bias in another: of the second group, rank 0 owns nothing."""
    import hf_zero

    def prepared():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96))
        groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return model, optimizer, hf_zero.shard(model, optimizer, {"zero_stage": 2})

    def step(model, optimizer, engine, number):
        engine.backward(model(torch.full((2, 64), 0.1 * number)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, engine = prepared()
    step(model, optimizer, engine, 1)
    owned = [sum(weight.numel() for weight in group["params"]) for group in optimizer.param_groups]
    job = SaveJob(comm=engine.comm, is_main=engine.comm.rank == 0)
    training_state.save_state(folder, engine.buffers, engine.bindings, job)
    step(model, optimizer, engine, 2)
    again, loaded, other = prepared()
    training_state.load_state(folder, other.buffers, other.bindings, other.comm)
    other.after_load()
    step(again, loaded, other, 2)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return owned


def test_a_rank_that_owns_nothing_of_a_group_writes_the_same_file(tmp_path):
    owned = run_ranks(save_and_load_two_groups, str(tmp_path))
    assert 0 in [group for groups in owned for group in groups], owned
