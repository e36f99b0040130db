"""One YAML 1.2 file as plain values plus the line of every key: what the rest of config/ works on."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from .errors import Path, Report, quoted

NODES_MAX = 100_000  # after anchors are filled in
DEPTH_MAX = 50
_TAG = "tag:yaml.org,2002:"


class Text(str):
    """A string that remembers its lines as they stand in the file: `>` blocks fold them, commands must not."""

    __slots__ = ("first_line", "lines")
    lines: str
    first_line: int  # of `lines`; 0: the lines do not map to the file's


class Whole(int):
    """An integer that remembers how it was written (`010`, `1_000`)."""

    text: str


class Real(float):
    """A float that remembers how it was written (`1.50`)."""

    text: str


def plain(value: Any) -> Any:
    """The same value in builtin types only."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    return value


def parse(text: str, report: Report) -> Any:
    """The document's value (None when it cannot be read or is empty); fills `report.keys`, adds problems."""
    node = _composed(text, report)
    if node is None:
        return None
    builder = _Builder(text, report)
    return builder.value(node, (), 0)


def compose(text: str) -> Node | None:
    """The node tree of one document; YAMLError or RecursionError when it is none."""
    yaml = YAML(typ="safe", pure=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReusedAnchorWarning)  # lawful YAML; the warning would print lines of the file
        node: Node | None = yaml.compose(text)
    return node


def _composed(text: str, report: Report) -> Node | None:
    try:
        return compose(text)
    except ReaderError as exc:
        line = text.count("\n", 0, exc.position or 0) + 1
        report.add((), "holds a character that YAML does not allow. Remove it, or write it as an escape in double quotes.", line)
    except MarkedYAMLError as exc:
        mark = exc.problem_mark
        if exc.context_mark is not None and "end of stream" in f"{exc.problem}":
            mark = exc.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        report.add((), _syntax(f"{exc.problem or exc.context or ''}", has_macro=_has_macro(text, line)), line, column)
    except RecursionError:
        report.add((), f"is nested too deeply; at most {DEPTH_MAX} levels are read.", 1)
    except YAMLError:
        report.add((), "is not valid YAML.", 1)
    return None


def _has_macro(text: str, line: int) -> bool:
    lines = text.split("\n")
    return 0 < line <= len(lines) and "${" in lines[line - 1]


def _syntax(problem: str, has_macro: bool) -> str:
    """What the parser says, in words that tell what to do."""
    if "'\\t'" in problem:
        return "has a tab where YAML wants spaces. Indent with spaces."
    if "mapping values are not allowed" in problem:
        return "is not valid YAML: a `:` where none can be. Check the indentation, or put the value in quotes."
    if "undefined alias" in problem:
        return "uses a YAML alias (*name) that no anchor (&name) defines before it."
    if "another document" in problem:
        return "holds more than one YAML document. Keep one and remove the `---` between them."
    if "end of stream" in problem:
        return "is not valid YAML: a quote or bracket opened here is never closed."
    if "cannot start any token" in problem:
        return "is not valid YAML: a value cannot start with this character. Put the value in quotes."
    if "block end" in problem:
        return "is not valid YAML: this line does not fit the ones above. Check the indentation."
    if "could not find expected" in problem:
        return "is not valid YAML: a `key: value` was expected. Put a `:` and a space after the key."
    if "," in problem and "expected" in problem and has_macro:
        return "is not valid YAML: inside [..] and {..} a value with ${..} needs quotes around it."
    if "," in problem and "expected" in problem:
        return "is not valid YAML: a list [..] or mapping {..} is not closed, or lacks a comma."
    return "is not valid YAML. Check the indentation and quotes of this line."


