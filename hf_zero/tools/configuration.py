"""``hf-zero config``: the settings of a run, and over which ranks it would share its state out."""

from collections.abc import Sequence

from hf_zero.config import ZeroConfig, explain
from hf_zero.core.extents import arrange, table


def main(argv: Sequence[str]) -> int:
    return explain.main(argv, _extents)


def _extents(config: ZeroConfig, ranks: int, machines: int) -> list[dict[str, str]]:
    """The rows of `core.extents.table`. Raises ZeroConfigError where the ranks cannot be arranged so."""
    return table(config, arrange(config, ranks, 0, {ranks // machines} if machines > 1 else ()))
