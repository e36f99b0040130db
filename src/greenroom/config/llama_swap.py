"""`greenroom config convert`: a llama-swap file as a greenroom file of the same meaning.

greenroom reads llama-swap's spelling, so the file is kept as people wrote it, comments included; only what
cannot be carried is commented out, and the few keys that mean something else are rewritten in place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from . import document, load
from .errors import ConfigError, Path, Problem, dotted, one_line, quoted
from .explain import known_keys
from .foreign import NO_EFFECT, PEER_FILTER_SYNONYMS, REFUSED, SYNONYMS, matches
from .schema import ConfigFile

LOAD_S_MIN = 15  # llama-swap raises shorter healthCheckTimeouts to this
_HEADER = (
    "# Converted from {name} by `greenroom config convert`. Check it with `greenroom check FILE`.",
    "# Worth adding: `devices:` (a budget for each GPU) and `memory:` for each model. Models that fit the budget",
    "# then stay loaded together; without sizes they are swapped one at a time, as before.",
)
_ENV = re.compile(r"\$\{env\.[^{}\s]+\}")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One `key: value` of a mapping, with where its text ends and how it is written."""

    path: Path
    key: Node
    value: Node
    is_flow: bool


@dataclass(slots=True)
class _Edits:
    text: str
    changes: dict[tuple[int, int], str] = field(default_factory=dict)  # span -> new text
    notes: list[str] = field(default_factory=list)

    def note(self, entry: _Entry, sentence: str) -> None:
        text = one_line(f"{dotted(entry.path)}: {sentence}")
        if text not in self.notes:
            self.notes.append(text)

    def replace(self, node: Node, text: str) -> None:
        self.changes[node.start_mark.index, node.end_mark.index] = text

    def drop(self, entry: _Entry) -> None:
        if entry.is_flow:
            self._cut(entry)
        else:
            self._comment_out(entry)

    def _cut(self, entry: _Entry) -> None:
        """Out of `{a: 1, b: 2}`, with the comma that follows, or else the one before."""
        start, end = entry.key.start_mark.index, entry.value.end_mark.index
        after = re.compile(r"\s*,\s*").match(self.text, end)
        if after is not None:
            end = after.end()
        else:
            start = len(self.text[:start].rstrip().removesuffix(","))
        self.changes[start, end] = ""

    def _comment_out(self, entry: _Entry) -> None:
        start = self.text.rfind("\n", 0, entry.key.start_mark.index) + 1
        end = max(entry.value.end_mark.index, entry.key.end_mark.index)
        lines = self.text[start:end].rstrip(" \n").split("\n")
        column = entry.key.start_mark.column
        while len(lines) > 1 and (not lines[-1].strip() or _is_outer_comment(lines[-1], column)):
            lines.pop()  # what follows the entry is not part of it
        old = "\n".join(lines)
        rest_of_line = self.text.find("\n", start + len(old))
        rest_of_line = len(self.text) if rest_of_line < 0 else rest_of_line
        old = self.text[start:rest_of_line]
        self.changes[start, start + len(old)] = "\n".join(line[:column] + "# " + line[column:] for line in old.split("\n"))

    def result(self) -> str:
        out, last = [], 0
        for (start, end), new in sorted(self.changes.items()):
            if start < last:  # inside something that is already gone, or reaching over its end
                last = max(last, end)
                continue
            out += [self.text[last:start], new]
            last = end
        return "".join([*out, self.text[last:]])


def _is_outer_comment(line: str, column: int) -> bool:
    return line.lstrip().startswith("#") and len(line) - len(line.lstrip()) <= column


def convert(path: str | os.PathLike[str]) -> str:
    """The text of a greenroom file that means the same; ConfigError when the file is not YAML."""
    return convert_with_notes(path)[0]


def convert_with_notes(path: str | os.PathLike[str]) -> tuple[str, tuple[str, ...]]:
    """The same, and what could not be carried, one sentence each (they also stand in the text's head)."""
    name = os.fspath(path)
    return convert_text(load.read(name), name)


def convert_text(text: str, name: str = "config.yaml") -> tuple[str, tuple[str, ...]]:
    text = text.replace("\r\n", "\n")
    edits = _Edits(text)
    for entry in _entries(_tree(text, name), ()):
        _edit(entry, edits)
    head = [line.format(name=one_line(os.path.basename(name))) for line in _HEADER]
    if edits.notes:
        head += ["#", "# Changed or not carried over:", *(f"# - {note}" for note in edits.notes)]
    return "\n".join([*head, "", edits.result()]), tuple(edits.notes)


