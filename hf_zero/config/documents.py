"""Opens JSON and YAML files and remembers on which line each key stands."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hf_zero.errors import ZeroConfigError


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of one configuration file (or of a dict in Python, which has no lines)."""

    data: dict[str, Any]
    label: str
    file: str | None = None
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def line(self, path: tuple[str, ...]) -> int | None:
        return self.lines.get(path)

    def part(self, key: str) -> "Document":
        """The document below one key, with its lines."""
        lines = {path[1:]: line for path, line in self.lines.items() if path[0] == key and len(path) > 1}
        return Document(data=self.data[key] or {}, label=self.label, file=self.file, lines=lines)

    def without_comments(self) -> "Document":
        """The document without the keys, at any depth, that stand for comments in JSON: `_comment`, `//`."""
        return replace(self, data=_without_comments(self.data))


def _without_comments(data: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if not str(key).startswith(("_", "//"))}
    return {key: _without_comments(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _key_lines(node: yaml.Node, prefix: tuple[str, ...], lines: dict[tuple[str, ...], int], file: str) -> list[str]:
    """Collect the line of every key, of the last one where it stands twice; returns one finding for each such key."""
    findings = []
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            path = (*prefix, str(key_node.value))
            line = key_node.start_mark.line + 1
            if path in lines:
                findings.append(f"{file}:{line}: {'.'.join(path)} stands here and on line {lines[path]}")
                for known in [known for known in lines if known[: len(path)] == path]:
                    del lines[known]
            lines[path] = line
            findings += _key_lines(value_node, path, lines, file)
    return findings


def _locate(text: str, file: str) -> tuple[dict[tuple[str, ...], int], list[str]]:
    """Lines of all keys. JSON is read as YAML here, which is why tabs (legal in JSON only) become spaces."""
    try:
        node = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return {}, []  # only the lines are lost; the value itself was read by the json module
    lines: dict[tuple[str, ...], int] = {}
    findings = _key_lines(node, (), lines, file) if node is not None else []
    return lines, findings


def _json_error(text: str, file: str, error: json.JSONDecodeError) -> ZeroConfigError:
    rows = text.splitlines() or [""]
    number = min(error.lineno, len(rows))  # what is missing at the end is missed in the line after the last
    row = rows[number - 1]
    hint = ""
    if "//" in row or "/*" in row or row.lstrip().startswith("#"):
        hint = " (JSON has no comments: remove them, or use YAML)"
    elif error.pos >= len(text.rstrip()):
        hint = " (the file ends too early: is a closing brace missing?)"
    elif "Expecting property name" in error.msg or "Illegal trailing comma" in error.msg:
        hint = " (is there a comma too many?)"
    return ZeroConfigError(f"{file}:{number}: not valid JSON: {error.msg}{hint}")


def _parse(text: str, file: str) -> Any:
    if file.endswith(".json"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise _json_error(text, file, error) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark is not None else file
        raise ZeroConfigError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def load_document(path: str | os.PathLike[str]) -> Document:
    file = os.fspath(path)
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ZeroConfigError(f"{file}: there is no such file (current folder: {os.getcwd()})") from None
    except IsADirectoryError:
        raise ZeroConfigError(f"{file}: is a folder; name the JSON or YAML file in it") from None
    except UnicodeDecodeError:
        raise ZeroConfigError(f"{file}: is not a text file") from None
    except OSError as error:
        raise ZeroConfigError(f"{file}: cannot be read: {error.strerror}") from None
    data = _parse(text, file)
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise ZeroConfigError(f"{file}: expected keys and values, but the file is {kind}")
    lines, twice = _locate(text, file)
    if twice and file.endswith(".json"):  # as DeepSpeed does
        raise ZeroConfigError([f"{finding}: remove one of them" for finding in twice])
    notes = tuple(f"{finding}: the last one counts, as it does for Accelerate" for finding in twice)
    return Document(data=data, label=file, file=file, lines=lines, notes=notes)


def from_dict(data: Mapping[Any, Any], label: str) -> Document:
    wrong = [key for key in data if not isinstance(key, str)]
    if wrong:
        raise ZeroConfigError(f"{label}: keys must be text, got {wrong[0]!r}")
    return Document(data=dict(data), label=label)
