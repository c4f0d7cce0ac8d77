"""Names of DeepSpeed that hf_zero.deepspeed does not have: errors that say what to use instead."""

import sys
from types import SimpleNamespace


_OPTIMIZER = 'an optimizer of torch (AdamW), or an "optimizer" section of the JSON'
INSTEAD = {
    "accelerator": "torch.accelerator, and engine.device",
    "get_accelerator": "torch.accelerator, and engine.device",
    "checkpointing": "torch.utils.checkpoint, or model.gradient_checkpointing_enable()",
    "comm": "torch.distributed",
    "init_inference": "model.generate() under `with hf_zero.gathered_parameters(model):`",
    "ops": _OPTIMIZER,
    "pipe": "stage 3; there is no pipeline parallelism",
    "runtime.lr_schedules": 'a scheduler of torch, or a "scheduler" section of the JSON',
    "utils.zero_to_fp32": "nothing: checkpoints are Hugging Face folders, read by from_pretrained",
    "utils": "param.grad and hf_zero.gathered_parameters(param), on all ranks",
    "zero.register_external_parameter": "nothing: a parameter may be read in any module",
    "zero.gather_distributed_parameters": "`with zero.GatheredParameters(list(model.parameters())):`",
}
DOCS = "docs/migrate_from_deepspeed.md lists what there is"


def explain(name: str) -> str:
    """What to say of a name (with `hf_zero.deepspeed.` in front) and what to use instead, where that is known."""
    words = name.split(".")[2:]
    above = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    found = next((f"Use {INSTEAD[key]} instead" for key in above if key in INSTEAD), "Leave it out")
    return f"{name} does not exist. {found} ({DOCS})"


def install(package: str) -> None:
    """Have imports of what `package` lacks raise ImportError; other modules are none of its business."""

    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith(f"{package}.") and not name.rpartition(".")[2].startswith("__"):
            raise ImportError(explain(name))

    sys.meta_path.append(SimpleNamespace(find_spec=find_spec))  # asked for what no other finder has
