"""Code lines of the package by room, against their budget: `python -m benchmarks.code_lines [FOLDER]`.

A code line holds code: blank lines, comments and docstrings do not count.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path


# Rooms that share a budget; all that is named nowhere shares the last one.
BUDGETS = {
    ("core", "comm"): 2500,
    ("integrations", "trl"): 1300,
    ("adopt", "deepspeed"): 300,
    (): 5400,
}
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """The lines of a module that hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def by_room(package: Path) -> Counter[str]:
    """Code lines of each file or folder directly in a package."""
    counts: Counter[str] = Counter()
    for file in sorted(package.rglob("*.py")):
        counts[file.relative_to(package).parts[0].removesuffix(".py")] += code_lines(file.read_text(encoding="utf-8"))
    return counts


def report(package: Path) -> str:
    """A table of rooms and budgets."""
    counts = by_room(package)
    named = {room for rooms in BUDGETS for room in rooms}
    lines = [f"{package.name}: {sum(counts.values()):,} code lines"]
    for rooms, budget in BUDGETS.items():
        found = {room: counts[room] for room in rooms if counts[room]} if rooms else counts.copy()
        if not rooms:
            found = {room: count for room, count in counts.items() if room not in named}
        shown = ", ".join(f"{room} {count:,}" for room, count in sorted(found.items(), key=lambda item: -item[1]))
        total = sum(found.values())
        if found:
            lines.append(f"  {total:>6,} of {budget:,}{'  (over)' if total > budget else ''}: {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1] if len(sys.argv) > 1 else "hf_zero")))
