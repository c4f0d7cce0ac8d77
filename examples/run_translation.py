"""Fine-tunes a translation model with the stock `Seq2SeqTrainer`, and translates with it after each epoch.

    accelerate launch --config_file zero3.yaml examples/run_translation.py --model_name_or_path MODEL \
        --train_file translations.jsonl --source_lang en --target_lang de --output_dir outputs --predict_with_generate
"""

from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str = field(metadata={"help": "JSON lines of {'translation': {language: text, ...}}."})
    source_lang: str
    target_lang: str
    max_length: int = 32


def main():
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments))
    script_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(script_args.model_name_or_path)

    def tokenize(rows):
        sources = [pair[script_args.source_lang] for pair in rows["translation"]]
        targets = [pair[script_args.target_lang] for pair in rows["translation"]]
        return tokenizer(sources, text_target=targets, truncation=True, max_length=script_args.max_length)

    def exact_match(prediction):
        pad = tokenizer.pad_token_id
        made, wanted = (np.where(ids == -100, pad, ids) for ids in (prediction.predictions, prediction.label_ids))
        made, wanted = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (made, wanted))
        return {"exact_match": float(np.mean([one == other for one, other in zip(made, wanted, strict=True)]))}

    rows = load_dataset("json", data_files=script_args.train_file, split="train")
    rows = rows.map(tokenize, batched=True, remove_columns=["translation"])
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=exact_match if training_args.predict_with_generate else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    trainer.train()
    trainer.save_metrics("predict", trainer.predict(rows).metrics)
    trainer.save_model()


if __name__ == "__main__":
    main()
