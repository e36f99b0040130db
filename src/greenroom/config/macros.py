"""Macros: `${env.NAME}` as text before the YAML is parsed, `${name}` as values afterwards.

Macros may be declared in any order; a cycle is an error that names the chain.  A value that is exactly one
macro keeps the macro's type.  `$${name}` is the text `${name}`.  `${PORT}` and `${PID}` are known only when
an engine is started or stopped and stay as they are in the places that may hold them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import secrets
from .document import Text
from .errors import Path, Report, did_you_mean, looks_secret, quoted

Scalar: TypeAlias = str | int | float | bool

NAME_CHARS_MAX = 63
EXPANDED_CHARS_MAX = 1 << 20  # a short chain of macros can double its way to gigabytes
DEPTH_MAX = 100
RESERVED = frozenset({"PORT", "PID", "MODEL_ID"})
_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_ENV = re.compile(r"(?<!\$)\$\{env\.([^{}\s]+)\}")
_USE = re.compile(r"(\$?)\$\{([A-Za-z0-9_.-]+)\}", re.ASCII)


class MacroError(ValueError):
    """A macro that cannot be filled in; the text is a sentence."""


# ----------------------------------------------------------------------------------------------- environment, as text


def fill_env(text: str, env: Mapping[str, str], report: Report) -> str:
    """The file's text with every `${env.NAME}` outside comments replaced, escaped for the quotes around it."""
    lines = re.split(r"(?<=\n)", text)
    return "".join(_filled_line(line, number, env, report) for number, line in enumerate(lines, start=1))


def _filled_line(line: str, number: int, env: Mapping[str, str], report: Report) -> str:
    if "${env." not in line:
        return line
    out, last = [], 0
    for match, quote in _uses_outside_comments(line):
        out.append(line[last : match.start()])
        out.append(_env_text(match.group(1), quote, number, env, report))
        last = match.end()
    return "".join([*out, line[last:]])


def _uses_outside_comments(line: str) -> Iterator[tuple[re.Match[str], str]]:
    quote = ""
    at = 0
    while at < len(line):
        c = line[at]
        before = line[at - 1] if at else " "
        if not quote and c == "#" and before.isspace():
            return
        if not quote and c in "'\"" and (before.isspace() or before in "[{,=("):
            quote = c
        elif quote == c and not (c == '"' and before == "\\"):
            quote = ""
        match = _ENV.match(line, at) if c == "$" else None
        if match is not None:
            yield match, quote
            at = match.end()
        else:
            at += 1


def _env_text(name: str, quote: str, number: int, env: Mapping[str, str], report: Report) -> str:
    if name not in env and quote:
        return f"${{env.{name}}}"  # may still be in a comment of a command; told where it is used, if it is
    value = _env_value(name, env, report, number)
    if value is None:
        return "unset"
    if quote == '"':
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    elif quote == "'":
        value = value.replace("'", "''")
    return value.replace("${", "$${")


def _env_value(name: str, env: Mapping[str, str], report: Report, number: int) -> str | None:
    value = env.get(name)
    if value is None:
        report.add((), f"${{env.{name}}} is used, but the environment has no {name}. Set it, or remove the macro.", number)
        return None
    if looks_secret(name) or secrets.is_told(value):
        for part in secrets.parts(value):
            report.hide(part)
    if any(c in value for c in "\n\r\0"):
        report.add((), f"the environment variable {name} holds a line end or NUL, which ${{env.{name}}} cannot carry.", number)
        return None
    return value


# ------------------------------------------------------------------------------------------------------ macros, typed


