"""Ray Train: python examples/cluster/ray_train.py --workers 2 (from a machine of the Ray cluster)

Ray starts the workers and joins them; each trains with ZeroTrainer. A worker that is killed ends them all, Ray starts
as many again, and they go on from the newest complete checkpoint. So does a later run with another number of workers.
"""

import argparse
import os

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from hf_zero import ZeroTrainer, ZeroTrainingArguments


class Tell(TrainerCallback):
    """Gives Ray the newest logs at each checkpoint: a report waits until Ray asks for it, which it does every 2 s."""

    def on_save(self, args, state, control, **_):
        ray.train.report({"step": state.global_step, **state.log_history[-1]})


def train(options):
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).repeat(64, 1)]
    args = ZeroTrainingArguments(
        options["output"],
        zero_stage=3,
        per_device_train_batch_size=8 // ray.train.get_context().get_world_size(),  # the same rows in each step
        max_steps=options["steps"],
        save_steps=options["save_steps"],
        logging_steps=1,
        report_to="none",
    )
    trainer = ZeroTrainer(model, args, train_dataset=rows, callbacks=[Tell()])
    saved = any(name.startswith("checkpoint-") for name in os.listdir(options["output"]))
    print("goes on from the newest complete checkpoint" if saved else "begins", flush=True)
    trainer.train(resume_from_checkpoint=saved)
    trainer.save_model()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--output", default="outputs/ray", help="a folder that all workers see")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=5)
    options = parser.parse_args()
    options.output = os.path.abspath(options.output)
    os.makedirs(options.output, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="hf_zero", storage_path=options.output + "_ray", failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
