"""The rooms of a package, and the imports between them: `python -m benchmarks.package_map [PACKAGE ...]`.

A room is a file or folder directly under the package; an arrow is one room that imports another, inside functions too.
A layer is as high as the longest way down from it. The same is counted for files. What imports itself by way of others
is on a circle.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from tests.support import imports


Module = tuple[str, ...]


def arrows_of(package: Path, place: Callable[[Module], Module]) -> dict[Module, set[Module]]:
    """For every room (or file, as `place` says) those that it imports."""
    arrows: dict[Module, set[Module]] = {}
    for file in imports.files(package):
        mine = place(imports.module(package, file))
        found = {imports.target(package, dotted) for _, dotted in imports.found_in(package, file)}
        arrows.setdefault(mine, set()).update({place(target) for target in found if target} - {mine})
    return arrows


def below(start: Module, arrows: dict[Module, set[Module]]) -> set[Module]:
    """All that can be reached from one."""
    seen: set[Module] = set()
    todo = list(arrows[start])
    while todo:
        other = todo.pop()
        if other not in seen:
            seen.add(other)
            todo += arrows[other]
    return seen


def count(package: Path, place: Callable[[Module], Module]) -> str:
    """How many there are, in how many layers, the arrows, and how many are on circles."""
    arrows = arrows_of(package, place)
    reached = {one: below(one, arrows) for one in arrows}
    height: dict[Module, int] = {}
    for one in sorted(arrows, key=lambda one: (len(reached[one]), one not in reached[one])):
        height[one] = 1 + max((height[other] for other in reached[one] if one not in reached[other]), default=0)
    circling = sorted("/".join(one) for one in arrows if one in reached[one])
    return (
        f"{len(arrows)} in {max(height.values())} layers, {sum(map(len, arrows.values()))} arrows, "
        f"{len(circling)} on circles {' '.join(circling)}".strip()
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", type=Path, default=[Path("hf_zero")])
    for package in parser.parse_args().packages:
        print(f"{package} rooms: {count(package, lambda module: module[:1])}")
        print(f"{package} files: {count(package, lambda module: module)}")