@dataclass(slots=True)
class _Builder:
    text: str
    report: Report
    seen: int = 0
    open_nodes: set[int] = field(default_factory=set)

    def value(self, node: Node, path: Path, depth: int) -> Any:
        self.report.keys.setdefault(path, (node.start_mark.line + 1, node.start_mark.column + 1))
        self.seen += 1
        if self._is_full():
            return None
        if depth > DEPTH_MAX:
            self.report.add(path, f"is nested too deeply; at most {DEPTH_MAX} levels are read.")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open_nodes:
            self.report.add(path, "is an anchor that contains itself. Write the value out.")
            return None
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
            return self._mapping(node, path, depth)
        finally:
            self.open_nodes.discard(id(node))

    def _is_full(self) -> bool:
        if self.seen == NODES_MAX + 1:
            self.report.add((), f"has more than {NODES_MAX:,} values once its anchors are filled in. Make it smaller.", 1)
        return self.seen > NODES_MAX

    def _mapping(self, node: Node, path: Path, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        merges: list[Node] = []
        first: dict[str, int] = {}
        for key, item in node.value:
            if key.tag == f"{_TAG}merge" or (isinstance(key, ScalarNode) and key.value == "<<" and key.style is None):
                merges.extend(item.value if isinstance(item, SequenceNode) else [item])
                continue
            if not isinstance(key, ScalarNode):
                self.report.add(path, "has a key that is a list or a mapping. Keys are plain words.", key.start_mark.line + 1)
                continue
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                what = f"the key {quoted(name)} is written twice, on lines {first[name]} and {line}. Keep one."
                self.report.add((*path, name), what, line, key.start_mark.column + 1)
                continue
            first[name] = line
            self.report.keys[(*path, name)] = (line, key.start_mark.column + 1)
            out[name] = self.value(item, (*path, name), depth + 1)
        for merged in merges:
            self._merge(out, merged, path, depth)
        return out

    def _merge(self, out: dict[str, Any], node: Node, path: Path, depth: int) -> None:
        if not isinstance(node, MappingNode):
            self.report.add(path, "merges (<<) something that is not a mapping.", node.start_mark.line + 1)
            return
        if id(node) in self.open_nodes:
            self.report.add(path, "is an anchor that contains itself. Write the value out.")
            return
        self.seen += 1  # also when it adds nothing: a few lines of merges of merges could be walked for ever
        if self._is_full():
            return
        known = dict(self.report.keys)
        for key, item in self._mapping(node, path, depth + 1).items():
            if key in out:  # what is written here wins over what is merged, and so does its line
                self.report.keys.update({at: spot for at, spot in known.items() if at[: len(path) + 1] == (*path, key)})
            else:
                out[key] = item

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        written = str(node.value)
        if "\0" in written:
            self.report.add(path, "holds a NUL character, which no program can be given. Remove it.")
            return None
        tag = str(node.tag)
        if not tag.startswith(_TAG):
            self.report.add(path, f"has the YAML tag {quoted(tag)}, which means nothing here. Remove it.")
            return None
        match tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                return written.lower() in ("true", "yes", "on")
            case "int":
                whole = _whole(written)
                return self._string(node, written) if whole is None else whole
            case "float":
                return _real(written)
            case "str" | "timestamp":
                return self._string(node, written)
            case other:
                self.report.add(path, f"has the YAML tag {quoted('!!' + other)}, which means nothing here. Remove it.")
                return None

    def _string(self, node: ScalarNode, written: str) -> Text:
        text = Text(written)
        text.lines, text.first_line = written, 0
        if node.style in ("|", ">"):
            raw = self.text[node.start_mark.index : node.end_mark.index]
            _, _, body = raw.partition("\n")
            text.lines = textwrap.dedent(body.replace("\r\n", "\n"))
            text.first_line = node.start_mark.line + 2
        elif node.start_mark.line == node.end_mark.line:
            text.first_line = node.start_mark.line + 1
        return text


def _whole(written: str) -> Whole | None:
    digits = written.replace("_", "").lower()
    try:
        if re.match(r"[-+]?0[xob]", digits):
            value = Whole(int(digits, 0))
        else:
            value = Whole(int(digits, 10))
    except ValueError:
        return None
    value.text = written
    return value


def _real(written: str) -> Real:
    digits = written.replace("_", "").lower()
    special = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
    value = Real(special[digits] if digits in special else float(digits))
    value.text = written
    return value
