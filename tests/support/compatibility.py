"""Runs the scripts of other people, unmodified, under DDP and under ZeRO, on tiny models and data made here."""

import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from hf_zero import run
from hf_zero.config import ZeroConfig
from hf_zero.core.engine import ZeroEngine
from tests.support.harness import run_ranks


ROOT = Path(__file__).parents[2]
RANKS = 2
WORDS = 96
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"


# Stands for the package of this name, which downloads its metrics.
EVALUATE = """
class Accuracy:
    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        lists = (values if isinstance(values, list) else values.tolist() for values in (predictions, references))
        self.pairs += zip(*lists)

    def compute(self, predictions=None, references=None):
        if predictions is not None:
            self.add_batch(predictions, references)
        pairs, self.pairs = self.pairs, []
        share = sum(one == other for one, other in pairs) / len(pairs)
        return {"accuracy": share, "f1": share, "score": share}


def load(*names, **options):
    return Accuracy()
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script with its arguments, where `{out}` is a folder for this run and other names are files of `prepare`."""

    name: str
    script: str  # a module of an installed package, or a file of this repository
    arguments: str = ""
    config: dict = field(default_factory=dict)  # of hf_zero, beside the stage
    refused: str = ""  # words of the error, where hf_zero refuses it
    ends: tuple[str, str] = ("", "")  # words of the script's own error under hf_zero, and why it comes
    needs: tuple[str, ...] = ()  # packages that are not among hf_zero's own
    is_exact: bool = True  # whether it trains in fp32, so that losses are those of DDP
    checks_itself: bool = False  # on random data, so that there is nothing to compare
    fails_stock: str = ""  # words of its error under DDP
    origin: str = ""  # where it comes from, if that is not the package that its name begins with
    lacks_memory: bool = False  # for its first batch

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass
class Outcome:
    """Of a rank, or of all: the losses that went backward, the norms of gradients, the engines' stages."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    error: str = ""  # what ended the run


def run_case(case: Case, stage: int | None, folder: Path) -> Outcome:
    """Run a case in `folder`, which `prepare` has filled; without a stage under DDP, and hf_zero is not asked."""
    try:
        ranks = run_ranks(run_script, case, stage, str(folder), world_size=RANKS)
    except pytest.fail.Exception as failure:
        return Outcome(error=str(failure))
    every = [sum((getattr(rank, name) for rank in ranks), []) for name in ("losses", "norms", "stages")]
    return Outcome(*every)


def difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference (absolute below 1); infinite where one run has more values."""
    if len(ours) != len(theirs):
        return float("inf")
    return max((abs(one - two) / max(1.0, abs(two)) for one, two in zip(ours, theirs, strict=True)), default=0.0)


def run_script(case: Case, stage: int | None, folder: str) -> Outcome:
    """In a rank: run the script as its launcher would, and note what an `Outcome` holds."""
    os.chdir(folder)
    sys.path.insert(1, folder)  # its `evaluate` before one that is installed
    out = Path(folder, "out", f"{case.name} {stage}".replace(" ", "_").replace("/", "_"))
    out.mkdir(parents=True, exist_ok=True)
    words = [word.format(out=out) for word in case.arguments.split()]
    script = ["-m", case.script] if "/" not in case.script else [str(ROOT / case.script)]
    os.environ.update(HF_HUB_OFFLINE="1", CI="1", OMP_NUM_THREADS="1")
    if stage is not None:
        os.environ["HF_ZERO_CONFIG"] = ZeroConfig.from_any({"zero_stage": stage, **case.config}).to_json()
    outcome = Outcome()
    with _noted(outcome, case.lacks_memory), open(out / f"rank{os.environ['RANK']}.log", "w") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            _start([*script, *words], adopted=stage is not None)
    return outcome


def _start(words: list[str], adopted: bool) -> None:
    sys.argv = ["run.py", *words]
    if adopted:
        run.main()
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])  # as Python does for a script
        runpy.run_path(words[0], run_name="__main__")


# A script that leaves its last process group to DDP's reducer may wait for ever as that is freed: the group joins its
# threads with the GIL in hand, and one of them may want it to free a tensor (torch 2.13, gloo). So they live on.
_REDUCERS: list = []


