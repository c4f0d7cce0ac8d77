"""Runs other people's scripts, unmodified, under DDP and at stages 2 and 3, and writes docs/compatibility.md.

    python -m scripts.compatibility_report docs/compatibility.md [--accelerate CHECKOUT] [--transformers CHECKOUT] ...

The cases are those of `tests/support/compatibility.py`: 2 CPU ranks, tiny models and data that are made on the spot,
no network. Only what stands between the two marks of the page is replaced. A script that fails, or that is not refused
as it should be, ends the run with status 1, and its row says so. Run it from the root of the repository, for about
20 minutes on 2 cores.
"""

import argparse
import datetime
import importlib.metadata
import sys
import tempfile
from pathlib import Path

from tests.support.checkouts import CASES_OF
from tests.support.compatibility import CASES, Case, Outcome, difference, prepare, run_case


BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
STAGES = (2, 3)
LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of the cases to run")
    for name in CASES_OF:
        parser.add_argument(f"--{name}", type=Path, metavar="CHECKOUT", help=f"run the examples of {name}, too")
    args = parser.parse_args()
    known = [*CASES]
    for name, (folder, cases_in) in CASES_OF.items():
        known += cases_in(getattr(args, name) / folder) if getattr(args, name) else []
    wanted = [case for case in known if not args.only or case.name.startswith(tuple(args.only))]
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        rows = [_row(case, Path(folder), faults) for case in wanted]
    _replace(args.page, rows)
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def _row(case: Case, folder: Path, faults: list[str]) -> list[str]:
    origin = case.origin or ("this repository" if "/" in case.script else case.script.partition(".")[0])
    variant = "" if case.name in case.script else f", {case.name.partition(', ')[2] or case.name}"
    name = f"`{case.name if case.origin else case.script}`{variant}"
    print(case.name, flush=True)
    if case.missing:
        return [name, origin, f"not run: needs {', '.join(case.missing)}", "", ""]
    stock = Outcome() if case.refused else run_case(case, None, folder)
    if case.fails_stock and case.fails_stock in stock.error:
        stock = Outcome(error=f"none: under DDP {case.fails_stock}")
    elif stock.error:
        faults.append(f"{case.name} under DDP: {stock.error}")
        return [name, origin, "fails under DDP", "", ""]
    cells = [_cell(case, stage, stock, run_case(case, stage, folder), faults) for stage in STAGES]
    compared = "checks itself" if case.checks_itself else stock.error or str(len(stock.losses))
    return [name, origin, compared, *cells]


def _cell(case: Case, stage: int, stock: Outcome, ours: Outcome, faults: list[str]) -> str:
    words, why = (case.refused, f"refused: {case.refused}") if case.refused else case.ends
    if words and words in ours.error:
        return why
    if ours.error or words or set(ours.stages) - {stage} or (stock.losses and not ours.stages):
        faults.append(f"{case.name} at stage {stage}: {ours.error or ours.stages}")
        return "**fails**"
    if case.checks_itself or case.fails_stock:
        return "passes"
    apart = [difference(ours.losses, stock.losses)]
    if stock.norms:
        apart.append(difference(ours.norms, stock.norms))
    return " / ".join(f"{value:.1e}" if value else "0" for value in apart)


def _replace(page: Path, rows: list[list[str]]) -> None:
    head = ["script", "from", "losses compared", *(f"stage {stage}" for stage in STAGES)]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    made = f"Measured on {datetime.date.today()} with Python {sys.version.split()[0]}, {versions}, on 2 CPU ranks."
    text = page.read_text()
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(f"{text[:start]}\n\n{made}\n\n{table}\n\n{text[stop:]}")


if __name__ == "__main__":
    sys.exit(main())
