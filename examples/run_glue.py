"""Fine-tunes a classifier of sentence pairs with the stock `Trainer`, and reports its accuracy.

    accelerate launch --config_file zero2.yaml examples/run_glue.py --model_name_or_path MODEL \
        --train_file pairs.jsonl --output_dir outputs --eval_strategy epoch
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str = field(metadata={"help": "A JSON lines file with columns `sentence1`, `sentence2` and `label`."})
    max_seq_length: int = 64


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(script_args.model_name_or_path, num_labels=2)

    def tokenize(rows):
        return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=script_args.max_seq_length)

    with training_args.main_process_first():
        rows = load_dataset("json", data_files=script_args.train_file, split="train").map(tokenize, batched=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=accuracy,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
