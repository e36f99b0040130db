"""Who can reach an engine, and what is handed into its container: read from words of a command."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def published(words: Sequence[str]) -> str:
    """The container arguments that let others than this machine in; "" when none does."""
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name in ("--network", "--net") and value == "host":
            return f"{name} host"
        if name in ("-P", "--publish-all"):
            return name
        if name in ("-p", "--publish") and not value.startswith(("127.", "[::1]:", "localhost:")):
            return f"{name} {value}"
    return ""


def volumes(words: Sequence[str]) -> tuple[str, ...]:
    """The mounts among container arguments, as `host:container[:options]`."""
    found = []
    for option, word in zip(("", *words), words, strict=False):
        if word.startswith("--volume="):
            found.append(word.removeprefix("--volume="))
        elif option in ("-v", "--volume"):
            found.append(word)
    return tuple(found)


def handed_in(words: Sequence[str], variable: str, env: Mapping[str, str]) -> str | None:
    """A variable among container arguments (`-e NAME=VALUE`, or `-e NAME` taken from `env`); None = not handed in."""
    found = None
    for option, word in zip(("", *words), words, strict=False):
        if option not in ("-e", "--env") and not word.startswith("--env="):
            continue
        name, equals, value = word.removeprefix("--env=").partition("=")
        if name == variable:
            found = value if equals else env.get(variable)
    return found
