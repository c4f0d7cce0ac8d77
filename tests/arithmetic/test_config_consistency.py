"""One owner for shared values: every combination of sources, every conflict in one error, every "auto" explained."""

import itertools
import json
from types import SimpleNamespace

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.config.consistency import (
    argument_claims,
    check_consistency,
    config_claims,
    hidden_size_of,
    resolve_auto,
)
from hf_zero.config.reference import accumulation_outcome
from hf_zero.errors import ZeroConfigError


ABSENT = object()
VALUES = (ABSENT, "auto", "8", 8, 4)


def _effective(yaml_value, json_value, args_value, folder):
    """The accumulation that these three sources give together, read from real files."""
    pointer = ""
    if json_value is not ABSENT:
        (folder / "ds.json").write_text(
            json.dumps({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": json_value})
        )
        pointer = "  deepspeed_config_file: ds.json\n"
    written = "" if yaml_value is ABSENT else f"  gradient_accumulation_steps: {json.dumps(yaml_value)}\n"
    file = folder / "a.yaml"
    file.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero3_init_flag: false\n{pointer}{written}")
    config = ZeroConfig.from_any(file)
    arguments = {} if args_value is ABSENT else {"gradient_accumulation_steps": args_value}
    agreed = check_consistency([*config_claims(config), *argument_claims(arguments, "TrainingArguments")])
    return resolve_auto(config, agreed=agreed).gradient_accumulation_steps


@pytest.mark.parametrize(
    ("yaml_value", "json_value", "args_value"),
    list(itertools.product(VALUES, repeat=3)),
    ids=lambda value: "absent" if value is ABSENT else repr(value),
)
def test_accumulation_matrix(yaml_value, json_value, args_value, tmp_path):
    numbers = {int(value) for value in (yaml_value, json_value, args_value) if value not in (ABSENT, "auto")}
    if len(numbers) > 1:
        with pytest.raises(ZeroConfigError, match="gradient_accumulation_steps differs"):
            _effective(yaml_value, json_value, args_value, tmp_path)
        expected = "conflict"
    else:
        expected = numbers.pop() if numbers else 1
        assert _effective(yaml_value, json_value, args_value, tmp_path) == expected
    # The page in docs/ lists the same outcome.
    plain = [None if value is ABSENT else value for value in (yaml_value, json_value, args_value)]
    assert accumulation_outcome(*plain) == (expected if len(set(plain) - {None, "auto"}) else "default")


def test_every_conflict_is_listed_with_place_value_and_fix(tmp_path):
    file = tmp_path / "zero2.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n"
        "  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n"
    )
    arguments = {
        "gradient_accumulation_steps": 8,
        "max_grad_norm": 0.5,
        "fp16": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-4,
    }
    claims = [*config_claims(ZeroConfig.from_any(file)), *argument_claims(arguments, "TrainingArguments")]
    with pytest.raises(ZeroConfigError) as caught:
        check_consistency(claims)
    assert caught.value.problems == (
        "mixed_precision differs between its sources:\n"
        f"       'bf16'   {file}:2 (mixed_precision)\n"
        "       'fp16'   TrainingArguments (fp16)\n"
        f"       fix: make {file}:2 say 'fp16', or change the arguments to match",
        "gradient_accumulation_steps differs between its sources:\n"
        f"       4        {file}:5 (deepspeed_config.gradient_accumulation_steps)\n"
        "       8        TrainingArguments (gradient_accumulation_steps)\n"
        f'       fix: write "gradient_accumulation_steps: auto" in {file}:5, so that the arguments own it, or pass '
        "--gradient_accumulation_steps 4",
        "gradient_clipping differs between its sources:\n"
        f"       1.0      {file}:6 (deepspeed_config.gradient_clipping)\n"
        "       0.5      TrainingArguments (max_grad_norm)\n"
        f'       fix: write "gradient_clipping: auto" in {file}:6, so that the arguments own it, or pass '
        "--max_grad_norm 1.0",
    )


@pytest.mark.parametrize(
    ("total", "world_size", "fits"), [(24, 2, True), ("24", 2, True), (24, 3, False), (24, None, True)]
)
def test_the_global_batch_is_micro_times_accumulation_times_ranks(total, world_size, fits):
    config = ZeroConfig.from_any({"zero_optimization": {"stage": 2}, "train_batch_size": total})
    arguments = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
    claims = [*config_claims(config), *argument_claims(arguments, "TrainingArguments")]
    if fits:
        assert check_consistency(claims, world_size=world_size)["train_batch_size"].value == 24
        return
    with pytest.raises(ZeroConfigError, match=r"24 .* 4 .* x 3 .* x 3 = 36\n.*auto.*, or 36"):
        check_consistency(claims, world_size=world_size)


def test_two_arguments_may_not_differ_either():
    claims = argument_claims({"gradient_accumulation_steps": 2}, "Accelerator")
    claims += argument_claims({"gradient_accumulation_steps": 4}, "TrainingArguments")
    with pytest.raises(ZeroConfigError, match="fix: keep one of them"):
        check_consistency(claims)


def test_the_launchers_copy_of_a_value_is_listed_once(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n")
    config = ZeroConfig.from_any(file)
    copy = ZeroConfig.from_json(config.to_json())
    arguments = argument_claims({"gradient_accumulation_steps": 8}, "TrainingArguments")
    with pytest.raises(ZeroConfigError) as caught:
        check_consistency([*config_claims(config), *config_claims(copy), *arguments])
    assert str(caught.value).count(f"       4        {file}:3") == 1


def test_arguments_that_say_nothing():
    assert argument_claims({"bf16": False, "fp16": False, "max_grad_norm": None, "unknown": 3}, "x") == []
    assert argument_claims({"gradient_accumulation_steps": "auto"}, "x") == []
    with pytest.raises(ZeroConfigError, match="x: gradient_accumulation_steps is 'many': expected a number"):
        argument_claims({"gradient_accumulation_steps": "many", "max_grad_norm": True}, "x")


def test_no_in_an_accelerate_yaml_leaves_the_precision_to_the_arguments(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: DEEPSPEED\nmixed_precision: 'no'\n")
    config = ZeroConfig.from_any(file)
    agreed = check_consistency([*config_claims(config), *argument_claims({"bf16": True}, "TrainingArguments")])
    assert resolve_auto(config, agreed=agreed).mixed_precision == "bf16"
    config = ZeroConfig.from_any(file, mixed_precision="no")  # said on purpose
    with pytest.raises(ZeroConfigError, match="mixed_precision differs"):
        check_consistency([*config_claims(config), *argument_claims({"bf16": True}, "TrainingArguments")])


def _auto_config():
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    shared = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    section = {"stage": 3, **dict.fromkeys(sizes, "auto"), "allgather_bucket_size": "auto"}
    return ZeroConfig.from_any({"zero_optimization": section, **dict.fromkeys(shared, "auto")})


def test_every_auto_becomes_a_value_with_a_reason():
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "per_device_train_batch_size": 4}
    agreed = check_consistency(argument_claims(arguments, "TrainingArguments"))
    config = resolve_auto(_auto_config(), agreed=agreed, world_size=3, hidden_size=64)
    assert config.gradient_accumulation_steps == 2
    assert config.gradient_clipping == 1.0
    assert config.train_micro_batch_size_per_gpu == 4
    assert config.train_batch_size == 24
    assert config.reduce_bucket_size == 4096
    assert config.stage3_prefetch_bucket_size == 3686
    assert config.stage3_param_persistence_threshold == 640
    assert config.allgather_bucket_size == 500_000_000
    reasons = {name: origin.reason for name, origin in config.origins.items() if origin.reason}
    assert reasons["gradient_clipping"] == "auto: TrainingArguments (max_grad_norm)"
    assert reasons["train_batch_size"] == "auto: micro-batch x accumulation x ranks = 4 x 2 x 3"
    assert reasons["stage3_param_persistence_threshold"] == "auto: 10 x hidden_size, hidden_size is 64"


def test_autos_that_nobody_fills():
    config = resolve_auto(_auto_config())
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (1, 0.0)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == ("auto", "auto")
    assert config.reduce_bucket_size == 500_000_000
    assert config.stage3_param_persistence_threshold == 0
    assert config.origins["reduce_bucket_size"].reason == "auto: the default, no hidden_size known"
    assert config.origins["gradient_clipping"].reason == "auto: nobody asked for clipping"


@pytest.mark.parametrize(
    ("model_config", "width"),
    [
        (SimpleNamespace(hidden_size=64), 64),
        (SimpleNamespace(d_model=32), 32),
        (SimpleNamespace(n_embd=16), 16),
        (SimpleNamespace(hidden_sizes=[8, 32, 16]), 32),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=48)), 48),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=(8, 4))), 8),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_model_width(model_config, width):
    assert hidden_size_of(model_config) == width
