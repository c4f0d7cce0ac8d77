"""Every `optim` of TrainingArguments trains what it trains under DDP, or says why not: one row of a table each."""

import importlib.util

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.training_args import OptimizerNames

from hf_zero.config.optimizers import OPTIMS, Stepped
from hf_zero.core.engine import engine_of
from hf_zero.errors import ZeroConfigError
from tests.support.harness import distributed
from tests.support.trainers import (
    compare_logs,
    compare_weights,
    make_trainer,
    saved_weights,
    train,
    without_times,
)


RUNNING = [name for name, optim in OPTIMS.items() if optim.stepped is not Stepped.REFUSED]
REFUSED = [name for name in OPTIMS if name not in RUNNING]
NEEDS_CUDA = "galore_adamw_8bit"
# torchao compiles its step for every shape.
TIMEOUT = 1200
# Where a gradient is next to nothing, tiny eps turn rounding into whole steps.
OPTIONS = {
    "rmsprop": {"optim_args": "eps=1e-3"},
    "adagrad": {"optim_args": "eps=1e-3"},
    **{name: {"optim_target_modules": ["mlp"], "optim_args": "rank=4"} for name in RUNNING if "galore" in name},
    "apollo_adamw": {"optim_target_modules": ["mlp"], "optim_args": "rank=4"},
    # A norm whose last bit differs turns codes by one each. Without clipping, two ranks are alike to the bit.
    **{name: {"max_grad_norm": 0.0} for name in RUNNING if "8bit" in name or "4bit" in name},
}


def _is_missing(name):
    package = OPTIMS[name].package
    return package is not None and importlib.util.find_spec(package) is None


def _model():
    """Its matrices have blocks enough to be kept in 8 bit."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, attention_dropout=0.0))


def test_every_name_of_transformers_is_in_the_table():
    names = {name.value for name in OptimizerNames}
    if Version(transformers.__version__) >= Version("5.20"):
        assert sorted(OPTIMS) == sorted(names)
    else:  # the first is gone since then, the other has come
        assert names ^ set(OPTIMS) <= {"adamw_apex_fused", "stable_adamw"}, names ^ set(OPTIMS)


def _arguments(name):
    return {"model": _model(), "optim": name, "learning_rate": 1e-3, **OPTIONS.get(name, {})}


@pytest.mark.parametrize("name", [name for name in RUNNING if not _is_missing(name) and name != NEEDS_CUDA])
@distributed(world_size=2, timeout=TIMEOUT)
def test_it_trains_as_under_ddp(tmp_path, name):
    log, weights = train("llama", None, tmp_path / "stock", **_arguments(name))
    for stage in (2, 3):
        torch.manual_seed(0)
        trainer = make_trainer("llama", stage, tmp_path / str(stage), **_arguments(name))
        trainer.train()
        compare_logs(without_times(trainer.state.log_history), log, f"{name}, stage {stage}")
        compare_weights(saved_weights(trainer, tmp_path / str(stage)), weights, f"{name}, stage {stage}")
        (binding,) = engine_of(trainer.model).bindings
        # GaLore and APOLLO step vectors in slices.
        assert (True in binding.owned) == (OPTIMS[name].stepped is Stepped.MATRICES), "the table says it otherwise"


@distributed(world_size=1)
def test_what_cannot_run_is_refused_by_name(tmp_path):
    for name in REFUSED:
        with pytest.raises(ZeroConfigError, match=f"optim='{name}' is not supported: .{{20}}"):
            make_trainer("llama", 2, tmp_path, optim=name).create_optimizer()


@distributed(world_size=1)
def test_a_missing_package_is_named(tmp_path):
    for name in filter(_is_missing, RUNNING):
        package = OPTIMS[name].package.replace("optimi", "torch.optimi")
        with pytest.raises((ImportError, ValueError), match=f"(?i){package}"):
            make_trainer("llama", 2, tmp_path, **_arguments(name)).create_optimizer()