@contextlib.contextmanager
def _noted(outcome: Outcome, lacks_memory: bool):
    backward, make, get_norm = torch.Tensor.backward, ZeroEngine.__init__, Trainer._get_grad_norm
    wrap = DistributedDataParallel.__init__

    def note_loss(self, *args, **kwargs):
        nonlocal lacks_memory
        if lacks_memory:
            lacks_memory = False
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate too much")
        outcome.losses.append(float(self.detach().float().mean()))
        return backward(self, *args, **kwargs)

    def note_engine(self, model, config, *args, **kwargs):
        outcome.stages.append(config.zero_stage)
        make(self, model, config, *args, **kwargs)

    def note_norm(self, *args, **kwargs):
        norm = get_norm(self, *args, **kwargs)
        outcome.norms.append(float(norm))
        return norm

    def keep_reducer(self, *args, **kwargs):
        wrap(self, *args, **kwargs)
        _REDUCERS.append(self.reducer)

    torch.Tensor.backward, ZeroEngine.__init__, Trainer._get_grad_norm = note_loss, note_engine, note_norm
    DistributedDataParallel.__init__ = keep_reducer
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = wrap
        torch.Tensor.backward, ZeroEngine.__init__, Trainer._get_grad_norm = backward, make, get_norm


# -- models and data --------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Write the models `llama`, `bert`, `t5`, `vit`, and data for every kind of script."""
    tokenizer = _tokenizer()
    for name, model in _models().items():
        model.save_pretrained(folder / name)
        if name != "vit":
            tokenizer.save_pretrained(folder / name)
    texts = [" ".join(f"w{(7 * row + 3 * place) % 80}" for place in range(10 + row % 5)) for row in range(32)]
    halves = [text.split(" ", 5) for text in texts]
    pairs = [(" ".join(half[:5]), half[5]) for half in halves]
    tables = {
        "texts": [{"text": text} for text in texts],
        "pairs": [{"sentence1": one, "sentence2": two, "label": n % 2} for n, (one, two) in enumerate(pairs)],
        "translations": [{"translation": {"en": one, "de": two}} for one, two in pairs],
        "preferences": [{"prompt": one, "chosen": two, "rejected": two[::-1]} for one, two in pairs],
        "answers": [{"prompt": one, "completion": two, "label": n % 3 > 0} for n, (one, two) in enumerate(pairs)],
        "prompts": [{"prompt": one} for one, _ in pairs],
    }
    (folder / "files").mkdir()
    for name, rows in tables.items():
        (folder / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        for file in (folder / name / "train.jsonl", folder / "files" / f"{name}.json"):
            file.write_text(lines)
    (folder / "split").mkdir()
    for split in ("train", "test"):
        shutil.copy(folder / "texts/train.jsonl", folder / "split" / f"{split}.jsonl")
    (folder / "local_rewards.py").write_text(
        "def share_of_even_words(completions, **kwargs):\n"
        "    return [sum(w[-1] in '02468' for w in text.split()) / (len(text.split()) or 1) for text in completions]\n"
    )
    _write_images(folder / "images")
    _write_hub_names(folder, tables["pairs"])


def _write_hub_names(folder: Path, rows: list[dict]) -> None:
    """What accelerate's scripts name on the hub, under the same names in the folder where they run."""
    shutil.copytree(folder / "bert", folder / "bert-base-cased")
    glue = folder / "nyu-mll/glue"
    glue.mkdir(parents=True)
    splits = {"train": rows, "validation": rows[:16]}
    for name, part in splits.items():
        (glue / f"{name}.jsonl").write_text(
            "".join(json.dumps({**row, "idx": n}) + "\n" for n, row in enumerate(part))
        )
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits)
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    (folder / "evaluate.py").write_text(EVALUATE)


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system"]
    words = special + [f"w{number}" for number in range(WORDS - len(special))]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template, made.model_max_length = TEMPLATE, 64
    return made


def _models() -> dict:
    import transformers as tf

    torch.manual_seed(0)
    names = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    llama = tf.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=128, **sizes, **names)
    bert = tf.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes, **quiet, pad_token_id=0)
    t5 = tf.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    vit = tf.ViTConfig(image_size=16, patch_size=8, **sizes, **quiet)
    return {
        "llama": tf.LlamaForCausalLM(llama),
        "bert": tf.BertForMaskedLM(bert),
        "t5": tf.T5ForConditionalGeneration(t5),
        "vit": tf.ViTForImageClassification(vit),
    }


