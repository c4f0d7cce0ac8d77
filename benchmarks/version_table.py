"""Write the table of supported releases into a page, from setup.cfg and the sets of pins that the tests run with.

python -m benchmarks.version_table docs/installation.md [--check]
"""

import argparse
import configparser
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by benchmarks/version_table.py -->\n", "<!-- end of the table -->\n"
SHOWN = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "numpy")
PYTHONS = ("3.10", "3.11")


def ranges() -> dict[str, str]:
    """The releases that setup.cfg admits, by name."""
    setup = configparser.ConfigParser(delimiters=("=",))
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    lines = [line for text in texts for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): str(each.specifier) or "any" for each in found}


def pins(file: str, python: str) -> dict[str, str]:
    """The releases that a set of pins takes on a Python, by name."""
    found = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                found[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return found


def table() -> str:
    oldest = pins("constraints-oldest.txt", "3.11")
    newest = [pins("constraints.txt", python) for python in PYTHONS]
    lines = [
        "| package | admitted | oldest set | newest set, Python 3.10 | newest set, 3.11 and later |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in SHOWN:
        wanted = ", ".join(sorted(ranges()[name].split(","), reverse=True))
        lines.append(f"| {name} | {wanted} | {oldest[name]} | {' | '.join(each[name] for each in newest)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    text = options.page.read_text()
    head, rest = text.split(BEGIN)
    made = f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    if options.check:
        if made != text:
            print(f"{options.page} is out of date: python -m benchmarks.version_table {options.page}", file=sys.stderr)
        return int(made != text)
    options.page.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
