"""``Layer``: what one source says (settings with their origins, notes, problems), read by one key table; merging."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config import values
from hf_zero.config.documents import Document
from hf_zero.config.keys import DEEPSPEED_KEYS, Key
from hf_zero.config.keys_accelerate import DEEPSPEED_SECTION_KEYS, FLAT_KEYS, FSDP_KEYS, OWN_KEYS, TOP_KEYS
from hf_zero.config.options import OPTIONS, Options
from hf_zero.config.origin import Origin


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value as it was written, and where."""

    value: Any
    origin: Origin


@dataclass(kw_only=True)
class Layer:
    """What one source says. Filled key by key while the source is read, then only looked at."""

    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, origin: Origin) -> None:
        before = self.settings.get(name)
        if before is not None and not values.is_auto(before.value):
            if values.is_auto(value):
                return
            if before.value != value:
                self.problems.append(
                    f"{origin.where}: {origin.written or name} is {value!r}, but {before.origin.written or name} "
                    f"({before.origin.where}) says {before.value!r}: both set {name.lstrip('_')}; keep one of them"
                )
                return
        self.settings[name] = Setting(value=value, origin=origin)

    def take(self, name: str) -> Setting | None:
        return self.settings.pop(name, None)


def merge(layers: Iterable[Layer]) -> Layer:
    """What all layers, weakest first, say together."""
    merged = Layer()
    for layer in layers:
        merged.problems += layer.problems
        merged.notes += layer.notes
        for name, setting in layer.settings.items():
            # A number says more than "auto": it stays, even where the word comes from a stronger source.
            if name not in merged.settings or not values.is_auto(setting.value):
                merged.settings[name] = setting
    precision = merged.settings.get("mixed_precision")
    if precision is not None and values.is_auto(precision.value):
        merged.take("mixed_precision")  # the same as not writing it: the arguments or the launcher decide
    merged.settings = {name: _resolve_plain_auto(name, setting) for name, setting in merged.settings.items()}
    return merged


def _resolve_plain_auto(name: str, setting: Setting) -> Setting:
    """ "auto" means the default, except where it may stand until the run knows more."""
    if not values.is_auto(setting.value) or OPTIONS[name].kind.auto:
        return setting
    default = Options.default(name)
    return Setting(value=default, origin=dataclasses.replace(setting.origin, reason=f"auto: the default, {default!r}"))


def read_keys(document: Document, table: Mapping[str, Key], layer: Layer, section: str = "") -> None:
    """Read all keys of ``document``; unknown ones become problems with the nearest name."""
    for path, value in _walk(document.data, table, ()):
        name = ".".join(path)
        key = table.get(name)
        place = Origin(label=document.label, file=document.file, line=document.line(path), written=section + name)
        if isinstance(value, _NotASection):
            layer.problems.append(f"{place.where}: {section + name} is {value.value!r}: expected a section with keys")
        elif key is None:
            layer.problems.append(f"{place.where}: unknown key {section + name!r}{_suggestion(name, table, section)}")
        else:
            _read_key(key, value, place, layer)


def _walk(
    data: Mapping[str, Any], table: Mapping[str, Key], prefix: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for every key; goes into a section only where the table knows keys below it."""
    for name, value in data.items():
        path = (*prefix, str(name))
        dotted = ".".join(path)
        has_keys_below = any(known.startswith(dotted + ".") for known in table)
        if not has_keys_below or (dotted in table and not isinstance(value, Mapping)):
            yield path, value
        elif isinstance(value, Mapping):
            below = list(_walk(value, table, path))
            if dotted in table:  # the section is accepted as a whole, only the keys of the table matter
                below = [(found, found_value) for found, found_value in below if ".".join(found) in table]
                yield path, value
            yield from below
        elif value is not None:
            yield path, _NotASection(value)


@dataclass(frozen=True)
class _NotASection:
    value: Any


def _read_key(key: Key, value: Any, origin: Origin, layer: Layer) -> None:
    if key.field is None:
        if _is_neutral(value, key.neutral):
            return
        if key.refusal is not None:
            layer.problems.append(f"{origin.where}: {origin.written} is {value!r}: {key.refusal}")
        elif key.note is not None and not values.is_auto(value):
            layer.notes.append(f"{origin.where}: {origin.written} has no effect here: {key.note}")
        return
    if value is None:
        return
    if values.is_auto(value):
        layer.put(key.field, values.AUTO, origin)
        return
    try:
        layer.put(key.field, key.parse(value), origin)
    except ValueError as error:
        layer.problems.append(f"{origin.where}: {origin.written} is {value!r}: {error}")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True == 1 in Python: a switch is only neutral where the table names a switch.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)


_ALL_TABLES: tuple[tuple[str, Mapping[str, Key]], ...] = (
    ("the top level of an Accelerate YAML", TOP_KEYS),
    ("deepspeed_config", DEEPSPEED_SECTION_KEYS),
    ("fsdp_config", FSDP_KEYS),
    ("a DeepSpeed JSON", DEEPSPEED_KEYS),
    ("hf_zero", OWN_KEYS),
    ("ZeroConfig", FLAT_KEYS),
)


def _suggestion(name: str, table: Mapping[str, Key], section: str) -> str:
    """The section where exactly this name belongs, its name in this kind of file, or the nearest known name."""
    parent, _, leaf = name.rpartition(".")
    for known in table:
        if known.rpartition(".")[2] == leaf:
            return f": it belongs to {known.rpartition('.')[0]!r}, write {section + known}"
    flat = FLAT_KEYS.get(leaf)
    for known, key in table.items():
        if flat is not None and key.field == flat.field:
            return f": its name here is {section + known}"
    for place, other in _ALL_TABLES:
        if other is not table and name in other:
            return f": it belongs to {place}"
    prefix = f"{parent}." if parent else ""
    siblings = {known[len(prefix) :].split(".")[0] for known in table if known.startswith(prefix)}
    near = [prefix + found for found in difflib.get_close_matches(leaf, sorted(siblings), n=1, cutoff=0.6)]
    if not near:
        leaves = {known.rpartition(".")[2]: known for known in table}
        near = [leaves[found] for found in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    if near:
        return f"; did you mean {section + near[0]!r}?"
    return "; hf-zero config --keys lists the known ones"
