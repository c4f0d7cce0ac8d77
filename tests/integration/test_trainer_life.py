"""What surrounds a training run of `ZeroTrainer`: saving, the best model, generation, callbacks, wrong input."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging import version
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

import hf_zero
from hf_zero.errors import ZeroError
from hf_zero.integrations.transformers import ZeroArgumentsMixin
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.reference import whole_weights
from tests.support.trainers import compare_weights, make_trainer, saved_weights


STAGES = (1, 2, 3)


# ------------------------------------------------------------------------------------------------------------- saving


def _plain_twin(name, model):
    """A model that never saw hf_zero, with the weights and the configuration of this one."""
    weights = whole_weights(model)
    twin = zoo.build(name)
    with torch.no_grad():
        for key, p in twin.named_parameters():
            p.copy_(weights[key])
    twin.config, twin.generation_config = model.config, model.generation_config
    return twin


def _check_loads(folder, twin):
    loaded = type(twin).from_pretrained(folder)
    compare_weights(dict(loaded.named_parameters()), dict(twin.named_parameters()), str(folder))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt2", "t5"])
@distributed(world_size=2)
def test_the_saved_folder_is_what_one_process_would_write(tmp_path, name):
    for stage in STAGES:
        trainer = make_trainer(name, stage, tmp_path / "run", max_steps=1)
        trainer.train()
        twin, folder = _plain_twin(name, trainer.model), tmp_path / f"stage{stage}"
        trainer.save_model(str(folder))
        if dist.get_rank() == 0:
            twin.save_pretrained(tmp_path / f"twin{stage}")
            for file in (tmp_path / f"twin{stage}").iterdir():
                same = (folder / file.name).read_bytes() == file.read_bytes()
                assert same, f"stage {stage}: {file.name} has other bytes"
            _check_loads(folder, twin)
        dist.barrier()


@distributed(world_size=2)
def test_save_pretrained_of_the_model_itself(tmp_path):
    """The call that scripts make, as accelerate's examples write it: on all ranks, the main one writing."""
    for stage in STAGES:
        trainer = make_trainer("llama_tied", stage, tmp_path / "run", max_steps=1)
        trainer.train()
        twin, folder = _plain_twin("llama_tied", trainer.model), tmp_path / f"direct{stage}"
        trainer.model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
        dist.barrier()
        _check_loads(folder, twin)


class _Watch(TrainerCallback):
    """Reads weights in the middle of training, on every rank, as EMA and logging callbacks do."""

    def __init__(self):
        self.norms = []

    def on_step_end(self, args, state, control, model, **kwargs):
        assert all(p.numel() > 0 for p in model.parameters())
        self.norms.append(sum(float(p.detach().double().square().sum()) for p in model.parameters()))


@distributed(world_size=2)
def test_callbacks_read_the_weights_of_now(tmp_path):
    seen = {}
    for stage in (None, *STAGES):
        watch = _Watch()
        trainer = make_trainer("llama_tied", stage, tmp_path / "run", optim="sgd", others={"callbacks": [watch]})
        trainer.train()
        seen[stage] = watch.norms
    assert len(set(seen[None])) == len(seen[None]) == 6, seen[None]
    for stage in STAGES:
        for mine, theirs in zip(seen[stage], seen[None], strict=True):
            assert abs(mine - theirs) <= 1e-6 * theirs, f"stage {stage}: {seen[stage]} {seen[None]}"


@distributed(world_size=2)
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    """A learning rate that spoils the model: the best checkpoint is the first, and it is what stays."""
    # transformers 5.3 forgets which checkpoint is the best one under save_strategy "best", with or without hf_zero.
    strategy = "steps" if version.parse(transformers.__version__) < version.parse("5.4") else "best"
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": strategy, "save_steps": 1, "max_steps": 4}
    for stage in (None, *STAGES):
        folder = tmp_path / f"stage{stage}"
        trainer = make_trainer(
            "llama_tied", stage, folder, load_best_model_at_end=True, learning_rate=30.0, optim="sgd", **options
        )
        trainer.train()
        dist.barrier()
        best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
        last = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]
        assert last > best + 0.01, f"stage {stage}: the run was meant to go wrong"
        loss = trainer.evaluate()["eval_loss"]
        assert abs(loss - best) <= 1e-6 * best, f"stage {stage}: loss {loss} after loading, best {best}"


@dataclasses.dataclass
class _Seq2SeqArguments(ZeroArgumentsMixin, Seq2SeqTrainingArguments):
    pass


class _Seq2SeqTrainer(hf_zero.ZeroTrainerMixin, Seq2SeqTrainer):
    pass


@distributed(world_size=2)
def test_generation_while_evaluating(tmp_path):
    """Ranks generate texts of different lengths; at stage 3 none may stop calling forward before the others."""
    predicted = {}
    for stage in (None, *STAGES):
        trainer = make_trainer(
            "t5",
            stage,
            tmp_path / "run",
            trainer_class=Seq2SeqTrainer if stage is None else _Seq2SeqTrainer,
            arguments_class=Seq2SeqTrainingArguments if stage is None else _Seq2SeqArguments,
            predict_with_generate=True,
            generation_max_length=9,
            optim="sgd",
            max_steps=2,
        )
        # Make the end token likely, so that some rows end early and others do not.
        trainer.model.generation_config.eos_token_id = list(range(3, 64, 2))
        trainer.train()
        predicted[stage] = trainer.predict(trainer.eval_dataset).predictions
    for stage in STAGES:
        assert (predicted[stage] == predicted[None]).all(), f"stage {stage}: {predicted[stage]} {predicted[None]}"


