"""Writes the checkpoints of other systems that `tests/test_convert*.py` import, with what those systems make of them.

It runs the systems themselves, so it needs an environment of its own (hf_zero plays no part), on Linux with g++:

    python -m venv golden && golden/bin/pip install "setuptools<81" ninja numpy "transformers==5.23.0" \
        "accelerate==1.15.0" "peft==0.21.2" "deepspeed==0.19.8" torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
    golden/bin/python tests/support/make_golden_checkpoints.py tests/golden [CASE ...]

Each case trains a tiny model for six steps on two CPU ranks with the stock Trainer, saves after the third, and resumes
from that checkpoint once more. `tests/golden/CASE/` then holds `checkpoint-3/`, cut to the files that matter, and

    expected.safetensors    the whole fp32 weights and optimizer states after step 3, as the system itself tells them
    expected.json           the losses of steps 4 to 6, going on and resumed, and how to train the same model
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


DEEPSPEED = "deepspeed"
RANKS = 2
SAVED, STEPS = 3, 6
TIMEOUT_S = 240  # the first run compiles an operator of DeepSpeed's
LLAMA = {
    "vocab_size": 29,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
# What the peer is asked for, the model, and the parameters (by prefix) that are frozen.
CASES = {
    "deepspeed_zero1": {"deepspeed": {"stage": 1}, "model": UNTIED},
    "deepspeed_zero1_bf16": {
        "deepspeed": {"stage": 1},
        "more": {
            "data_types": {"grad_accum_dtype": "fp32"},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
        },
        "arguments": {"warmup_steps": 5},
        "bf16": True,
        "model": UNTIED,
    },
    "deepspeed_zero2": {"deepspeed": {"stage": 2}, "model": TIED, "frozen": ["model.layers.0."]},
    "deepspeed_zero2_round_robin": {"deepspeed": {"stage": 2, "round_robin_gradients": True}, "model": UNTIED},
    "deepspeed_zero3": {
        "deepspeed": {"stage": 3, "sub_group_size": 400, "stage3_gather_16bit_weights_on_model_save": True},
        "model": UNTIED,
        "frozen": ["model.embed_tokens."],
    },
    "deepspeed_zero3_bf16": {"deepspeed": {"stage": 3}, "bf16": True, "model": TIED},
    "deepspeed_zero2_lora": {
        "deepspeed": {"stage": 2},
        "bf16": True,
        "model": UNTIED,
        "lora": ["q_proj", "down_proj"],
    },
    "deepspeed_zero3_lora": {"deepspeed": {"stage": 3}, "model": TIED, "lora": ["q_proj", "down_proj"]},
    "accelerate_zero2": {"deepspeed": {"stage": 2}, "loop": True},
    "accelerate_zero3": {"deepspeed": {"stage": 3}, "loop": True},
    "fsdp2": {"fsdp": {}, "model": TIED, "frozen": ["model.layers.0."]},
}
# What an import does not read, and the random states, which only one case needs.
DROPPED = ("zero_to_fp32.py", "zero_to_torch.py", "training_args.bin", "random_states_1.pkl", "README.md")
KEEPS_RANDOM_STATES = "deepspeed_zero2"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the cases go, each into a folder of its name")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run = loop if "loop" in CASES[options.rank_of] else train
        run(options.rank_of, options.folder, options.resume)
        sys.stdout.flush()
        os._exit(0)  # threads that DeepSpeed leaves behind abort an orderly exit now and then
    for case in options.cases or CASES:
        make(case, options.folder / case)


def make(case, target):
    """Run one case and put its files into `target`."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        start_ranks(case, scratch / "whole")
        saved = scratch / "whole" / f"checkpoint-{SAVED}"
        start_ranks(case, scratch / "again", "--resume", str(saved))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        dropped = DROPPED if case == KEEPS_RANDOM_STATES else (*DROPPED, "rng_state_*.pth")
        shutil.copytree(saved, target / saved.name, ignore=shutil.ignore_patterns(*dropped))
        shutil.copy(scratch / "whole" / "expected.safetensors", target)
        told = {
            **json.loads((scratch / "whole" / "told.json").read_text()),
            "continued": losses(scratch / "whole"),
            "resumed": losses(scratch / "again"),
            "case": CASES[case],
            "model": {**LLAMA, **CASES[case].get("model", {})},
            "arguments": {**ARGUMENTS, **CASES[case].get("arguments", {})},
        }
        (target / "expected.json").write_text(json.dumps(told, indent=1) + "\n")
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{case}: {size / 1e3:.0f} kB, losses {told['continued']} / {told['resumed']}")


