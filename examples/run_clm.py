"""Fine-tunes, or trains from scratch, a causal language model on a text file with the stock `Trainer`.

    accelerate launch --config_file zero3.yaml examples/run_clm.py --model_name_or_path MODEL --train_file text.jsonl \
        --output_dir outputs
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str = field(metadata={"help": "A JSON lines file with a column `text`."})
    from_scratch: bool = field(default=False, metadata={"help": "Take the configuration of the model only."})
    streaming: bool = False
    block_size: int = 32
    trials: int = field(default=0, metadata={"help": "Search the learning rate with optuna, in so many trials."})


def main():
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    script_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)

    def make_model(trial=None):
        if script_args.from_scratch:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script_args.model_name_or_path))
        else:
            model = AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))
        return model

    def group(examples):
        ids = [token for text in tokenizer(examples["text"])["input_ids"] for token in text]
        size = script_args.block_size
        blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    rows = load_dataset("json", data_files=script_args.train_file, split="train", streaming=script_args.streaming)
    rows = rows.map(group, batched=True, remove_columns=["text"])
    trainer = Trainer(
        model=None if script_args.trials else make_model(),
        model_init=make_model if script_args.trials else None,
        args=training_args,
        train_dataset=rows,
        eval_dataset=rows.take(4) if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if script_args.trials:
        best = trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-3)},
            n_trials=script_args.trials,
            backend="optuna",
        )
        if trainer.is_world_process_zero():
            print(best)
        return
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
