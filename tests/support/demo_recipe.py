"""The demo's recipe, made small."""

from pathlib import Path

import yaml

from tests.arithmetic.test_demo_data import RECIPE


def write_small_recipe(folder: Path, **settings: object) -> Path:
    """Three steps with little data, everything in `folder`; `settings` add to the recipe or replace what it says."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe |= {
        "dataset_name": str(folder / "data"),
        "model_name_or_path": str(folder / "base"),
        "output_dir": str(folder / "sft"),
        "max_steps": 3,
        "logging_steps": 1,
        **settings,
    }
    recipe["demo"] |= {"train_examples": 96, "test_examples": 8}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