def losses(run):
    """The losses after the checkpoint, by step."""
    if (run / "losses.json").exists():
        return json.loads((run / "losses.json").read_text())
    history = json.loads((run / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry and entry["step"] > SAVED}


def start_ranks(case, folder, *more):
    """Train `case` on all ranks, with a time limit for the whole."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "LOCAL_SIZE": RANKS,  # DeepSpeed's CPU backend asks for it
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": 1,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for ninja
    }
    command = [sys.executable, __file__, str(folder), "--rank-of", case, *more]
    ranks = []
    for rank in range(RANKS):
        own = {"RANK": rank, "LOCAL_RANK": rank, **shared}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
    try:
        for rank in ranks:
            if rank.wait(TIMEOUT_S):
                raise SystemExit(f"{case}: a rank ended with status {rank.returncode}")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        for left in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{port}_*"):  # 69 MB of memory for each rank
            left.unlink()


# ------------------------------------------------------------------------------------------- what runs on every rank

ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "save_steps": SAVED,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-4,  # with the usual 1e-8, rounding noise in gradients that are zero becomes whole steps
    "lr_scheduler_type": "cosine",
    "optim": "adamw_torch",
}


def make_model(case):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, **CASES[case]["model"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(CASES[case].get("frozen", ["-"]))))
    if "lora" not in CASES[case]:
        return model
    from peft import LoraConfig, get_peft_model

    # The second half of an adapter is zero at first: one that is not shows more.
    return get_peft_model(model, LoraConfig(r=3, target_modules=CASES[case]["lora"], init_lora_weights=False))


def make_data():
    """Sequences that count upwards, so that there is something to learn."""
    vocabulary = LLAMA["vocab_size"]
    rows = [[(3 * row + step * (1 + row % 3)) % vocabulary for step in range(10)] for row in range(48)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(case, folder, resume):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    settings = CASES[case]
    more = {}
    if "fsdp" in settings:
        more["fsdp"] = "full_shard"
        more["fsdp_config"] = {
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        }
    if "deepspeed" in settings:
        more["deepspeed"] = {
            "zero_optimization": settings["deepspeed"],
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            **settings.get("more", {}),
        }
    arguments = TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=settings.get("bf16", False),
        **ARGUMENTS,
        **settings.get("arguments", {}),
        **more,
    )
    if "fsdp" in settings:
        pretend_accelerator(arguments)

    class Tell(TrainerCallback):
        def on_save(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step == SAVED and resume is None:
                if "fsdp" in settings:
                    tell_fsdp(model, optimizer.optimizer, folder)
                else:
                    tell_deepspeed(model, optimizer.optimizer, folder)

    Trainer(model=make_model(case), args=arguments, train_dataset=make_data(), callbacks=[Tell()]).train(
        resume_from_checkpoint=resume
    )


def make_plain():
    """A model that is none of transformers', with its two ends tied, and what trains it: two groups, a schedule."""
    import torch
    from torch import nn

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            # Odd sizes, so that there is padding.
            self.table, self.body, self.head = nn.Embedding(13, 5), nn.Linear(5, 5), nn.Linear(5, 13, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0, 1.0, 1.0]))

        def forward(self, ids):
            hidden = torch.tanh(self.body(self.table(ids)))
            return self.head(hidden * self.scale.to(hidden.dtype))

    torch.manual_seed(0)
    model = Plain()
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 8)


