"""Fine-tunes an image classifier with the stock `Trainer`.

    accelerate launch --config_file zero2.yaml examples/run_image_classification.py --model_name_or_path MODEL \
        --train_dir images --output_dir outputs --remove_unused_columns false
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForImageClassification, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_dir: str = field(metadata={"help": "A folder with one folder of images for each class."})


def main():
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    rows = load_dataset("imagefolder", data_dir=script_args.train_dir, split="train")
    model = AutoModelForImageClassification.from_pretrained(
        script_args.model_name_or_path,
        num_labels=rows.features["label"].num_classes,
        ignore_mismatched_sizes=True,
    )
    size = model.config.image_size

    def to_pixels(rows):
        images = [np.asarray(image.convert("RGB").resize((size, size)), dtype=np.float32) for image in rows["image"]]
        return {
            "pixel_values": [torch.from_numpy(image / 127.5 - 1).permute(2, 0, 1) for image in images],
            "labels": rows["label"],
        }

    trainer = Trainer(model=model, args=training_args, train_dataset=rows.with_transform(to_pixels))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
