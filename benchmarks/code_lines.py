"""Code lines of the package by room: `python -m benchmarks.code_lines [FOLDER]` fails where a room is over its limit.

A code line holds code: blank lines, comments and docstrings do not count.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path


# What docs/design.md wants the rooms to be, together; all that is named nowhere shares the last goal.
GOALS: dict[tuple[str, ...], int] = {
    ("core", "comm"): 4000,
    ("integrations", "trl"): 1300,
    ("adopt", "deepspeed"): 300,
    (): 6800,
}
# What a room may be: its size at present, rounded up. A change that needs more takes it from another room and says so.
LIMITS = {
    "adopt": 125,
    "checkpoint": 2161,  # 150 for parts of tensor-parallel ranks, saves by pieces below stage 3, reading ahead
    "cli": 70,  # 18 to end quietly where nobody reads any more
    "comm": 1762,  # 183 for DTensors and the elements that a part holds, exchanges between parts of sequences
    "command_line": 26,
    "config": 2472,  # 87 for tiles, tp_size, sp_size, cp_size, offload_step
    "convert": 1067,
    "core": 6800,  # 430 for tiles, 380 for tensor parallelism and sequences, 220 for streamed steps and failing disks
    "deepspeed": 295,
    "errors": 22,
    "__init__": 46,
    "integrations": 2331,  # 365 for tensor parallelism, Ulysses and context parallelism, 37 to read a checkpoint once
    "launcher": 641,
    "lazy_init": 332,
    "parallel": 422,
    "planning": 2811,  # 130 for ranks that share batches, 200 for the search, 350 for tiles, activations, optimizers
    "releases": 14,
    "run": 20,
    "tools": 1157,  # 275 lines draw the page of a run and a plan, 340 count and time operations and measure a machine
    "trl": 1,
    "verify": 1736,
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


def over_limit(counts: Mapping[str, int]) -> list[str]:
    """One line for each room that has grown beyond its limit, or has none."""
    return [
        f"{room} has {count:,} code lines, its limit is {LIMITS.get(room, 0):,}: make it smaller, or take the lines "
        f"from the limit of another room in {Path(__file__).name}, and say why"
        for room, count in sorted(counts.items())
        if count > LIMITS.get(room, 0)
    ]


def report(counts: Mapping[str, int]) -> list[str]:
    """Rooms and their limits, by the goal that they share."""
    named = {room for rooms in GOALS for room in rooms}
    lines = []
    for rooms, goal in GOALS.items():
        found = [room for room in counts if (room in rooms if rooms else room not in named)]
        found.sort(key=lambda room: -counts[room])
        total = sum(counts[room] for room in found)
        shown = ", ".join(f"{room} {counts[room]:,} of {LIMITS.get(room, 0):,}" for room in found)
        lines.append(f"{total:>6,}, goal {goal:,}{' (over)' if total > goal else ''}: {shown}")
    return lines


def main(package: Path) -> int:
    """The exit status: 1 where a room is over its limit."""
    counts = by_room(package)
    faults = over_limit(counts)
    print(f"{package.name}: {sum(counts.values()):,} code lines", *report(counts), *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=Path("hf_zero"))
    sys.exit(main(parser.parse_args().package))
