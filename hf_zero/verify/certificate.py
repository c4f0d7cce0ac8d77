"""The certificate: a verdict on each promise, as JSON and as a page that can go with a model card."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
import transformers

from hf_zero.verify.audit import Finding
from hf_zero.verify.measures import Measure


JSON_NAME, PAGE_NAME = "certificate.json", "certificate.md"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One promise: `holds`, `fails` or `not checked`, and what was measured."""

    promise: str
    verdict: str
    largest: float | None = None
    bound: float | None = None
    where: str = ""
    why: str = ""

    @classmethod
    def of(cls, measure: Measure, finding: Finding | None) -> Verdict:
        """What a measure says; nothing was compared after a fault that was found earlier."""
        if finding is not None and finding.promise == measure.promise:
            return cls(
                promise=measure.promise,
                verdict="fails",
                largest=finding.difference,
                bound=finding.bound,
                where=finding.where,
                why=finding.cause,
            )
        if not measure.compared:
            return cls(promise=measure.promise, verdict="not checked", why="nothing of it occurred")
        found = "fails" if measure.mismatch is not None else "holds, bitwise" if measure.bitwise else "holds"
        return cls(
            promise=measure.promise,
            verdict=found,
            largest=measure.largest,
            bound=measure.bound,
            where=measure.where,
            why=measure.explained,
        )


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was verified, on what, and every verdict."""

    system: str
    model: str
    settings: Mapping[str, object]
    ranks: int
    steps: int
    micro_batches: int  # of each rank and step
    how: str  # a sentence: from which weights on, clipped or not
    verdicts: list[Verdict]
    finding: Finding | None = None
    clip: float | None = None  # limit of the gradient norm
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.finding is None and not any(verdict.verdict == "fails" for verdict in self.verdicts)

    def write(self, folder: Path) -> None:
        """Write both files; what is there of these names is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"holds": self.holds, **asdict(self), "versions": versions()}
        (folder / JSON_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (folder / PAGE_NAME).write_text(self.page(), encoding="utf-8")

    def lines(self) -> list[str]:
        """For the terminal: a line for each promise, and the cause where one fails."""
        width = max(len(verdict.promise) for verdict in self.verdicts)
        said = [f"  {verdict.promise:<{width}}  {_measured(verdict)}" for verdict in self.verdicts]
        head = f"{self.system}, {self.ranks} rank(s), {self.model}: {self.steps} steps beside the reference"
        if self.finding is not None:
            found = self.finding
            said.append(f"FAILS at step {found.step}, rank {found.rank}, {found.where}: {found.cause}")
        return [head, *said, "every promise holds" if self.holds else "not every promise holds"]

    def page(self) -> str:
        """The certificate as Markdown."""
        said = [
            f"# Parity certificate: {self.model}",
            "",
            f"{self.system} on {self.ranks} rank(s), {self.steps} optimizer steps of {self.micro_batches} "
            f"micro-batch(es) a rank; {self.how}. "
            + ("**Every promise holds.**" if self.holds else "**Not every promise holds.**"),
            "",
            "| promise | verdict | largest difference | bound | where | rounding that explains it |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for verdict in self.verdicts:
            numbers = ("" if value is None else f"{value:.2e}" for value in (verdict.largest, verdict.bound))
            said.append(f"| {' | '.join([verdict.promise, verdict.verdict, *numbers, verdict.where, verdict.why])} |")
        if self.finding is not None:
            said += ["", f"Step {self.finding.step}, rank {self.finding.rank}: {self.finding.cause}."]
        settings = ", ".join(f"`{name}: {value}`" for name, value in self.settings.items())
        said += ["", f"Settings: {settings}.", "", ", ".join(f"{k} {v}" for k, v in versions().items()) + "."]
        return "\n".join(said) + "\n"


def _measured(verdict: Verdict) -> str:
    if verdict.largest is None or verdict.verdict == "holds, bitwise":
        return verdict.verdict + (f": {verdict.why}" if verdict.verdict == "not checked" else "")
    return f"{verdict.verdict}: at most {verdict.largest:.1e} in {verdict.where} (bound {verdict.bound:.1e})"


def versions() -> dict[str, str]:
    return {
        "hf_zero": metadata.version("hf_zero"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
    }
