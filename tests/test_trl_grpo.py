"""`ZeroGRPOTrainer` at stages 1-3 logs and saves what the stock GRPOTrainer does under DDP."""

import pytest

from tests.harness import distributed
from tests.trl_runs import compare, digit_share, make_grpo, outcome, policy, shortness, tokenizer


CASES = {
    "beta_0": {},
    "beta": {"beta": 0.1},
    "several_rewards": {"rewards": (digit_share, shortness), "reward_weights": [1.0, 0.5]},
    "num_iterations": {"num_iterations": 2, "max_steps": 4, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "beta": 0.1},
}


@pytest.fixture
def base(tmp_path):
    """A saved policy: TRL loads the reference model from the same place."""
    policy().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def _run(stage, folder, base, **options):
    return outcome(make_grpo(stage, folder, model=base, **options), folder)


@pytest.mark.parametrize("case", CASES)
@distributed(world_size=2)
def test_equals_stock(tmp_path, base, case):
    stock = _run(None, tmp_path / "stock", base, **CASES[case])
    assert any(entry.get("reward_std", 0) > 0 for entry in stock[0]), stock[0]
    for stage in (1, 2, 3):
        compare(_run(stage, tmp_path / f"stage{stage}", base, **CASES[case]), stock, f"stage {stage}")
