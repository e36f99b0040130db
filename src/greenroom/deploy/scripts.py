"""What is another thing inside a container: the program, and addresses that nobody else reaches there.  Pure functions of words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from greenroom.engines.discovery import IMAGE_PROGRAM, PROGRAM
from greenroom.engines.exposure import is_loopback
from greenroom.engines.generic import Generic

_LOOPBACK = r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\]|::1)"
_ADDRESS = re.compile(rf"(?:[A-Za-z][A-Za-z0-9+.-]*://)?{_LOOPBACK}(?::\d+)?(?:/[^\s?#]*)?")
_END = r"(?![\w.:\]])"


def program(engine: Generic, image: str) -> str:
    """What starts an engine that is known in its image."""
    if engine.kind == "llama_server":
        return IMAGE_PROGRAM if "llama.cpp" in image else PROGRAM
    return os.path.basename(engine.command.argv[0])


def inside(text: str, engine: Generic, image: str) -> str:
    """A script for a shell, with the program of the image and open to others: only what is written out in it can be changed."""
    return opened(with_program(text, engine, image), engine)


def opened(text: str, engine: Generic) -> str:
    """Loopback after the flag or variable that says where the engine listens, and everywhere instead."""
    names = [rf"{re.escape(name)}(?:=|\s+)" for name in engine.host_flags] + [rf"{re.escape(name)}=" for name in engine.host_variables]
    if not names:
        return text
    said = re.compile(rf"(?<![\w-])(?P<name>{'|'.join(names)})(?P<quote>[\"']?)(?P<host>{_LOOPBACK})(?P=quote){_END}")
    return said.sub(lambda match: f"{match['name']}{match['quote']}{everywhere(match['host'])}{match['quote']}", text)


def opened_variables(env: Mapping[str, str], engine: Generic) -> dict[str, str]:
    """The same for what stands in its environment."""
    return {name: everywhere(value) if name in engine.host_variables and is_loopback(value) else value for name, value in env.items()}


def everywhere(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"


def closed(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Words and variables that name loopback: inside, that is the container itself."""
    words = [(word, word.rpartition("=")[2]) for text in argv for word in _words(text)]
    words += [(f"{name}={value}", value) for name, value in env.items()]
    return tuple(dict.fromkeys(word for word, value in words if _ADDRESS.fullmatch(value)))


def hidden_host(engine: Generic) -> str:
    """The flag that a script lacks, whose engine listens on loopback without it; "" = it says where, or need not."""
    if engine.public_by_default or not engine.host_flags or engine.flags.has(*engine.host_flags):
        return ""
    host = next((value for name in engine.host_variables if (value := engine.given(name))), "")
    return "" if host and not is_loopback(host) else engine.host_flags[0]


def with_program(text: str, engine: Generic, image: str = "") -> str:
    """A script with the program as it is called inside."""
    if engine.kind == "generic":
        return text
    own = engine.command.argv[0]
    if engine.command.python:  # `own` is a module
        interpreter = rf"(?<![\w./$-])[\w./~-]*?\b(?:python|pypy)[\d.]*(?=\s[^;&|\n]*?{re.escape(own)}(?![\w./-]))"
        return re.sub(interpreter, "python3", text)
    return re.sub(rf"(?<![\w./$-]){re.escape(own)}(?![\w./-])", lambda _: program(engine, image), text)


def _words(text: str) -> Iterator[str]:
    """The word, or those of a script."""
    if not any(char.isspace() for char in text):
        yield text
        return
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        yield from list(lexer)
    except ValueError:
        yield from text.split()
