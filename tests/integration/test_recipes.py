"""Every recipe parses, says what it costs, plans at full size without weights, and trains when scaled down."""

import json
import math
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig

from hf_zero import ZeroConfig
from hf_zero.config.consistency import resolve_auto
from hf_zero.core.layout import ALIGNMENT_BYTES
from hf_zero.core.partition import partition
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.trace import Scenario, trace
from hf_zero.trl import ZeroGRPOConfig, ZeroSFTConfig
from tests.support.harness import distributed, run_ranks
from tests.support.trl_runs import CONVERSATIONS, tokenizer


ROOT = Path(__file__).parents[2]
SCRIPTS = str(ROOT / "scripts")
MODELS = yaml.safe_load((ROOT / "tests/data/models.yaml").read_text())
SFT = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/*/sft/config_distill.yaml"))
GRPO = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.glob("recipes/*/grpo/config_demo.yaml")
    if "demo/grpo" not in str(path)
)
LAUNCHERS = sorted(path.stem for path in ROOT.glob("recipes/accelerate_configs/*.yaml"))


def _scripts():
    """The scripts import each other by plain names, as they do when one of them is started."""
    if SCRIPTS not in sys.path:
        sys.path.insert(0, SCRIPTS)
    import grpo
    import sft

    return sft, grpo


def _parse(recipe, path, **changes):
    """The recipe's arguments, with some lines changed (None removes one), as its script reads them."""
    sft, grpo = _scripts()
    settings = {**yaml.safe_load((ROOT / recipe).read_text()), "use_cpu": True, **changes}
    path.mkdir(parents=True, exist_ok=True)
    file = path / "recipe.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    kinds = (grpo.GRPOScriptArguments, ZeroGRPOConfig)
    if "reward_funcs" not in settings:
        kinds = (sft.SFTScriptArguments, ZeroSFTConfig)
    return sft.read_arguments(*kinds, ModelConfig, words=["--config", str(file)])


def _config(name, **changes):
    return AutoConfig.for_model(**{**MODELS[name], **changes})


def _stated(text, pattern):
    found = re.search(pattern, text)
    assert found, f"no comment like {pattern!r}"
    return [float(number) for number in found.groups()]


def test_the_models_of_the_tutorials_have_recipes():
    models = {"Qwen2.5-1.5B-Instruct", "DeepSeek-R1-Distill-Qwen-1.5B", "OpenR1-Distill-7B", "Llama-3.1-8B"}
    assert {Path(recipe).parts[1] for recipe in SFT} == models
    assert {Path(recipe).parts[1] for recipe in GRPO} == models


