"""TRL's trainers with state and weights on disk log and save, bit for bit, what they do without."""

import peft
import pytest
import yaml
from safetensors.torch import load_file

from hf_zero.core import homes
from hf_zero.core.engine import engine_of
from tests.integration.test_recipes import ROOT
from tests.support.harness import distributed
from tests.support.trainers import without_times
from tests.support.trl_runs import SFT, compare, make, make_grpo, outcome


RECIPE = yaml.safe_load((ROOT / "recipes/accelerate_configs/zero3_nvme.yaml").read_text())


@pytest.mark.parametrize("kind", ["grpo", "lora"])
@distributed(world_size=2)
def test_equals_the_run_without_offload(tmp_path, kind):
    homes.LEAST_ON_DISK = 1  # the model is tiny
    section = {key: value for key, value in RECIPE["deepspeed_config"].items() if key.startswith("offload_")}
    section |= {key: str(tmp_path) for key in section if key.endswith("_path")}
    offload = {f"zero_{key}": value for key, value in section.items()}
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    found = []
    for name, options in (("in_memory", {}), ("on_disk", offload)):
        folder = tmp_path / name
        if kind == "grpo":
            trainer = make_grpo(3, folder, **options)
            found.append(outcome(trainer, folder))
        else:
            trainer = make(SFT, 3, folder, others={"peft_config": adapters}, max_steps=3, **options)
            trainer.train()
            trainer.save_model(str(folder))
            trainer.accelerator.wait_for_everyone()
            weights = load_file(folder / "adapter_model.safetensors")
            found.append((without_times(trainer.state.log_history), weights))
        assert bool(engine_of(trainer.model_wrapped).homes.files) == (name == "on_disk")
    compare(*found, kind, tolerance=0.0)
