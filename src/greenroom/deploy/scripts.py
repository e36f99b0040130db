"""What is another thing inside a container: the program, and addresses that nobody else reaches there.  Pure functions of words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from greenroom.engines.discovery import IMAGE_PROGRAM, PROGRAM
from greenroom.engines.exposure import is_loopback
from greenroom.engines.flags import basename, unwrap
from greenroom.engines.generic import Generic

_LOOPBACK = r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\]|::1)"
_ADDRESS = re.compile(rf"(?:[A-Za-z][A-Za-z0-9+.-]*://)?{_LOOPBACK}(?::\d+)?(?:/[^\s?#]*)?")
_END = r"(?![\w.:\]])"
_TOKEN = re.compile(r"(?P<into>\d*[<>]+&?)|(?P<end>[;&|()\n]+)|(?:[^\s;&|()<>\"'\\]|\\.|\"(?:[^\"\\]|\\.)*\"|'[^']*')+", re.DOTALL)
_QUOTES = ("'", '"')
_KEYWORDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "{", "!"})


def program(engine: Generic, image: str) -> str:
    """What starts an engine that is known in its image."""
    if engine.kind == "llama_server":
        return IMAGE_PROGRAM if "llama.cpp" in image else PROGRAM
    return os.path.basename(engine.command.argv[0])


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
    said = [(word, word.rpartition("=")[2]) for word in words(argv)]
    said += [(f"{name}={value}", value) for name, value in env.items()]
    return tuple(dict.fromkeys(word for word, value in said if _ADDRESS.fullmatch(value)))


def hidden_host(engine: Generic) -> str:
    """The flag that a script lacks, whose engine listens on loopback without it; "" = it says where, or need not."""
    if engine.public_by_default or not engine.host_flags or engine.flags.has(*engine.host_flags):
        return ""
    host = next((value for name in engine.host_variables if (value := engine.given(name))), "")
    return "" if host and not is_loopback(host) else engine.host_flags[0]


def with_program(argv: Sequence[str], engine: Generic, image: str = "") -> tuple[str, ...]:
    """A command that runs a script, with the program as it is called inside."""
    if engine.kind == "generic":
        return tuple(argv)
    if engine.command.python:
        return tuple(_with_interpreter(word, engine.command.argv[0]) for word in argv)
    called = program(engine, image)
    out = [_renamed(word, engine, called) if _has_space(word) else word for word in argv]
    own = engine.command.argv[0]
    if own in out and out == list(argv):  # the script is its name alone, or starts the words behind it
        first = out.index(own)
        out[first : first + own_words(engine)] = [called]
    return tuple(out)


def own_words(engine: Generic) -> int:
    """How many words name the program: `llama serve` is llama-server."""
    argv = engine.command.argv
    return 2 if engine.kind == "llama_server" and basename(argv[0]) == "llama" and argv[1:2] == ("serve",) else 1


def _with_interpreter(text: str, module: str) -> str:
    interpreter = rf"(?<![\w./$-])[\w./~-]*?\b(?:python|pypy)[\d.]*(?=\s[^;&|\n]*?{re.escape(module)}(?![\w./-]))"
    return re.sub(interpreter, "python3", text)


def _renamed(text: str, engine: Generic, called: str) -> str:
    """Where it is the program of a command; as a word of one it means something else."""
    for words in reversed(list(_commands(text))):
        plain = [_unquoted(word[0]) for word in words]
        run = unwrap(plain)
        if run.shell:
            nested = next((word for word in words if word[0][0] in _QUOTES and _has_space(word[0])), None)
            if nested is not None:
                text = f"{text[: nested.start() + 1]}{_renamed(nested[0][1:-1], engine, called)}{text[nested.end() - 1 :]}"
            continue
        count = own_words(engine)
        if run.argv[:count] != engine.command.argv[:count]:
            continue
        first = len(words) - len(run.argv)
        start, end = words[first].start(), words[first + count - 1].end()
        quote = text[start] if text[start] in _QUOTES else ""
        text = f"{text[:start]}{quote}{called}{quote}{text[end:]}"
    return text


def _commands(text: str) -> Iterator[list[re.Match[str]]]:
    """The simple commands of a script: words with their places, without the shell's own and where output goes."""
    words: list[re.Match[str]] = []
    goes_to = False
    for token in _TOKEN.finditer(text):
        if token["end"]:
            yield words
            words = []
        elif not token["into"] and not goes_to and (words or token[0] not in _KEYWORDS):
            words.append(token)
        goes_to = bool(token["into"])
    yield words


def _unquoted(raw: str) -> str:
    try:
        return "".join(shlex.split(raw))
    except ValueError:
        return raw


def _has_space(text: str) -> bool:
    return any(char.isspace() for char in text)


def words(argv: Sequence[str]) -> tuple[str, ...]:
    """All words of a command, those of scripts by themselves."""
    return tuple(word for text in argv for word in _words(text))


def _words(text: str) -> Iterator[str]:
    """The word, or those of a script."""
    if not _has_space(text):
        yield text
        return
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        yield from list(lexer)
    except ValueError:
        yield from text.split()
