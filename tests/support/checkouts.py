"""The cases whose scripts no package ships: the examples of checkouts of the libraries."""

from pathlib import Path

from tests.support.compatibility import Case


_TRAINING = "--do_train --do_eval --output_dir {out} --max_steps 4 --per_device_train_batch_size 2 "
_TRAINING += "--learning_rate 1e-3 --logging_steps 1 --report_to none --save_steps 4 --disable_tqdm true "
_LOOP = "--output_dir {out} --max_train_steps 4 --per_device_train_batch_size 2 --learning_rate 1e-3 --seed 1 "
_TRANSLATION = "--source_lang en --target_lang de --max_source_length 16 --max_target_length 16 "
_TRANSLATION += "--val_max_target_length 8 --num_beams 2 "


def accelerate_cases(folder: Path) -> list[Case]:
    """The examples of an accelerate checkout, whose `examples` folder is given."""
    clm = "--dataset_name texts --model_name_or_path llama --output_dir {out} "
    given = {
        "nlp_example.py": "",
        "complete_nlp_example.py": "--checkpointing_steps epoch --output_dir {out}",
        "by_feature/automatic_gradient_accumulation.py": "",
        "by_feature/checkpointing.py": "--checkpointing_steps epoch --output_dir {out}",
        "by_feature/early_stopping.py": "",
        "by_feature/gradient_accumulation.py": "--gradient_accumulation_steps 2",
        "by_feature/memory.py": "",
        "by_feature/multi_process_metrics.py": "",
        "by_feature/profiler.py": "",
        "by_feature/tracking.py": "--with_tracking --project_dir {out}",
    }
    special = {
        "by_feature/cross_validation.py": {"arguments": "--num_folds 2", "needs": ("sklearn",)},
        "by_feature/local_sgd.py": {"refused": "without LocalSGD"},
        "by_feature/deepspeed_with_config_support.py": {
            "arguments": "--block_size 32 --num_train_epochs 1 " + clm,
            "fails_stock": "cannot import name 'DummyOptim'",
        },
    }
    options = {**{name: {"arguments": arguments} for name, arguments in given.items()}, **special}
    return _cases(folder, "accelerate, examples", options)


def transformers_cases(folder: Path) -> list[Case]:
    """The examples of a transformers checkout, whose `examples/pytorch` folder is given."""
    given = {
        "language-modeling/run_clm.py": f"{_data('llama', 'texts')} --block_size 16 " + _TRAINING,
        "text-classification/run_glue.py": f"{_data('bert', 'pairs')} --max_seq_length 32 " + _TRAINING,
        "translation/run_translation.py": (
            f"{_data('t5', 'translations')} --predict_with_generate " + _TRANSLATION + _TRAINING
        ),
        "language-modeling/run_clm_no_trainer.py": (
            f"{_data('llama', 'texts')} --block_size 16 --gradient_accumulation_steps 2 " + _LOOP
        ),
        "text-classification/run_glue_no_trainer.py": f"{_data('bert', 'pairs')} --checkpointing_steps epoch " + _LOOP,
        "translation/run_translation_no_trainer.py": f"{_data('t5', 'translations')} " + _TRANSLATION + _LOOP,
    }
    options = {name: {"arguments": arguments} for name, arguments in given.items()}
    options["language-modeling/run_clm_no_trainer.py"] |= {
        "fails_stock": "AttributeError: TPU",
        "ends": ("AttributeError: TPU", "fails, as under DDP: accelerate has no DistributedType.TPU any more"),
    }
    images = "--model_name_or_path vit --train_dir images --validation_dir images --remove_unused_columns false "
    options["image-classification/run_image_classification.py"] = {
        "arguments": images + _TRAINING,
        "needs": ("torchvision",),
    }
    return _cases(folder, "transformers, examples", options)


def peft_cases(folder: Path) -> list[Case]:
    """The examples of a PEFT checkout, whose `examples` folder is given."""
    lora = "--use_peft_lora true --lora_r 4 --lora_target_modules q_proj,v_proj "
    words = "--model_name_or_path llama --dataset_name split --bf16 false " + lora + _TRAINING
    return _cases(folder, "peft, examples", {"sft/train.py": {"arguments": words, "needs": ("peft", "trl")}})


def trl_cases(folder: Path) -> list[Case]:
    """Examples of a TRL checkout, whose `examples/scripts` folder is given: trainers that `trl.scripts` has not."""
    words = "--model_name_or_path llama --dtype float32 --bf16 false --dataset_name preferences --max_length 32 "
    options = {"arguments": words + _TRAINING.replace("--do_train --do_eval ", ""), "needs": ("trl",)}
    return _cases(folder, "trl, examples", {"cpo.py": options, "orpo.py": options})


def _data(model: str, table: str) -> str:
    file = f"files/{table}.json"
    return f"--model_name_or_path {model} --train_file {file} --validation_file {file}"


def _cases(folder: Path, origin: str, options: dict[str, dict]) -> list[Case]:
    return [
        Case(name=name, script=str(folder.resolve() / name), origin=origin, **each) for name, each in options.items()
    ]


# By library: where its checkout has them.
CASES_OF = {
    "accelerate": ("examples", accelerate_cases),
    "transformers": ("examples/pytorch", transformers_cases),
    "peft": ("examples", peft_cases),
    "trl": ("examples/scripts", trl_cases),
}
