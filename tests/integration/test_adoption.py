"""In ranks that were started for ZeRO, what a script does with stock classes is done by ours; elsewhere by theirs."""

import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_zero import adopt, run
from hf_zero.config import ZeroConfig
from hf_zero.core.deferred import DeferredParameter
from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.trainers import compare_logs, make_data, make_trainer, without_times


def start(config):
    """Make this process a rank of a run with `config`; None for one that nobody has asked to shard."""
    if config is not None:
        os.environ["HF_ZERO_CONFIG"] = ZeroConfig.from_any(config).to_json()
        adopt.watch()


class Own(Trainer):
    """A user's trainer, written for the stock one."""

    called = ()

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        self.called = (*self.called, "compute_loss")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (0.5 * loss, outputs) if return_outputs else 0.5 * loss

    def save_model(self, *args, **kwargs):
        self.called = (*self.called, "save_model")
        super().save_model(*args, **kwargs)


def train_own(folder, config):
    start(config)
    trainer = make_trainer("llama", None, folder, trainer_class=Own, save_strategy="epoch", eval_strategy="epoch")
    trainer.train()
    return {
        "logs": without_times(trainer.state.log_history),
        "called": set(trainer.called),
        "order": [cls.__name__ for cls in type(trainer).__mro__],
        "sharded": hasattr(trainer.model, "_zero_engine"),
        "committed": (Path(folder) / "checkpoint-6/COMMIT").exists(),
    }


def test_a_trainer_of_the_user_trains_as_under_ddp_and_its_overrides_come_first(tmp_path):
    stock = run_ranks(train_own, tmp_path / "ddp", None)[0]
    ours = run_ranks(train_own, tmp_path / "zero", {"zero_stage": 3})[0]
    compare_logs(ours["logs"], stock["logs"], "Own")
    assert (stock["sharded"], ours["sharded"], ours["committed"]) == (False, True, True), ours
    assert ours["called"] == stock["called"] == {"compute_loss", "save_model"}
    assert ours["order"][:4] == ["Own", "Own", "Trainer", "ZeroTrainerMixin"]


class Counting(Accelerator):
    """A user's accelerator."""

    steps = 0

    def backward(self, *args, **kwargs):
        self.steps += 1
        super().backward(*args, **kwargs)


def loop(config, **options):
    start(config)
    accelerator = Counting(gradient_accumulation_steps=2, **options)
    model = zoo.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(make_data("llama", 16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.steps, isinstance(accelerator, Counting), hasattr(model, "_zero_engine")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_on_a_stock_accelerator_trains_as_under_ddp(stage):
    stock, ours = run_ranks(loop, None)[0], run_ranks(loop, {"zero_stage": stage})[0]
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(stock[0]), rtol=0, atol=1e-6)
    assert ours[1:] == (4, True, True) and stock[1:] == (4, True, False)


@pytest.mark.parametrize("flag", [True, False])
@distributed(world_size=2)
def test_pretrained_models_are_loaded_in_slices_where_the_configuration_says_so(tmp_path, flag):
    zoo.build("llama").save_pretrained(tmp_path)
    torch.distributed.barrier()
    start({"zero_stage": 3, "zero3_init_flag": flag})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    fresh = AutoModelForCausalLM.from_config(model.config)
    found = {isinstance(param, DeferredParameter) for made in (model, fresh) for param in made.parameters()}
    assert found == {flag}, found


@distributed(world_size=2)
def test_deepspeed_files_of_the_arguments_configure_the_run(tmp_path):
    """Under `torchrun -m hf_zero.run`, where nothing else does."""
    adopt.watch()
    config = {"zero_optimization": {"stage": 3}}
    args = TrainingArguments(str(tmp_path), deepspeed=config, report_to=[], max_steps=1)
    trainer = Trainer(zoo.build("llama"), args, train_dataset=make_data("llama", 4))
    assert trainer.accelerator.zero_plugin.config.zero_stage == 3
    trainer.train()
    assert hasattr(trainer.model, "_zero_engine")
    restored = torch.load(tmp_path / "checkpoint-1/training_args.bin", weights_only=False)
    assert type(restored) is TrainingArguments, type(restored)


def names_of_deepspeed():
    """What scripts ask for, answered as where DeepSpeed is not in use."""
    start({"zero_stage": 3})
    from accelerate.utils import DummyOptim, DummyScheduler  # missing without adoption
    from transformers.integrations import is_deepspeed_zero3_enabled

    accelerator = Accelerator()
    optimizer = DummyOptim([torch.nn.Parameter(torch.ones(1))])
    refused = []
    for item in (optimizer, DummyScheduler(optimizer)):
        with pytest.raises(ValueError, match="stands for the .* section of a DeepSpeed file") as error:
            accelerator.prepare(item)
        refused.append(str(error.value))
    return is_deepspeed_zero3_enabled(), accelerator.deepspeed_plugin, accelerator.distributed_type.value


def test_questions_for_deepspeed_are_answered_with_no():
    assert run_ranks(names_of_deepspeed) == [(False, None, "MULTI_CPU")] * 2


SCRIPT = """
import sys
from pathlib import Path

import pickle
from beside import VALUE


class Picklable:
    pass


if __name__ == "__main__":
    assert isinstance(pickle.loads(pickle.dumps(Picklable())), Picklable)
    print("RAN", VALUE, sys.argv, Path(__file__).name)
"""


@pytest.mark.parametrize("words", [["scripts/train.py"], ["-m", "scripts.train"]])
def test_the_front_module_runs_a_script_as_python_would(tmp_path, monkeypatch, capsys, words):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").write_text(SCRIPT)
    for folder in (tmp_path, tmp_path / "scripts"):
        (folder / "beside.py").write_text(f"VALUE = {folder.name!r}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adopt, "watch", lambda: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--flag", "1"])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    run.main()
    beside, named = (tmp_path.name, "train.py") if words[0] == "-m" else ("scripts", "scripts/train.py")
    output = capsys.readouterr().out
    assert output.startswith(f"RAN {beside} ['") and f"{named}', '--flag', '1'] train.py" in output, output
    monkeypatch.delitem(sys.modules, "beside")


def test_the_front_module_wants_a_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "-m"])
    with pytest.raises(SystemExit) as left:
        run.main()
    assert left.value.code == 2 and capsys.readouterr().err.startswith("usage: python -m hf_zero.run")
