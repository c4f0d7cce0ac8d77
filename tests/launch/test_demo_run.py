"""The demo's programs: what the check counts, what bad input is answered with, and one small run from end to end."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.arithmetic.test_demo_data import ROOT, load_script, prepare
from tests.support.demo_recipe import write_small_recipe
from tests.support.harness import LIMIT


evaluate = load_script("evaluate_arithmetic")
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\n5+7=12\n</think>\n\nAnswer: 632", 632),
        ("Answer: 1 no, Answer: 2", 2),
        ("Answer:-7.", -7),
        ("<think>\n5+7=12", None),
        ("answer 12", None),
    ],
)
def test_the_last_answer_counts(text, answer):
    assert evaluate.extract_answer(text) == answer


def test_exact_match_counts_equal_answers_only():
    references = ["Answer: 12", "Answer: 7", "Answer: 120", "Answer: 5"]
    assert evaluate.exact_match(["Answer: 12", "so Answer: 7", "Answer: 12", ""], references) == 0.5
    # A broken reference is never matched by an equally broken reply.
    assert evaluate.exact_match(["", "Answer: 1"], ["", "Answer: 1"]) == 0.5


@pytest.mark.parametrize(("replies", "references"), [([], []), (["Answer: 1"], ["Answer: 1", "Answer: 2"])])
def test_exact_match_needs_one_reply_for_each_reference(replies, references):
    with pytest.raises(ValueError, match="one reply for each reference"):
        evaluate.exact_match(replies, references)


class ScriptedModel(SimpleNamespace):
    """Stands for a model: looks up the reply to each prompt that it is given."""

    def generate(self, input_ids, attention_mask, max_new_tokens, do_sample, **_):
        assert not do_sample
        prompts = [
            self.tokenizer.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask, strict=True)
        ]
        replies = self.tokenizer([self.replies[p] + "<|im_end|>" for p in prompts])["input_ids"]
        width = max(map(len, replies))
        assert width <= max_new_tokens
        padded = [reply + [self.tokenizer.pad_token_id] * (width - len(reply)) for reply in replies]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


def test_replies_come_back_in_the_order_of_the_prompts_without_prompt_or_padding():
    examples = prepare.draw_examples(__import__("random").Random(3), max_digits=3)
    rows = [next(examples)["messages"] for _ in range(7)]
    tokenizer = prepare.build_tokenizer([message["content"] for row in rows for message in row], 300)
    tokenizer.padding_side = "left"
    prompts, references = [row[:1] for row in rows], [row[1]["content"] for row in rows]
    asked = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    model = ScriptedModel(
        tokenizer=tokenizer, replies=dict(zip(asked, references, strict=True)), device=torch.device("cpu")
    )
    assert evaluate.generate_replies(model, tokenizer, prompts, 100, batch_size=3) == references


@pytest.fixture(scope="module")
def sft():
    return load_script("sft")


@pytest.mark.parametrize("name", ["outputs/no/such", "./nowhere", "/no/such/folder"])
def test_a_missing_local_folder_is_named_before_any_download(sft, name):
    arguments = sft.SFTScriptArguments(dataset_name=name)
    with pytest.raises(ValueError, match=f"dataset_name: '{name}' does not exist.*prepare_demo"):
        sft.load_splits(arguments, with_eval=True)


def test_a_name_of_the_hub_is_left_to_load_dataset(sft):
    sft.check_local_path("dataset_name", "owner/name")
    sft.check_local_path("model_name_or_path", "name")


def test_a_data_set_that_cannot_be_loaded_is_a_value_error_with_its_name(sft, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="dataset_name: 'nobody/nothing' could not be loaded"):
        sft.load_splits(sft.SFTScriptArguments(dataset_name="nobody/nothing"), with_eval=False)


def test_a_missing_split_is_named_with_those_that_exist(sft, tmp_path):
    prepare.write_jsonl(tmp_path / "train.jsonl", [prepare.make_example(1, "+", 2, "Add {a} and {b}.")])
    arguments = sft.SFTScriptArguments(dataset_name=str(tmp_path))
    train, none = sft.load_splits(arguments, with_eval=False)
    assert len(train) == 1 and none is None
    with pytest.raises(ValueError, match=r"dataset_test_split: .* has no split 'test'; it has \['train'\]"):
        sft.load_splits(arguments, with_eval=True)


def test_resume_takes_what_was_asked_for_else_the_newest(sft, tmp_path):
    arguments = SimpleNamespace(resume_from_checkpoint=None, output_dir=str(tmp_path / "out"))
    assert sft.find_checkpoint(arguments) is None
    for step in (9, 10):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    assert sft.find_checkpoint(arguments) == str(tmp_path / "out" / "checkpoint-10")
    arguments.resume_from_checkpoint = "elsewhere"
    assert sft.find_checkpoint(arguments) == "elsewhere"


def run(*command, **environment):
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )
    return result.returncode, result.stdout + result.stderr


LOG = [{"step": 1, "loss": 2.0, "zero_seconds/step": 0.5}, {"step": 2, "eval_loss": 1.5}]


@pytest.mark.parametrize(
    "other, apart",
    [
        (LOG, 0),
        ([{**LOG[0], "zero_seconds/step": 0.9}, LOG[1]], 0),
        ([{**LOG[0], "loss": 2.0000001}, LOG[1]], 1),
        (LOG[:1], 1),
    ],
)
def test_runs_differ_where_a_loss_does_or_is_missing(other, apart):
    assert len(load_script("demo_offload").differences(LOG, other)) == apart


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_offload_demo_compares_two_runs_on_a_small_recipe(tmp_path):
    recipe = write_small_recipe(tmp_path)
    status, output = run(sys.executable, "scripts/prepare_demo.py", "--config", recipe)
    assert status == 0, output
    words = ["--config", recipe, "--disk", tmp_path, "--output", tmp_path / "offload", "--no-accuracy"]
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    status, output = run(
        sys.executable,
        "scripts/demo_offload.py",
        *words,
        "--",
        "--do_eval",
        "false",
        CUDA_VISIBLE_DEVICES="",
        PATH=path,
    )
    assert status == 0 and "are the same number by number, 3 steps" in output, output
    (file,) = (line.split()[-2:] for line in output.splitlines() if line.startswith("file, MB"))
    assert float(file[0]) == 0 and float(file[1]) > 4, output
    assert "MB/s that the disk can do" in output and "peak of a step's tensors" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_demo_commands_run_on_a_small_recipe_also_again(tmp_path, times):
    path = write_small_recipe(tmp_path)

    accelerate_file = "recipes/accelerate_configs/zero3.yaml"
    launch = [BIN / "accelerate", "launch", "--config_file", accelerate_file, "--num_processes", "2"]
    for _ in range(times):
        status, output = run(sys.executable, "scripts/prepare_demo.py", "--config", path)
        assert status == 0, output
        status, output = run(*launch, "scripts/sft.py", "--config", path, CUDA_VISIBLE_DEVICES="")
        assert status == 0, output
        assert "train_loss" in output and "eval_loss" in output and "'loss'" in output, output
    written = {file.name for file in (tmp_path / "sft").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "all_results.json"} <= written

    # Three steps teach nothing: the check must run, count, and say no.
    status, output = run(sys.executable, "scripts/evaluate_arithmetic.py", "--config", path)
    assert status == 1 and "Held-out exact match" in output and "Below 0.9" in output, output
