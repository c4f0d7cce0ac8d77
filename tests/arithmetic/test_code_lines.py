"""What counts as a code line, and how the lines of a package are added up by room."""

import textwrap

from benchmarks import code_lines


SOURCE = textwrap.dedent(
    '''
    """A docstring
    of two lines."""

    # a comment
    import os  # counts


    def f(
        x,
    ):
        """Says what."""
        text = """three
        lines

        and one blank"""
        return text, x, os
    '''
)


def test_blank_lines_comments_and_docstrings_do_not_count():
    assert code_lines.code_lines(SOURCE) == 1 + 3 + 4 + 1
    assert code_lines.code_lines("") == 0


def test_rooms_are_compared_with_their_budget(tmp_path):
    package = tmp_path / "hf_zero"
    for name, lines in (("core/unit", 2000), ("comm/work", 600), ("core/deep/er", 1), ("cli", 7), ("trl", 1)):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n" * lines)
    assert code_lines.report(package).splitlines() == [
        "hf_zero: 2,609 code lines",
        "   2,601 of 2,500  (over): core 2,001, comm 600",
        "       1 of 1,300: trl 1",
        "       7 of 5,400: cli 7",
    ]