# ------------------------------------------------------------------------------------------------------ whose is what


@distributed(world_size=2)
def test_model_and_optimizer_stay_the_users_objects(tmp_path):
    for stage in STAGES:
        model = zoo.build("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        params = dict(model.named_parameters())
        trainer = make_trainer(
            "llama", stage, tmp_path, model=model, max_steps=1, others={"optimizers": (optimizer, scheduler)}
        )
        trainer.train()
        assert trainer.model is model and trainer.accelerator.unwrap_model(trainer.model_wrapped) is model
        assert trainer.optimizer.optimizer is optimizer and scheduler.optimizer is optimizer
        assert isinstance(model, type(zoo.build("llama"))) and type(model).__name__ == "LlamaForCausalLM"
        for name, p in model.named_parameters():
            assert p is params[name] and p.numel() > 0 and isinstance(p, torch.nn.Parameter), name


def _limit(place):
    """Have `place` fail as without memory where a batch has more than 2 rows; the trainer tries smaller ones."""

    def check(value):
        if len(value) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 sheets of paper")

    def prepare(model):
        layer = model.model.layers[1]
        if place == "in forward":
            layer.register_forward_pre_hook(lambda module, args: check(args[0]))
        else:
            layer.register_forward_hook(lambda module, args, output: output.register_hook(check) and None)

    return prepare


SMALL = {"per_device_train_batch_size": 2, "optim": "sgd", "max_steps": 2}


@pytest.mark.parametrize("place", ["in forward", "in backward"])
@distributed(world_size=2)
def test_a_batch_size_that_does_not_fit_is_made_smaller(tmp_path, place):
    """`auto_find_batch_size` prepares the same model once more, after a pass that was given up halfway."""
    small = make_trainer("llama", None, tmp_path, **SMALL)
    small.train()
    wanted = {name: p.detach().clone() for name, p in small.model.named_parameters()}
    for stage in (1, 3):
        options = {**SMALL, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
        trainer = make_trainer("llama", stage, tmp_path, **options)
        _limit(place)(trainer.model)
        trainer.train()
        assert trainer._train_batch_size == 2 and trainer.model._zero_engine.config.zero_stage == stage
        compare_weights(whole_weights(trainer.model), wanted, f"stage {stage}")


def _train_without_memory_on_one_rank(folder, stage):
    options = {**SMALL, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
    trainer = make_trainer("llama", stage, folder, zero_config={"hang_timeout_s": 3}, **options)
    if dist.get_rank() == 1:
        _limit("in forward")(trainer.model)
    trainer.train()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_alone_has_no_memory_ends_the_run_and_says_what_to_do(tmp_path, stage):
    """The others are in the middle of a pass that needs it."""
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(_train_without_memory_on_one_rank, tmp_path, stage)
    said = "auto_find_batch_size: rank 1 has no memory left"
    assert said in str(failure.value) and "lower per_device_train_batch_size" in str(failure.value), failure.value


# --------------------------------------------------------------------------------------------------------- wrong input


def _refusal(folder, **arguments):
    """The message of the error that building or starting this trainer raises."""
    try:
        make_trainer("llama", arguments.pop("stage", 3), folder, **arguments).train()
    except (ValueError, ZeroError) as error:
        return str(error)
    return "nothing was refused"


@distributed(world_size=2)
def test_an_unknown_stage_is_named(tmp_path):
    message = _refusal(tmp_path, stage=4)
    assert "zero_stage" in message and "4" in message, message


@distributed(world_size=2)
def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    stranger = zoo.build("llama")
    optimizer = torch.optim.SGD(stranger.parameters(), lr=0.1)
    for stage in STAGES:
        message = _refusal(tmp_path, stage=stage, others={"optimizers": (optimizer, None)})
        assert "SGD" in message and "parameter" in message, f"stage {stage}: {message}"


@distributed(world_size=2)
def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    model = zoo.build("llama")
    optimizer = torch.optim.LBFGS(model.parameters())
    message = _refusal(tmp_path, model=model, others={"optimizers": (optimizer, None)})
    assert "LBFGS" in message and "needs no closure" in message, message


@distributed(world_size=2)
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    message = _refusal(blocked / "run")
    assert "output_dir" in message and str(blocked) in message, message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@distributed(world_size=2)
def test_values_that_contradict_each_other_are_refused(tmp_path):
    config = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 8}
    message = _refusal(tmp_path, stage=3, gradient_accumulation_steps=4, zero_config=config)
    assert "gradient_accumulation_steps" in message and "8" in message and "4" in message, message


def _alone(folder):
    trainer = make_trainer("llama_tied", 3, folder, optim="sgd")
    trainer.train()
    saved_weights(trainer, folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_one_process_trains_without_sharding(tmp_path):
    losses = run_ranks(_alone, tmp_path, world_size=1)[0]
    assert len(losses) == 11 and all(0 < loss < 5 for loss in losses), losses
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
