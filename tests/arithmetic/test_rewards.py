"""The rewards of scripts/rewards.py, one by one, and how they are found."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import rewards  # noqa: E402


THOUGHT = "<think>\n1+1=2\n</think>\n\n"


def chat(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    "text, answer",
    [
        (THOUGHT + "Answer: 12", "12"),
        (THOUGHT + "Answer: -3\n", "-3"),
        ("Answer: 1\nNo. Answer: 2", "2"),
        ("the answer is 7.", "7."),
        (r"So \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"cut off \boxed{12", None),
        ("<answer> x = 4 </answer>", "x = 4"),
        ("<think>Answer: 5</think>", None),  # what is only thought is not said
        ("12", None),
        ("", None),
    ],
)
def test_answers(text, answer):
    assert rewards.extract_answer(text) == answer


@pytest.mark.parametrize(
    "reply, solution, reward",
    [
        ("Answer: 12", THOUGHT + "Answer: 12", 1.0),
        ("Answer: 13", THOUGHT + "Answer: 12", 0.0),
        ("Answer: 12.0", "12", 1.0),
        ("Answer: 1,200", "1200", 1.0),
        (r"\boxed{$x+1$}", "x + 1", 1.0),
        ("twelve", "12", 0.0),
        ("Answer: 2", "12", 0.0),
    ],
)
def test_accuracy(reply, solution, reward):
    assert rewards.accuracy(chat(reply), solution=[solution]) == [reward]
    assert rewards.accuracy([reply], solution=[solution]) == [reward], "replies may be plain text"


def test_accuracy_of_answers_that_are_written_differently():
    pytest.importorskip("math_verify")
    assert rewards.accuracy(chat(r"\boxed{\frac{1}{2}}", "Answer: (1,2)"), solution=["0.5", "(1, 2)"]) == [1.0, 1.0]


def test_accuracy_wants_one_solution_for_each_reply():
    with pytest.raises(ValueError):
        rewards.accuracy(chat("a", "b"), solution=["a"])


@pytest.mark.parametrize(
    "reply, reward",
    [
        (THOUGHT + "Answer: 2", 1.0),
        (THOUGHT, 0.0),
        ("Answer: 2", 0.0),
        ("<think>a</think><think>b</think>c", 0.0),
        ("So <think>a</think> b", 0.0),
        ("<think>never ends", 0.0),
    ],
)
def test_format(reply, reward):
    assert rewards.format_(chat(reply), solution=["2"]) == [reward]


def test_tag_count():
    replies = chat("<think></think><answer></answer>", "<think><think></think>", "none", "<answer>")
    assert rewards.tag_count(replies) == [1.0, 0.25, 0.0, 0.25]


def test_reasoning_steps():
    replies = chat("Step 1: a\nStep 2: b\nStep 3: c\nStep 4: d", "1. a\n- b", "First, a. Finally, b.", "a")
    assert rewards.reasoning_steps(replies) == [1.0, pytest.approx(2 / 3), pytest.approx(2 / 3), 0.0]


def test_length():
    replies = chat("Answer: 1", "Answer: 1" + " " * 10, "Answer: 2", "Answer: 2" + " " * 10)
    assert rewards.length(replies, solution=["1"] * 4) == [0.5, -0.5, 0.0, -0.5]
    assert rewards.length(chat("Answer: 1", "Answer: 2"), solution=["1"] * 2) == [0.0, 0.0], "all are as long"


def test_every_reward_is_found():
    names = ["accuracy", "format", "tag_count", "reasoning_steps", "length"]
    assert [rewards.find_reward(name) for name in names] == list(rewards.REWARDS.values())


def test_a_reward_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns):\n    return [-float(len(c)) for c in completions]\n")
    assert rewards.find_reward(f"{file}:short")(completions=["abc"]) == [-3.0]
    with pytest.raises(ValueError, match="has no function 'long'"):
        rewards.find_reward(f"{file}:long")
    with pytest.raises(ValueError, match="there is no file"):
        rewards.find_reward(f"{tmp_path}/other.py:short")


@pytest.mark.parametrize("name", ["acuracy", "os:system", ""])
def test_an_unknown_reward_names_the_known_ones(name):
    with pytest.raises(ValueError, match="choose from accuracy, format, tag_count, reasoning_steps, length"):
        rewards.find_reward(name)
