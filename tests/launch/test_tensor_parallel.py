"""Stock scripts share layers out over ranks where an Accelerate YAML, a JSON of DeepSpeed or a flag says so."""

import json

import pytest

from tests.launch.test_ulysses import LOOP, SAY, TRAINER, _losses
from tests.support.launches import ACCELERATE, HF_ZERO, RECIPES


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name, text", [("trainer", TRAINER), pytest.param("loop", LOOP, marks=pytest.mark.exhaustive)]
)
def test_an_unmodified_script_trains_as_with_whole_layers(name, text, tmp_path):
    script = tmp_path / "train.py"
    # Two heads of keys and values, which two ranks share.
    script.write_text(text.replace("num_key_value_heads=1", "num_key_value_heads=2") + SAY)
    launch = (*ACCELERATE, "--config_file")
    whole = _losses((*launch, RECIPES / "zero3.yaml", "--num_processes", 2), script, tmp_path)
    found = _losses((*launch, RECIPES / "zero3_tensor_parallel.yaml", "--num_processes", 4), script, tmp_path)
    assert found == whole
    if name == "loop":
        source = tmp_path / "zero2.json"
        source.write_text(json.dumps({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}))
        flags = ("--use_deepspeed", "--deepspeed_config_file", source, "--num_processes", 4)
        found = _losses((*HF_ZERO, *flags), script, tmp_path)
        assert found == whole