def _write_images(folder: Path) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for kind in ("dark", "light"):
        (folder / kind).mkdir(parents=True)
        for number in range(8):
            low = 0 if kind == "dark" else 128
            pixels = torch.randint(low, low + 128, (16, 16, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / kind / f"{number}.png")


# -- the cases --------------------------------------------------------------------------------------------------------

_TRAINING = "--output_dir {out} --max_steps 4 --per_device_train_batch_size 2 --learning_rate 1e-3 --logging_steps 1 "
_TRAINING += "--report_to none --save_strategy steps --save_steps 4 --disable_tqdm true "
_CLM = "--model_name_or_path llama --train_file texts/train.jsonl " + _TRAINING
_TRL = "--model_name_or_path llama --dtype float32 --bf16 false " + _TRAINING
_SAMPLING = "--reward_funcs local_rewards.share_of_even_words --num_generations 2 --max_completion_length 8 "
_LORA = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj "


def _clm(name: str, arguments: str = "", **options) -> Case:
    return Case(name=name, script="examples/run_clm.py", arguments=_CLM + arguments, **options)


def _trl(name: str, script: str, arguments: str, **options) -> Case:
    return Case(name=name, script=f"trl.scripts.{script}", arguments=_TRL + arguments, needs=("trl",), **options)


def _accelerate(name: str, folder: str = "", **options) -> Case:
    return Case(
        name=name, script=f"accelerate.test_utils.scripts.{folder}{name}", **{"checks_itself": not folder, **options}
    )


CASES = (
    _clm("run_clm", "--eval_strategy steps --eval_steps 2"),
    _clm("run_clm, from scratch in 2 micro-batches", "--from_scratch --gradient_accumulation_steps 2"),
    Case(
        name="run_glue",
        script="examples/run_glue.py",
        arguments="--model_name_or_path bert --train_file pairs/train.jsonl --eval_strategy epoch " + _TRAINING,
    ),
    Case(
        name="run_translation, generating",
        script="examples/run_translation.py",
        arguments="--model_name_or_path t5 --train_file translations/train.jsonl --source_lang en --target_lang de "
        "--predict_with_generate --eval_strategy epoch --generation_max_length 12 " + _TRAINING,
    ),
    Case(
        name="run_image_classification",
        script="examples/run_image_classification.py",
        arguments="--model_name_or_path vit --train_dir images --remove_unused_columns false " + _TRAINING,
    ),
    Case(
        name="run_clm_no_trainer",
        script="examples/run_clm_no_trainer.py",
        arguments="--model_name_or_path llama --train_file texts/train.jsonl --output_dir {out} "
        "--gradient_accumulation_steps 2",
    ),
    Case(
        name="run_lora",
        script="examples/run_lora.py",
        arguments="--model_name_or_path llama --train_file texts/train.jsonl --output_dir {out}",
        needs=("peft",),
    ),
    _trl("sft", "sft", "--dataset_name texts"),
    _trl("sft, packing", "sft", "--dataset_name texts --packing --max_length 32"),
    _trl("sft, LoRA", "sft", "--dataset_name texts " + _LORA),
    _trl("dpo", "dpo", "--dataset_name preferences"),
    _trl("kto", "kto", "--dataset_name answers"),
    _trl("reward", "reward", "--dataset_name preferences"),
    _trl("grpo", "grpo", "--dataset_name prompts " + _SAMPLING),
    _trl("rloo", "rloo", "--dataset_name prompts " + _SAMPLING),
    _accelerate(
        "test_script",
        ends=("Did not obtain the same model", "passes in fp32; in bf16 it wants weights in fp32 back"),
    ),
    _accelerate("test_sync", config={"no_sync": "local"}),
    _accelerate("test_distributed_data_loop", refused="join_uneven_inputs is not supported"),
    _accelerate("test_ops"),
    _accelerate("test_checkpointing", "external_deps.", arguments="--output_dir {out} --num_epochs 2"),
    _accelerate("test_performance", "external_deps.", arguments="--output_dir {out} --num_epochs 1"),
    _accelerate("test_metrics", "external_deps.", checks_itself=True),
    _clm("run_clm, auto_find_batch_size", "--auto_find_batch_size true", lacks_memory=True),
    _clm("run_clm, neftune_noise_alpha", "--neftune_noise_alpha 5"),
    _clm(
        "run_clm, load_best_model_at_end",
        "--eval_strategy steps --eval_steps 2 --save_steps 2 --load_best_model_at_end --save_total_limit 1",
    ),
    _clm("run_clm, save_only_model", "--save_only_model"),
    _clm("run_clm, gradient_checkpointing", "--gradient_checkpointing"),
    _clm("run_clm, streaming", "--streaming"),
    _clm("run_clm, streaming, dispatched", '--streaming --accelerator_config {{"dispatch_batches":true}}'),
    _clm("run_clm, report_to tensorboard", "--report_to tensorboard", needs=("tensorboard",)),
    _clm("run_clm, hyperparameter_search", "--trials 2 --eval_strategy steps --eval_steps 4", needs=("optuna",)),
    _clm("run_clm, bf16", "--bf16 --use_cpu", is_exact=False),
)
