"""Models that `from_pretrained` quantises train adapters under ZeRO as under DDP, or are refused with the fix."""

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import hf_zero
from hf_zero.core.wrappers import is_wrapper
from hf_zero.errors import ZeroConfigError
from tests.support import packed, zoo
from tests.support.harness import distributed
from tests.support.trainers import compare_logs, compare_weights, make_trainer, without_times


@register_quantization_config("stand_in")
class StandInConfig(QuantizationConfigMixin):
    """What is asked for by `quantization_config`; the layers are those of `packed`."""

    def __init__(self, kind="tensors", **kwargs):
        self.quant_method, self.kind = "stand_in", kind


@register_quantizer("stand_in")
class StandInQuantizer(HfQuantizer):
    is_trainable = True

    def is_serializable(self):
        return False

    def _process_model_after_weight_loading(self, model, **kwargs):
        return packed.quantise(model, self.quantization_config.kind)


def _bitsandbytes(**kwargs):
    return transformers.BitsAndBytesConfig(**kwargs)


def _torchao(kind):
    import torchao.quantization

    return transformers.TorchAoConfig(getattr(torchao.quantization, kind)())


CONFIGS = {
    "4bit": (None, StandInConfig, {"kind": "4bit"}),
    "tensors": (None, StandInConfig, {"kind": "tensors"}),
    "bitsandbytes_4bit": (
        "bitsandbytes",
        _bitsandbytes,
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "bitsandbytes_8bit": ("bitsandbytes", _bitsandbytes, {"load_in_8bit": True}),
    "torchao": ("torchao", _torchao, {"kind": "Int8WeightOnlyConfig"}),
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(packed.lacks(package), reason=f"{package} is not installed"))
    for kind, (package, _, _) in CONFIGS.items()
]


def pretrained(folder):
    """A folder of a small model, made by one rank for all."""
    if dist.get_rank() == 0:
        zoo.build("llama").save_pretrained(folder)
    dist.barrier()
    return folder


def load(folder, kind):
    _, make, options = CONFIGS[kind]
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, quantization_config=make(**options), dtype=torch.float32, device_map="cpu")


def with_adapters(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


def trained(folder, source, kind, stage, resume=None):
    """The log, and the adapters of the last of two checkpoints."""
    model = with_adapters(load(source, kind))
    # DDP cannot send torchao's tensors, which are the same on all ranks.
    model._ddp_params_and_buffers_to_ignore = [name for name, param in model.named_parameters() if is_wrapper(param)]
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer("llama", stage, folder, model=model, max_steps=4, **saving)
    trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.wait_for_everyone()
    log = [{k: v for k, v in entry.items() if k != "total_flos"} for entry in without_times(trainer.state.log_history)]
    return log, load_file(folder / "checkpoint-4/adapter_model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_a_quantised_base_trains_adapters_as_under_ddp_and_resumes(kind, tmp_path):
    source = pretrained(tmp_path / "base")
    log, weights = trained(tmp_path / "stock", source, kind, None)
    for stage in (2, 3):
        folder = tmp_path / str(stage)
        ours, adapters = trained(folder, source, kind, stage)
        compare_logs(ours, log, f"{kind}, stage {stage}")
        compare_weights(adapters, weights, f"{kind}, stage {stage}")
        again, adapters = trained(tmp_path / f"{stage}-again", source, kind, stage, str(folder / "checkpoint-2"))
        compare_logs(again, log, f"{kind}, stage {stage}, resumed")
        compare_weights(adapters, weights, f"{kind}, stage {stage}, resumed")


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_zero_init_says_how_a_quantised_model_is_loaded(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = pretrained(tmp_path / "base")
    words = r"quantized weights cannot be read in slices: load them without zero_init \(`zero3_init_flag: false`\)"
    with pytest.raises(ZeroConfigError, match=words), hf_zero.zero_init({"zero_stage": 3}):
        load(source, kind)
    assert load(source, kind).get_parameter("model.norm.weight").abs().sum() > 0, "nothing of it stays"
