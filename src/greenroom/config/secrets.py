"""Which words of a command and which variables hold secrets: one rule for warnings, messages, logs and status.

Narrow on purpose: a word that is no secret and is masked anyhow would blot half of every log.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

FLAG = re.compile(
    r"--?(?:(?:api|admin|master)[-_]?key|(?:(?:hf|auth|access|api|hf[-_]api)[-_]?)?token|hft|password|passwd|secret)(?P<value>=.*)?",
    re.IGNORECASE | re.DOTALL,
)
"""A flag whose value is a secret, with or without `=VALUE`."""

NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?$", re.IGNORECASE)
"""The name of a variable that holds one (to be searched for)."""

_ASSIGNMENT = re.compile(r"(?:--?[A-Za-z-]+=)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.+)", re.DOTALL)


def in_arguments(words: Iterable[str]) -> list[str]:
    """The secrets among the words of a command: after such a flag, or given to such a variable, also inside `sh -c "..."`."""
    found: list[str] = []
    is_next = False
    for word in words:
        if is_next:
            found.append(word)
        flag = FLAG.fullmatch(word)
        is_next = flag is not None and flag["value"] is None
        if flag is not None and flag["value"]:
            found.append(flag["value"][1:])
        assignment = _ASSIGNMENT.fullmatch(word)
        if flag is None and assignment is not None and NAME.search(assignment["name"]):
            found.append(assignment["value"])
        if any(char.isspace() for char in word):
            found += in_arguments(_words(word))
    return found


def _words(script: str) -> list[str]:
    """What a shell would make of it, roughly; never the script itself again."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:
        words = script.split()
    return [word for word in words if word != script]
