"""docs/parity.md: its tables are written by the parity tests' own functions, and name all that these compare."""

from pathlib import Path

import pytest

from benchmarks import parity_report
from tests.support import zoo
from tests.support.reference import OPTIMIZERS, STAGES


PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
SETUP = parity_report.SETUPS[0]


def tables(text):
    """The cells of every table line in the measured part, by the table's title."""
    measured = text.partition(parity_report.BEGIN)[2].partition(parity_report.END)[0]
    found = {}
    for line in measured.splitlines():
        if line.startswith("### "):
            rows = found.setdefault(line.removeprefix("### "), [])
        elif line.startswith("| ") and not line.startswith(("| model", "| ---")):
            rows.append([cell.strip() for cell in line.strip("| ").split("|")])
    return found


def test_the_page_covers_every_model_and_stage_within_the_bounds_of_the_tests():
    found = tables(PAGE.read_text())
    assert set(found) == {setup.title for setup in parity_report.SETUPS}
    for title, rows in found.items():
        covered = [(model, int(stage)) for model, stages, *_ in rows for stage in stages.split(", ")]
        assert sorted(covered) == sorted((model, stage) for model in zoo.NAMES for stage in STAGES), title
        for model, stages, *values in rows:
            assert len(values) == len(OPTIMIZERS) * len(parity_report.MEASURES), (title, model)
            assert all(0 <= float(value) <= 1e-5 for value in values), (title, model, stages, values)


def test_the_page_says_where_it_was_measured_and_by_which_command():
    text = PAGE.read_text()
    assert "python -m benchmarks.parity_report docs/parity.md" in text
    assert "Measured on 20" in text and "torch 2." in text and "transformers" in text


@pytest.mark.exhaustive  # what it calls are the parity tests' own functions
def test_a_measurement_of_one_model():
    measured = parity_report.measure("bert", "sgd", SETUP)
    assert set(measured) == set(STAGES)
    for worst in measured.values():
        assert worst["loss"] == worst["weight"] == 0 and 0 < worst["norm"] < 1e-6, measured


def test_stages_with_the_same_differences_share_a_line():
    same, other = dict.fromkeys(parity_report.MEASURES, 0.0), {"loss": 0.0, "norm": 2e-8, "weight": 1.5e-9}
    lines = parity_report.rows("llama", {"sgd": {0: same, 1: same, 2: other}})
    assert lines == ["| llama | 0, 1 | 0 | 0 | 0 |", "| llama | 2 | 0 | 2.0e-08 | 1.5e-09 |"]


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    page = f"before\n{parity_report.BEGIN}\nold\n{parity_report.END}\nafter\n"
    new = parity_report.put(page, "new")
    assert new == f"before\n{parity_report.BEGIN}\n\nnew\n\n{parity_report.END}\nafter\n"
    assert parity_report.put(new, "new") == new
    path = tmp_path / "page.md"
    path.write_text("no marks")
    with pytest.raises(ValueError, match="no lines '<!-- measured: begin"):
        parity_report.main([str(path)])
