"""Read what a command line says: `--flag value`, `--flag=value`, short forms; the last one wins; else the environment."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UNWRAP_DEPTH_MAX = 8

OFF = frozenset({"0", "off", "false", "no", "disabled"})
SIZE = re.compile(r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kKmMgGtT]?)(?P<binary>i?)[bB]?\s*$")
# vLLM's reading: a small letter is a power of 1000, a capital or an `i` a power of 1024.
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Flags:
    """The arguments of one engine and the environment it will see (the operator's part of it)."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    underscores: bool = False  # `--max_num_seqs` is `--max-num-seqs` (argparse based engines)

    def value(self, *names: str, env: str = "") -> str | None:
        """The last value of a flag under any of its names, else of the environment variable `env`, else None."""
        found: str | None = None
        for index, item in enumerate(self.argv):
            name, equals, rest = item.partition("=")
            if self._same(name) not in names:
                continue
            if equals:
                found = rest
            elif index + 1 < len(self.argv):
                found = self.argv[index + 1]
        if found is None and env:
            return self.env.get(env) or None
        return found

    def has(self, *names: str, env: str = "") -> bool:
        """Whether a switch is given (whatever follows it), or its environment variable says yes."""
        if any(self._same(item.partition("=")[0]) in names for item in self.argv):
            return True
        return bool(env) and env in self.env and self.env[env].strip().lower() not in OFF | {""}

    def under(self, *names: str) -> tuple[str, ...]:
        """All values of flags and of their parts (`--config.part value`)."""
        found = []
        for item, following in zip(self.argv, (*self.argv[1:], ""), strict=False):
            name, equals, rest = item.partition("=")
            if self._same(name).partition(".")[0] in names:
                found.append(rest if equals else following)
        return tuple(found)

    def last(self, on: str, off: str) -> bool | None:
        """Which of a pair of switches has the last word; None when neither is given."""
        given = [name for item in self.argv if (name := self._same(item.partition("=")[0])) in (on, off)]
        return given[-1] == on if given else None

    def integer(self, *names: str, env: str = "") -> int | None:
        """Like value(), as a whole number (`2048`, `1k`); None when it is not one."""
        text = self.value(*names, env=env)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            return size_bytes(text)

    def number(self, *names: str, env: str = "") -> float | None:
        """Like value(), as a float; None when it is not one."""
        text = self.value(*names, env=env)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None

    def _same(self, name: str) -> str:
        return "--" + name[2:].replace("_", "-") if self.underscores and name.startswith("--") else name


def size_bytes(text: str) -> int | None:
    """`4096`, `25.6k`, `4G`, `4GiB` -> bytes; None when it is none of them."""
    match = SIZE.match(text)
    if match is None:
        return None
    unit = match["unit"]
    base = 1024 if unit.isupper() or match["binary"] else 1000
    return int(float(match["number"]) * base ** POWERS[unit.lower()])


# ------------------------------------------------------------------------------------------------- what wraps a command


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A command without what stands in front of the engine."""

    argv: tuple[str, ...]  # program and arguments of the engine itself
    env: Mapping[str, str]  # variables set on the way (`env A=1 ...`)
    shell: bool = False  # inside `sh -c`: arguments cannot be appended
    client: bool = False  # inside `docker run` and the like: the engine is not our child, its paths are not ours
    python: bool = False  # run by an interpreter: argv[0] is a module or a script


# wrapper -> its options that take a value as the next argument; then how many plain arguments come before the command
WRAPPERS: Mapping[str, tuple[frozenset[str], int]] = {
    "env": (frozenset({"-u", "--unset", "-C", "--chdir"}), 0),
    "nice": (frozenset({"-n", "--adjustment"}), 0),
    "ionice": (frozenset({"-c", "--class", "-n", "--classdata"}), 0),
    "taskset": (frozenset(), 1),
    "chrt": (frozenset(), 1),
    "numactl": (frozenset({"-N", "-m", "-C", "-i", "-p"}), 0),
    "nohup": (frozenset(), 0),
    "setsid": (frozenset(), 0),
    "stdbuf": (frozenset({"-i", "-o", "-e"}), 0),
    "timeout": (frozenset({"-k", "-s", "--kill-after", "--signal"}), 1),
    "time": (frozenset({"-f", "-o"}), 0),
    "prlimit": (frozenset(), 0),
    "systemd-inhibit": (frozenset(), 0),
    "exec": (frozenset({"-a"}), 0),
    "sudo": (frozenset({"-u", "-g"}), 0),
    "uvx": (frozenset({"--from", "--with", "-p", "--python"}), 0),
    "pipx": (frozenset({"--spec"}), 1),
}
RUNNERS = frozenset({"uv", "poetry", "pixi", "conda", "mamba", "micromamba", "hatch"})  # `uv run COMMAND`
RUNNER_OPTIONS = frozenset({"-n", "--name", "-p", "--prefix", "--with", "--python", "--project", "--directory", "-e", "--environment"})
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
CONTAINER_CLIENTS = frozenset({"docker", "podman", "nerdctl"})
ENGINE_IMAGES = re.compile(r"(vllm-openai|vllm-cpu|/vllm|llama\.cpp|llama-cpp|sglang|text-embeddings-inference)")
ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
PYTHON = re.compile(r"^(python|python\d+(\.\d+)?|pypy\d*)$")


def basename(program: str) -> str:
    """The program's name without folder and `.exe`."""
    return os.path.basename(program.replace("\\", "/")).removesuffix(".exe")


def unwrap(argv: Sequence[str]) -> Unwrapped:
    """Find the engine behind `env`, `nice`, `taskset`, `sh -c`, `uv run`, `python -m` and the like, as well as can be told."""
    env: dict[str, str] = {}
    shell = client = python = False
    rest = list(argv)
    for _ in range(UNWRAP_DEPTH_MAX):
        rest = _assignments(rest, env)
        if not rest:
            break
        name = basename(rest[0])
        if name in WRAPPERS:
            inner = _behind_options(rest[1:], *WRAPPERS[name], env)
        elif name in RUNNERS and "run" in rest[1:2]:
            inner = _behind_options(rest[2:], RUNNER_OPTIONS, 0, env)
        elif name in SHELLS and (script := _shell_script(rest)) is not None:
            inner, shell = script, True
        elif PYTHON.match(name):
            inner, python = _python(rest[1:]), True
        elif name in CONTAINER_CLIENTS and "run" in rest:
            inner, client = _behind_image(rest), True
        else:
            break
        if not inner:
            break
        rest = inner
        if python or client:
            break
    return Unwrapped(tuple(rest), env, shell, client, python)


def _assignments(words: list[str], env: dict[str, str]) -> list[str]:
    for index, word in enumerate(words):
        match = ASSIGNMENT.match(word)
        if match is None:
            return words[index:]
        env[match[1]] = match[2]
    return []


def _behind_options(words: list[str], with_value: frozenset[str], plain: int, env: dict[str, str]) -> list[str]:
    index = 0
    while index < len(words) and words[index].startswith("-"):
        if words[index] == "--":
            index += 1
            break
        index += 2 if words[index] in with_value else 1
    words = _assignments(words[index:], env)
    return words[plain:]


def _shell_script(words: list[str]) -> list[str] | None:
    """The first command of `sh -c SCRIPT` that is not a builtin like `cd`; None when it runs a script file."""
    for index, word in enumerate(words[1:], start=1):
        if word.startswith("-") and "c" in word.lstrip("-") and not word.startswith("--"):
            if index + 1 >= len(words):
                return None
            handed_on = words[index + 3 :]  # the word between is $0
            return [part for item in _first_command(words[index + 1]) for part in (handed_on if item == "$@" else (item,))]
        if not word.startswith("-"):
            return None
    return None


SHELL_BUILTINS = frozenset({"cd", "export", "set", "ulimit", "source", ".", "trap", "umask", "echo", "sleep", "mkdir", "unset"})


def _first_command(script: str) -> list[str]:
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace_split = True
    lexer.whitespace = " \t\r"
    try:
        words = list(lexer)
    except ValueError:
        return []
    command: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set(";&|()<>\n"):
            plain = [item for item in command if not ASSIGNMENT.match(item)]
            if plain and plain[0] not in SHELL_BUILTINS:
                return command
            command = []
        else:
            command.append(word)
    return []


def _python(words: list[str]) -> list[str]:
    index = 0
    while index < len(words) and words[index].startswith("-"):
        if words[index] == "-m":
            return words[index + 1 :]
        index += 2 if words[index] in ("-X", "-W") else 1
    return words[index:]


def _behind_image(words: list[str]) -> list[str]:
    """`docker run ... IMAGE args`: the image stands for the engine when its name tells which one it holds."""
    start = words.index("run") + 1
    for index in range(start, len(words)):
        if not words[index].startswith("-") and "=" not in words[index] and ENGINE_IMAGES.search(words[index]):
            return words[index:]
    return []