def plain_loss(model, step, ranks):
    """The loss of one step on the data of these ranks."""
    import torch

    ids = torch.cat([(torch.arange(24) * (rank + 2) + step).view(4, 6) % 13 for rank in ranks])
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def loop(case, folder, resume):
    """A plain Accelerate loop; the losses are the means over the ranks."""
    import torch.distributed as dist
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    settings = {"zero_optimization": CASES[case]["deepspeed"], "train_micro_batch_size_per_gpu": 4}
    plugin = DeepSpeedPlugin(hf_ds_config={**settings, "zero_allow_untested_optimizer": True})
    PartialState(cpu=True)  # joins the ranks; an Accelerator(cpu=True) would leave DeepSpeed out
    accelerator = Accelerator(deepspeed_plugin=plugin)
    assert accelerator.num_processes == RANKS, "the ranks would train alone"
    model, optimizer, schedule = accelerator.prepare(*make_plain())
    found = {}
    if resume:
        accelerator.load_state(resume)
    for step in range(SAVED + 1 if resume else 1, STEPS + 1):
        loss = plain_loss(model, step, [accelerator.process_index])
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found[step] = accelerator.reduce(loss.detach(), "mean").item()
        if step == SAVED:
            accelerator.save_state(str(folder / f"checkpoint-{SAVED}"))
            tell_deepspeed(accelerator.unwrap_model(model), optimizer.optimizer, folder)
    if accelerator.is_main_process:
        folder.mkdir(exist_ok=True)
        (folder / "losses.json").write_text(json.dumps({step: loss for step, loss in found.items() if step > SAVED}))
    dist.barrier()


def pretend_accelerator(arguments):
    """accelerate turns FSDP on for accelerators only; FSDP itself works on CPU ranks as well."""
    from accelerate.state import DistributedType, PartialState

    assert arguments.device.type == "cpu"  # reading it makes the state
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def tell_fsdp(model, optimizer, folder):
    """The whole weights and states, as torch gathers them."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    tensors = {f"{name}.weight": weight.clone() for name, weight in weights.items()}
    for name, kinds in states.get("state", {}).items():
        tensors |= {f"{name}.{kind}": kinds[kind].clone() for kind in ("exp_avg", "exp_avg_sq") if kind in kinds}
    if dist.get_rank() == 0:
        write_told(tensors, folder, {})
    dist.barrier()


def tell_deepspeed(model, optimizer, folder):
    """What DeepSpeed says that its whole weights and states are, from the running engine and its own script."""
    import torch.distributed as dist

    deepspeed = importlib.import_module(DEEPSPEED)
    script = importlib.import_module(f"{DEEPSPEED}.utils.zero_to_fp32")
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed connects parameters to their states after the step of the first group, before the others have any.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    tensors, running = {}, {}
    for name, parameter in model.named_parameters():
        # In round-robin order the engine looks its states up at the wrong places; its script is right.
        if parameter.requires_grad and not getattr(optimizer, "round_robin_gradients", False):
            running[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}.{kind}"] = deepspeed.utils.safe_get_full_optimizer_state(parameter, kind).clone()
    if dist.get_rank() == 0:
        try:
            whole = script.get_fp32_state_dict_from_zero_checkpoint(str(folder / f"checkpoint-{SAVED}"))
        except ValueError:  # it does not know the optimizer that sums bf16 gradients in fp32
            whole = running
        for name, weight in whole.items():
            assert running.get(name, weight).equal(weight), f"{name}: the script and the engine disagree"
            tensors[f"{name}.weight"] = weight.float().contiguous().clone()
        write_told(tensors, folder, {"deepspeed": deepspeed.__version__})
    dist.barrier()


def write_told(tensors, folder, versions):
    import accelerate
    import torch
    import transformers
    from safetensors.torch import save_file

    libraries = {library.__name__: library.__version__ for library in (torch, transformers, accelerate)}
    save_file(tensors, folder / "expected.safetensors")
    (folder / "told.json").write_text(json.dumps({"versions": {**libraries, **versions}}))


if __name__ == "__main__":
    main()