def _tree(text: str, name: str) -> Node:
    """Environment macros become words of the same length: inside `[..]` they would not be YAML."""
    blank = _ENV.sub(lambda match: "E" * len(match.group()), text)
    try:
        node = document.compose(blank)
    except (YAMLError, RecursionError):
        load.load_config_text(blank, name, env={})  # says what is wrong, with its line
        raise
    if not isinstance(node, MappingNode):
        raise ConfigError([Problem(one_line(name), 1, 1, "", f"is not a mapping of keys. A minimal configuration is: {load.MINIMAL}")])
    return node


def _entries(node: Node, path: Path) -> Iterator[_Entry]:
    """Every entry of the places that have known keys, outer ones first."""
    if not isinstance(node, MappingNode):
        return
    for key, value in node.value:
        if not isinstance(key, ScalarNode) or key.value == "<<":
            continue
        here = (*path, str(key.value))
        yield _Entry(here, key, value, bool(node.flow_style))
        if len(here) < document.DEPTH_MAX and (here == ("models",) or known_keys(ConfigFile, here) or _may_hold_foreign(here)):
            yield from _entries(value, here)


def _may_hold_foreign(here: Path) -> bool:
    return any(len(foreign.place) > len(here) and matches(foreign.place[: len(here)], here) for foreign in (*REFUSED, *NO_EFFECT))


def _edit(entry: _Entry, edits: _Edits) -> None:
    for foreign in (*REFUSED, *NO_EFFECT):
        if matches(foreign.place, entry.path):
            if not foreign.harmless(_simple(entry.value)):
                edits.drop(entry)
                edits.note(entry, foreign.sentence)
            return
    if not _is_known(entry.path):
        edits.drop(entry)
        edits.note(entry, f"{quoted(str(entry.path[-1]))} is no key of either program; llama-swap ignores it.")
        return
    _rewrite(entry, edits)


def _is_known(path: Path) -> bool:
    keys = known_keys(ConfigFile, path[:-1])
    if not keys:
        return True  # names people choose: model ids, groups, macros
    if path[0] in ("models", "groups", "devices", "peers") and len(path) == 2:
        return True
    if path[:-2] == ("routing", "router", "settings") and path[-2] == "groups":
        return True
    if path[0] == "peers" and path[2:3] == ("models",):
        return True  # a name here and its name there
    return path[-1] in (*keys, *SYNONYMS, *PEER_FILTER_SYNONYMS)


def _rewrite(entry: _Entry, edits: _Edits) -> None:
    match entry.path:
        case ("healthCheckTimeout",) if isinstance(value := _simple(entry.value), int) and value < LOAD_S_MIN:
            edits.replace(entry.value, str(LOAD_S_MIN))
            edits.note(entry, f"{value} became {LOAD_S_MIN}, which llama-swap takes at least.")
        case ("models", _, "healthCheckTimeout"):
            edits.note(entry, "llama-swap takes the global value instead; greenroom keeps to this one.")
        case ("models", _, "concurrencyLimit") if _simple(entry.value) == 0:
            edits.drop(entry)
            edits.note(entry, "0 stood for llama-swap's limit of 10 requests; greenroom queues up to queue_limit instead.")
        case ("models", _, "concurrencyLimit"):
            edits.replace(entry.key, "parallel")
            edits.note(entry, "became `parallel`: further requests wait (up to queue_limit) where llama-swap refuses them.")
        case ("models", _, "filters", "strip_params"):
            edits.replace(entry.key, "stripParams")
        case _:
            pass


def _simple(node: Node) -> object:
    """A node's value as far as it matters here: scalars and emptiness."""
    if isinstance(node, MappingNode):
        return {str(key.value): _simple(value) for key, value in node.value if isinstance(key, ScalarNode)}
    if not isinstance(node, ScalarNode):
        return list(node.value)
    written = str(node.value)
    match str(node.tag).rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return written.lower() == "true"
        case "int" if re.fullmatch(r"[-+]?\d{1,18}", written):
            return int(written)
        case _:
            return written
