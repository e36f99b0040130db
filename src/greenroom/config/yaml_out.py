"""Plain values as YAML text that YAML 1.1 and 1.2 readers understand alike.  Same values, same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*", re.ASCII)
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"})  # YAML 1.1 takes some for others
_BLOCK = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\r\t]*")


def dump(value: object, *, comments: Iterable[str] = ()) -> str:
    """`value` (mappings, sequences, text, numbers, truth values, None) in block style; `comments` stand above, one a line."""
    return dump_all([value], comments=comments)


def dump_all(values: Iterable[object], *, comments: Iterable[str] = ()) -> str:
    """Several documents in one text."""
    head = "".join(f"# {line}".rstrip() + "\n" for text in comments for line in text.splitlines() or [""])
    return head + "---\n".join(_document(value) for value in values)


def _document(value: object) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 1 << 20  # a folded scalar is hard to read back by eye
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    yaml.dump(_styled(value), out)
    text = out.getvalue()
    return text.removesuffix("...\n")  # a bare scalar's end mark


def _styled(value: object) -> Any:
    if isinstance(value, Mapping):
        return CommentedMap((_styled(str(key)), _styled(item)) for key, item in value.items())
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, Sequence):
        return [_styled(item) for item in value]
    return value


def _text(text: str) -> Any:
    if "\n" in text and _BLOCK.fullmatch(text) and not text.startswith((" ", "\n")) and " \n" not in text and text.strip():
        return LiteralScalarString(text)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return DoubleQuotedScalarString(text)