def declared(raw: object, path: Path, report: Report) -> dict[str, Scalar]:
    """The macros of one `macros:` block that can be used; the others are reported."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        report.add(path, "is not a mapping. Write one `name: value` a line.")
        return {}
    out: dict[str, Scalar] = {}
    for name, value in raw.items():
        if message := _declaration_error(name, value):
            report.add((*path, name), message)
        else:
            out[name] = value
    return out


def _declaration_error(name: str, value: object) -> str:
    if name in RESERVED:
        return f"{name} is greenroom's own macro. Choose another name."
    if not _NAME.fullmatch(name):
        return f"{quoted(name)} is not a macro name. Use letters, digits, _ and - only."
    if len(name) > NAME_CHARS_MAX:
        return f"a macro name has at most {NAME_CHARS_MAX} characters; this one has {len(name)}."
    if not isinstance(value, (str, int, float, bool)):
        return "a macro holds one text, number, true or false. Write a single value."
    return ""


@dataclass(slots=True)
class Scope:
    """The macros one part of the file sees, resolved on demand."""

    macros: Mapping[str, Scalar]
    env: Mapping[str, str] = field(default_factory=dict)
    model_id: str | None = None
    _done: dict[tuple[str, bool, frozenset[str]], Scalar] = field(default_factory=dict)

    def expand(self, value: Any, keep: frozenset[str] = frozenset()) -> Any:
        """One scalar with its macros filled in; `keep` names those that stay as they are.  MacroError."""
        if not isinstance(value, str) or "${" not in value:
            return value
        return self._expand(value, keep, (), as_command=False)

    def expand_command(self, text: str, keep: frozenset[str]) -> str:
        """The same for the text of a command: macros bring their lines as written, unfolded."""
        return _as_text(self._expand(text, keep, (), as_command=True))

    def cycles(self) -> Iterator[tuple[str, str]]:
        """(macro, chain) for every circle, told at its first macro."""
        told: set[str] = set()
        for name in self.macros:
            chain = self._chain(name) if name not in told else ()
            told.update(chain)
            if chain:
                yield name, " → ".join(chain)

    def _chain(self, start: str) -> tuple[str, ...]:
        trail: list[tuple[str, tuple[str, ...]]] = [(start, (start,))]
        seen = {start}
        while trail:
            name, chain = trail.pop()
            for used in _names(self.macros.get(name)):
                if used == start:
                    return (*chain, start)
                if used not in seen:
                    seen.add(used)
                    trail.append((used, (*chain, used)))
        return ()

    def _expand(self, text: str, keep: frozenset[str], chain: tuple[str, ...], as_command: bool) -> Scalar:
        whole = _USE.fullmatch(text)
        if whole is not None and not whole.group(1) and whole.group(2) not in keep:
            return self._value(whole.group(2), keep, chain, as_command)
        out, last, size = [], 0, 0
        for match in _USE.finditer(text):
            out.append(text[last : match.start()])
            last = match.end()
            out.append(self._piece(match, keep, chain, as_command))
            size += len(out[-1])
            if size > EXPANDED_CHARS_MAX:
                raise MacroError(f"grows beyond {EXPANDED_CHARS_MAX:,} characters when its macros are filled in. Make them smaller.")
        return "".join([*out, text[last:]])

    def _piece(self, match: re.Match[str], keep: frozenset[str], chain: tuple[str, ...], as_command: bool) -> str:
        escaped, name = match.groups()
        if escaped and name in keep:
            raise MacroError(f"$${{{name}}} cannot be kept as text here, because ${{{name}}} is filled in later. Reword it.")
        if escaped:
            return f"${{{name}}}"
        if name in keep:
            return f"${{{name}}}"
        return _as_text(self._value(name, keep, chain, as_command))

    def _value(self, name: str, keep: frozenset[str], chain: tuple[str, ...], as_command: bool) -> Scalar:
        if name == "MODEL_ID" and self.model_id is not None:
            return self.model_id
        if name.startswith("env.") and name[4:] in self.env:
            return self.env[name[4:]]
        if name not in self.macros:
            raise MacroError(self._unknown(name, chain))
        if name in chain or len(chain) > DEPTH_MAX:
            raise MacroError(f"its macros need each other: {' → '.join([*chain, name])}. Break the circle.")
        key = (name, as_command, keep)
        if key not in self._done:
            value = self.macros[name]
            if isinstance(value, Text) and as_command:
                value = value.lines
            self._done[key] = self._expand(value, keep, (*chain, name), as_command) if isinstance(value, str) else value
        return self._done[key]

    def _unknown(self, name: str, chain: tuple[str, ...]) -> str:
        via = f" (through ${{{chain[-1]}}})" if chain else ""
        if name.startswith("env."):
            return f"${{{name}}} is used, but the environment has no {name[4:]}. Set it, or remove the macro."
        if name == "PORT":
            return f"${{PORT}}{via} is known only when the engine starts. It can stand in cmd, cmdStop, proxy, env and container."
        if name == "PID":
            return f"${{PID}}{via} is known only when the engine is stopped. It can stand in cmdStop alone."
        if name == "MODEL_ID":
            return f"${{MODEL_ID}}{via} means something only inside a model."
        if name in ("MODEL_PATH", "MODEL_DIR"):
            told = "is known only of a model from the store. Add model: oci://… beside cmd; it can stand in cmd, env and container."
            return f"${{{name}}}{via} {told}"
        hint = did_you_mean(name, self.macros) if self.macros else ""
        return f"${{{name}}}{via} is not a macro.{hint} Declare it under macros, or write $${{{name}}} for the text itself."


def _names(value: object) -> list[str]:
    if not isinstance(value, str):
        return []
    return [name for escaped, name in _USE.findall(value) if not escaped]


def _as_text(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(getattr(value, "text", value))
