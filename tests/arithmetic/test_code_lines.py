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


def test_rooms_are_counted_with_the_folders_in_them(tmp_path):
    for name, lines in (("core/unit", 2), ("core/deep/er", 1), ("cli", 7)):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n" * lines)
    assert code_lines.by_room(tmp_path) == {"core": 3, "cli": 7}


def test_rooms_are_shown_with_the_goal_that_they_share(monkeypatch):
    monkeypatch.setattr(code_lines, "LIMITS", {"core": 5000, "comm": 700, "trl": 1, "cli": 50})
    assert code_lines.report({"comm": 600, "core": 3500, "trl": 1, "cli": 7}) == [
        " 4,100, goal 4,000 (over): core 3,500 of 5,000, comm 600 of 700",
        "     1, goal 1,300: trl 1 of 1",
        "     0, goal 300: ",
        "     7, goal 6,800: cli 7 of 50",
    ]


def test_a_room_that_has_grown_or_is_new_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(code_lines, "LIMITS", {"cli": 7})
    (tmp_path / "cli.py").write_text("x = 1\n" * 7)
    assert code_lines.main(tmp_path) == 0
    (tmp_path / "cli.py").write_text("x = 1\n" * 8)
    (tmp_path / "attic.py").write_text("x = 1\n")
    assert code_lines.main(tmp_path) == 1
    said = capsys.readouterr().out
    assert "cli has 8 code lines, its limit is 7" in said and "attic has 1 code lines, its limit is 0" in said
