"""What the demo trains from is right: problems, worked answers, splits, tokenizer and chat template."""

import importlib.util
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/demo/sft/config_demo.yaml"


def load_script(name):
    """A program of scripts/ as a module; that folder is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare = load_script("prepare_demo")


@pytest.fixture(scope="module")
def settings():
    return prepare.read_recipe(RECIPE)[1]


@pytest.fixture(scope="module")
def splits(settings):
    return prepare.make_splits(settings)


@pytest.fixture(scope="module")
def tokenizer(splits):
    texts = [message["content"] for row in splits["train"][:2000] for message in row["messages"]]
    return prepare.build_tokenizer(texts, 384)


def read_question(text):
    """(a, operation, b), read from the words alone."""
    first, second = map(int, re.findall(r"\d+", text))
    if text.startswith("Subtract"):
        return second, "-", first
    return first, "-" if "-" in text else "+", second


def problems(rows):
    """The problems of some rows; the order of the numbers does not make a new one."""
    found = (read_question(row["messages"][0]["content"]) for row in rows)
    return [(op, *sorted((a, b))) for a, op, b in found]


def test_splits_have_the_asked_sizes_and_share_no_problem(settings, splits):
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": settings.train_examples,
        "test": settings.test_examples,
    }
    train, test = problems(splits["train"]), problems(splits["test"])
    assert len(set(train)) == len(train) and len(set(test)) == len(test)
    assert not set(train) & set(test)


def test_answers_and_every_worked_line_are_right(splits):
    for row in splits["test"] + splits["train"][:3000]:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        question, reply = (message["content"] for message in row["messages"])
        a, op, b = read_question(question)
        expected = a + b if op == "+" else a - b
        assert expected >= 0
        worked, answer = re.fullmatch(r"<think>\n(.+)\n</think>\n\nAnswer: (\d+)", reply, re.DOTALL).groups()
        assert int(answer) == expected, row

        total, carried = 0, 0
        for place, line in enumerate(worked.split("\n")):
            left, right, moved = re.fullmatch(r"([\d+-]+)=(\d+)(?:, (carry|borrow) 1)?", line).groups()
            assert eval(left) == int(right), line
            assert left.endswith(f"{op}1") or not carried, line
            carried = 1 if moved else 0
            total += int(right) % 10 * 10**place
        total += carried * 10 ** (place + 1)
        assert total == expected, row


@pytest.mark.parametrize(
    ("problem", "lines"),
    [
        ((385, "+", 247), ["5+7=12, carry 1", "8+4+1=13, carry 1", "3+2+1=6"]),
        ((999, "+", 1), ["9+1=10, carry 1", "9+0+1=10, carry 1", "9+0+1=10, carry 1"]),
        ((504, "-", 174), ["4-4=0", "10-7=3, borrow 1", "5-1-1=3"]),
        ((100, "-", 99), ["10-9=1, borrow 1", "10-9-1=0, borrow 1", "1-0-1=0"]),
        ((0, "+", 0), ["0+0=0"]),
    ],
)
def test_columns_are_worked_out_from_the_right(problem, lines):
    assert prepare.work_out(*problem) == lines


def test_the_seed_decides_the_data(settings):
    small = replace(settings, train_examples=50, test_examples=20)
    assert prepare.make_splits(small) == prepare.make_splits(small)
    assert prepare.make_splits(small) != prepare.make_splits(replace(small, data_seed=small.data_seed + 1))


def test_a_problem_never_comes_twice_even_where_few_exist():
    draw = prepare.draw_examples(random.Random(0), max_digits=1)
    found = problems([next(draw) for _ in range(60)])
    assert len(set(found)) == 60
    assert prepare.count_problems(1) == 110


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_digits": 1}, "raise demo.max_digits or ask for fewer"),
        ({"test_examples": 0}, "demo.test_examples must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(settings, change, message):
    with pytest.raises(ValueError, match=message):
        replace(settings, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_exampels": 5}, r"unknown or missing keys \['train_exampels'\]"),
        ({"data_seed": None}, r"unknown or missing keys \['data_seed'\]"),
    ],
)
def test_a_wrong_demo_section_is_refused_by_name(tmp_path, change, message):
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["demo"].update(change)
    recipe["demo"] = {key: value for key, value in recipe["demo"].items() if value is not None}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError, match=message):
        prepare.read_recipe(path)


def test_a_recipe_without_the_section_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(ValueError, match="no `demo:` section"):
        prepare.read_recipe(path)


def test_tokens_give_the_text_back_and_digits_stand_alone(tokenizer, splits):
    for row in splits["test"][:200]:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert [token for token in tokens if re.search(r"\d", token)] == re.findall(r"\d", text)
        assert tokens.count("<think>") == tokens.count("</think>") == 1


def test_the_loss_sees_the_reply_and_its_end_and_nothing_else(tokenizer, splits):
    for row in splits["test"][:200]:
        encoded = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        chosen = [i for i, keep in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if keep]
        assert tokenizer.decode(chosen) == row["messages"][1]["content"] + "<|im_end|>"


def test_the_generation_prompt_is_what_training_shows_before_a_reply(tokenizer, splits):
    messages = splits["test"][0]["messages"]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == prompt + messages[1]["content"] + "<|im_end|>\n"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token not in whole


def test_preparing_twice_writes_the_same_files_and_leaves_nothing_else(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = yaml.safe_load(RECIPE.read_text())
    recipe |= {"dataset_name": str(tmp_path / "data"), "model_name_or_path": str(tmp_path / "base")}
    recipe["demo"] |= {"train_examples": 60, "test_examples": 10, "vocab_size": 300}
    recipe["demo"]["model"] |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))

    def prepare_all():
        prepare.main(["--config", str(path)])
        return {file.name: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    first = prepare_all()
    assert prepare_all() == first
    assert not [name for name in first if name.endswith(".partial")]
    assert len([json.loads(line) for line in first["train.jsonl"].splitlines()]) == 60

    # The folder is what any model on the hub is: a plain load gives the same text and the same vocabulary.
    loaded, model = (
        AutoTokenizer.from_pretrained(tmp_path / "base"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
    )
    messages = json.loads(first["test.jsonl"].splitlines()[0])["messages"]
    text = loaded.apply_chat_template(messages, tokenize=False)
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert model.config.vocab_size == len(loaded) and model.config.eos_token_id == loaded.eos_token_id
