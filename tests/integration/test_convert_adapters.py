"""Checkpoints of adapters (PEFT) become ours and go back: only what was trained has a state."""

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint.training_state import STATE_NAME
from tests.support import zoo
from tests.support.golden_runs import (
    ADAPTERS,
    compare,
    convert,
    converted,
    resume,
    source,
    told_losses,
    told_tensors,
)
from tests.support.harness import run_ranks
from tests.support.make_golden_checkpoints import CASES


ADAPTER = "adapter_model.safetensors"


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_and_states_are_those_of_deepspeed(case, tmp_path, capsys):
    folder = converted(case, tmp_path / "ours")
    assert sorted(path.name for path in folder.iterdir()) == [
        "COMMIT",
        "adapter_config.json",
        ADAPTER,
        "scheduler.pt",
        "trainer_state.json",
        STATE_NAME,
    ]
    assert (folder / ADAPTER).read_bytes() == (source(case) / ADAPTER).read_bytes()
    states, wanted = load_file(folder / STATE_NAME), told_tensors(case)
    assert len(states) == len(wanted) == 24
    for name, state in states.items():
        assert torch.equal(state, wanted[name.replace(".master", ".weight")]), name
    assert (
        ": adapters as they were, optimizer state (exp_avg, exp_avg_sq) of 8 trained parameters in 2 groups"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("stage, ranks", [(2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize("case", ADAPTERS)
def test_training_goes_on_as_deepspeed_would(case, stage, ranks, tmp_path):
    folder = converted(case, tmp_path / "ours")
    found = run_ranks(resume, case, tmp_path / "run", folder, 4 // ranks, stage, world_size=ranks)[0]
    compare(found, told_losses(case), 5e-4 if CASES[case].get("bf16") else 1e-6)


@pytest.mark.parametrize("case", ADAPTERS)
def test_the_stock_trainer_goes_on_with_them(case, tmp_path):
    assert convert(converted(case, tmp_path / "ours"), tmp_path / "stock") == 0
    weights, wanted = load_file(tmp_path / "stock" / ADAPTER), told_tensors(case)
    assert len(weights) == 8
    for name, weight in weights.items():
        assert torch.equal(weight, wanted[name.replace(".weight", ".default.weight.weight")]), name
    found = run_ranks(resume, case, tmp_path / "run", tmp_path / "stock", 4, world_size=1)[0]
    # The stock Trainer keeps the weights in fp32 and computes under autocast.
    compare(found, told_losses(case), 2e-3 if CASES[case].get("bf16") else 1e-6)


def test_modules_that_are_trained_whole_are_found(tmp_path):
    from peft import LoraConfig, get_peft_model

    from hf_zero.convert import adapters

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(zoo.build("llama"), config)
    model.save_pretrained(tmp_path)
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    found = adapters.tensors(tmp_path, trained)
    assert set(found.values()) == set(load_file(tmp_path / ADAPTER))
    assert found["base_model.model.lm_head.modules_to_save.default.weight"] == "base_model.model.lm_head.weight"
