"""Read units back as systemd and podman do: sections, words, specifiers, the arguments of `podman run`."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.validators import tool

_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"', "'": "'", "s": " "}
_BLANKS = " \t\n\r"
_FLAGS = frozenset({"--replace", "--rm", "-d", "--init", "--read-only", "--read-only-tmpfs"})

Unit = list[tuple[str, str, str]]  # section, key, value


def parse(text: str) -> Unit:
    """All keys of a unit, in order; AssertionError for a line that is none."""
    out: Unit = []
    section = ""
    for line in text.split("\n"):  # as systemd does: other line ends of Unicode are plain characters to it
        if not line.strip() or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, equals, value = line.partition("=")
        assert equals, f"not a key: {line!r}"
        assert re.fullmatch(r"[A-Za-z]+", key), f"not a key: {line!r}"
        out.append((section, key, value))
    return out


def values(unit: Unit, section: str, key: str) -> list[str]:
    return [value for found, name, value in unit if (found, name) == (section, key)]


def value(unit: Unit, section: str, key: str) -> str:
    (only,) = values(unit, section, key)
    return only


def words(text: str, specifiers: Mapping[str, str] | None = None) -> list[str]:
    """A command line as systemd runs it: unquoted, unescaped, specifiers filled in, `$$` one dollar."""
    out: list[str] = []
    at = 0
    while at < len(text):
        if text[at] in _BLANKS:
            at += 1
            continue
        word, quote = "", ""
        while at < len(text) and (quote or text[at] not in _BLANKS):
            char = text[at]
            if char == "\\":
                piece, at = _escape(text, at + 1)
                word += piece
                continue
            if quote and char == quote:
                quote = ""
            elif not quote and char in "\"'":
                quote = char
            else:
                word += char
            at += 1
        assert not quote, f"unbalanced quotes: {text!r}"
        out.append(_filled(word, specifiers or {}))
    return out


def _escape(text: str, at: int) -> tuple[str, int]:
    char = text[at]
    for letter, digits in (("x", 2), ("u", 4), ("U", 8)):
        if char == letter:
            return chr(int(text[at + 1 : at + 1 + digits], 16)), at + 1 + digits
    if char in "01234567":
        return chr(int(text[at : at + 3], 8)), at + 3
    assert char in _ESCAPES, f"systemd knows no escape \\{char}"
    return _ESCAPES[char], at + 1


def _filled(word: str, specifiers: Mapping[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        return specifiers.get(match[0], match[0])

    word = re.sub(r"%.", one, word)
    assert not re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)[A-Za-z_{]", word), f"systemd would fill in a variable: {word!r}"
    return word.replace("$$", "$")


@dataclass(frozen=True)
class Run:
    """What `podman run` was told."""

    options: tuple[tuple[str, str], ...]
    image: str
    command: tuple[str, ...]  # entry point and arguments

    def all(self, name: str) -> list[str]:
        return [text for option, text in self.options if option == name]

    def one(self, name: str) -> str:
        (only,) = self.all(name)
        return only

    @property
    def env(self) -> dict[str, str]:
        return dict(pair.partition("=")[::2] for pair in self.all("--env"))

    @property
    def mounts(self) -> dict[str, dict[str, str]]:
        """Target -> what is mounted there."""
        found = {}
        for text in self.all("--mount"):
            pairs = dict(field.partition("=")[::2] for field in next(csv.reader([text])))
            found[pairs["destination"]] = pairs
        for text in self.all("-v"):
            source, target, *options = text.split(":")
            found[target] = {"type": "volume", "source": source, "ro": "true" if "ro" in options else "false"}
        return found


def podman_run(argv: Sequence[str]) -> Run:
    assert argv[1] == "run", argv
    options: list[tuple[str, str]] = []
    at = 2
    while argv[at].startswith("-"):
        name, equals, text = argv[at].partition("=")
        if equals or name in _FLAGS:
            options.append((name, text))
            at += 1
        else:
            options.append((name, argv[at + 1]))
            at += 2
    entry = [text for name, text in options if name == "--entrypoint"]
    return Run(tuple(options), argv[at], (*entry, *argv[at + 1 :]))


def quadlet(folder: Path, *, user: bool = True) -> dict[str, str]:
    """Service -> text, by the real quadlet; every complaint is a failure."""
    program = tool("quadlet")
    done = subprocess.run(
        [program, "-dryrun", "-no-kmsg-log", *(["-user"] if user else [])],
        env={**os.environ, "QUADLET_UNIT_DIRS": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if "Loading source unit file" not in line]
    assert (done.returncode, told) == (0, []), done.stderr
    pieces = re.split(r"^---(\S+)---$", done.stdout, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def verify(folder: Path, *units: str, user: bool = False) -> None:
    """By the real systemd-analyze, which exits 0 whatever it finds: anything it says is a failure."""
    program = tool("systemd-analyze")
    done = subprocess.run(
        [program, "verify", "--man=no", *(["--user"] if user else []), *(str(folder / unit) for unit in units)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:", "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