@pytest.mark.parametrize("recipe", [*SFT, *GRPO])
def test_parses_and_says_its_batch(tmp_path, recipe):
    text = (ROOT / recipe).read_text()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`gradient_checkpointing", FutureWarning)
        script, training, model = _parse(recipe, tmp_path, output_dir=str(tmp_path / "out"))
    ranks, micro, steps, rows = _stated(text, r"Global batch: (\d+) GPUs x (\d+) x (\d+) = (\d+)")
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (micro, steps)
    assert ranks * micro * steps == rows
    if recipe in GRPO:
        (prompts,) = _stated(text, r"replies to (\d+) questions")
        assert rows == prompts * training.num_generations
        assert len(script.reward_funcs) == len(training.reward_weights)
        _scripts()
        from rewards import find_reward

        assert all(callable(find_reward(name)) for name in script.reward_funcs)
    assert model.model_name_or_path in MODELS
    assert training.gradient_checkpointing and training.bf16


@pytest.mark.parametrize("recipe", [*SFT, *GRPO])
def test_states_the_memory_of_the_real_model(tmp_path, recipe):
    text = (ROOT / recipe).read_text()
    _, training, model_args = _parse(recipe, tmp_path, output_dir=str(tmp_path / "out"))
    config = _config(model_args.model_name_or_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    states, stage, ranks, params = _stated(
        text, r"Model states per GPU: ([\d.]+) GB \(ZeRO-(\d) over (\d+) ranks, ([\d.]+) B parameters\)"
    )
    assert f"accelerate_configs/zero{stage:.0f}.yaml" in text
    units, hooks = partition(model)
    assert len(units) >= config.num_hidden_layers + 1
    # As the flat buffers lie in memory: every parameter aligned, every unit cut into equal slices.
    elements = sum(_padded([p.numel() for p in unit.params.values()], int(ranks)) for unit in units)
    per_element = (0 if stage == 3 else 2) + 16 / ranks  # weights; master, two moments and gradient in fp32
    assert states == pytest.approx(elements * per_element / 1e9, rel=0.01)
    assert params == pytest.approx(model.num_parameters() / 1e9, rel=0.005)
    if recipe in GRPO:
        cache, replies, length = _stated(text, r"cache of up to ([\d.]+) GB \((\d+) replies of (\d+) tokens\)")
        assert replies == training.per_device_train_batch_size * training.steps_per_generation
        assert length == training.max_completion_length
        head = config.hidden_size // config.num_attention_heads
        per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
        assert cache == pytest.approx(replies * length * per_token / 1e9, abs=0.06)


def _padded(numels, ranks):
    alignment = ALIGNMENT_BYTES // 2
    total = sum(math.ceil(numel / alignment) * alignment for numel in numels)
    return math.ceil(total / (ranks * alignment)) * ranks * alignment


def _small_model(name, folder):
    words = tokenizer()
    torch.manual_seed(0)
    config = _config(
        name,
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.mark.parametrize("recipe", [*SFT, *GRPO])
@distributed(world_size=2)
def test_trains_scaled_down(tmp_path, recipe):
    sft, grpo = _scripts()
    rank = torch.distributed.get_rank()
    base = tmp_path / "base"
    if rank == 0:
        _small_model(yaml.safe_load((ROOT / recipe).read_text())["model_name_or_path"], base)
        rows = [
            {"messages": messages} if recipe in SFT else {"problem": messages[0]["content"], "answer": "7"}
            for messages in CONVERSATIONS
        ]
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.distributed.barrier()
    changes = {
        "model_name_or_path": str(base),
        "dataset_name": str(tmp_path / "data"),
        "dataset_config": None,
        "output_dir": str(tmp_path / "out"),
        "attn_implementation": "eager" if recipe in SFT else None,
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "save_strategy": "no",
    }
    if recipe in SFT:
        changes |= {"max_length": 64, "packing": False}
    else:
        changes |= {"max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 4}
    stage = 3 if "zero3.yaml" in (ROOT / recipe).read_text() else 2
    arguments = _parse(recipe, tmp_path / f"rank{rank}", zero_stage=stage, **changes)
    (sft if recipe in SFT else grpo).main(*arguments)
    if rank == 0:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert any(
            not torch.equal(new, old)
            for new, old in zip(
                saved.parameters(), AutoModelForCausalLM.from_pretrained(base).parameters(), strict=True
            )
        )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_files(name):
    """Stages and places as their names say."""
    config = ZeroConfig.from_any(str(ROOT / "recipes/accelerate_configs" / f"{name}.yaml"))
    stage, _, place = name.partition("_")
    assert config.zero_stage == {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zeropp": 3, "fsdp": 3}[stage]
    device = {"offload": "cpu", "nvme": "nvme"}.get(place, "none")
    assert config.offload_optimizer_device == device
    assert config.offload_param_device == (device if stage == "zero3" else "none")


def test_stage_3_unshards_a_layer_or_two_at_a_time():
    """As the README says: the launcher file does not keep what forward has gathered."""
    file = ROOT / "recipes/accelerate_configs/zero3.yaml"
    config = _config(
        "meta-llama/Llama-3.1-8B-Instruct",
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.architectures = ["LlamaForCausalLM"]
    model = build(config)
    layer = 2 * sum(param.numel() for param in model.model.layers[0].parameters())  # bytes in bf16
    config = resolve_auto(ZeroConfig.from_any(str(file)), hidden_size=64)
    # With so many tokens the peak is where activations are: between forward and backward.
    footprint = trace(model, Scenario(config=config, world_size=2, batch=BatchShape(rows=4, length=512)))
    assert layer <= footprint.peak["unsharded parameters"] < 3 * layer, footprint.peak


_TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def _run_script(recipe, folder, paths):
    sft, grpo = _scripts()
    inside = {key: f"{folder}/{value}" for key, value in paths.items()}
    arguments = _parse(
        recipe,
        Path(folder) / f"rank{torch.distributed.get_rank()}",
        max_steps=2,
        per_device_train_batch_size=8,
        zero_stage=3,
        **inside,
    )
    (grpo if "model_name_or_path: outputs/demo/sft_weak" in (ROOT / recipe).read_text() else sft).main(*arguments)


def test_grpo_demo_trains(tmp_path):
    """The demo from its data to a saved model, in two steps instead of a hundred."""
    _scripts()
    import prepare_demo
    import prepare_demo_grpo

    weak, demo = "recipes/demo/grpo/config_sft_weak.yaml", "recipes/demo/grpo/config_demo.yaml"
    settings = yaml.safe_load((ROOT / weak).read_text())
    settings["demo"] |= {"train_examples": 64, "test_examples": 8, "model": _TINY}
    for name, paths in (
        ("base", {"dataset_name": "data", "model_name_or_path": "base"}),
        ("weak", {"dataset_name": "data_weak"}),
    ):
        inside = {key: str(tmp_path / value) for key, value in paths.items()}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**settings, **inside}))
    prepare_demo.main(["--config", str(tmp_path / "base.yaml")])
    prepare_demo_grpo.main(["--config", str(tmp_path / "weak.yaml"), "--source", str(tmp_path / "data")])
    rows = (tmp_path / "data_weak/train.jsonl").read_text().splitlines()
    replies = [json.loads(row)["messages"][1]["content"] for row in rows]
    short = sum(reply.startswith("<think>\n</think>\n\nAnswer: ") for reply in replies)
    assert 0.4 < short / len(replies) < 0.8, f"{short} of {len(replies)} replies leave out the work"

    folder = str(tmp_path)
    paths = {"model_name_or_path": "base", "dataset_name": "data_weak", "output_dir": "sft_weak"}
    run_ranks(_run_script, weak, folder, paths)
    paths = {"model_name_or_path": "sft_weak", "dataset_name": "data", "output_dir": "grpo"}
    run_ranks(_run_script, demo, folder, paths)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "grpo").config.num_hidden_layers == 2
