"""A table of configurations, good, odd and bad, with their exact answers (data/configs/cases.yaml)."""

import difflib
from pathlib import Path

import pytest
import yaml

from hf_zero.config import ZeroConfig
from hf_zero.config.keys import DEEPSPEED_KEYS
from hf_zero.config.keys_accelerate import DEEPSPEED_SECTION_KEYS, FSDP_KEYS
from hf_zero.errors import ZeroConfigError


CASES = yaml.safe_load((Path(__file__).parents[1] / "data/configs/cases.yaml").read_text())


def test_the_table_is_large_and_its_names_are_unique():
    assert len(CASES) >= 150
    assert len({case["name"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case):
    if "errors" in case:
        with pytest.raises(ZeroConfigError) as caught:
            ZeroConfig.from_any(case["source"])
        assert list(caught.value.problems) == case["errors"]
        return
    config = ZeroConfig.from_any(case["source"])
    given = {name: getattr(config, name) for name in config.chosen()}
    assert given == case["gives"]
    assert {name: type(value) for name, value in given.items()} == {k: type(v) for k, v in case["gives"].items()}
    assert list(config.notes) == case.get("notes", [])


def _misspelt(table):
    for path in table:
        section, _, leaf = path.rpartition(".")
        if len(leaf) >= 6 and section not in table:  # a section that is accepted as a whole may hold anything
            yield path, leaf[:3] + leaf[4:]  # one letter is missing


@pytest.mark.parametrize(("path", "wrong"), list(_misspelt(DEEPSPEED_KEYS)))
def test_every_misspelt_json_key_is_named(path, wrong):
    parents = path.split(".")[:-1]
    source = {wrong: 1}
    for parent in reversed(parents):
        source = {parent: source}
    source.setdefault("zero_optimization", {"stage": 2})
    _check_suggestion(source, wrong, path.rpartition(".")[2])


@pytest.mark.parametrize(("path", "wrong"), list(_misspelt(DEEPSPEED_SECTION_KEYS)))
def test_every_misspelt_yaml_key_is_named(path, wrong):
    _check_suggestion({"distributed_type": "DEEPSPEED", "deepspeed_config": {wrong: 1}}, wrong, path)


@pytest.mark.parametrize(("path", "wrong"), list(_misspelt(FSDP_KEYS)))
def test_every_misspelt_fsdp_key_is_named(path, wrong):
    wrong = path[:6] + path[7:]
    _check_suggestion({"distributed_type": "FSDP", "fsdp_config": {wrong: 1}}, wrong, path)


def _check_suggestion(source, wrong, right):
    """The error names the wrong key, and the suggestion is the right one (or one that is as near)."""
    with pytest.raises(ZeroConfigError) as caught:
        ZeroConfig.from_any(source)
    (message,) = [problem for problem in caught.value.problems if "unknown key" in problem]
    assert f"{wrong}'" in message
    suggested = message.partition("did you mean ")[2].strip("'?").rpartition(".")[2]
    nearness = difflib.SequenceMatcher(None, wrong, right).ratio()
    assert suggested == right or difflib.SequenceMatcher(None, wrong, suggested).ratio() >= nearness, message
