"""Which words of a command and which variables hold secrets: one rule for warnings, messages, logs, status and what is written.

Narrow on purpose: a word that is no secret and is masked anyhow would blot half of every log.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator

_NAMED = r"(?:(?:api|admin|master)[-_]?key|(?:(?:hf|auth|access|api|hf[-_]api)[-_]?)?token|hft|password|passwd|secret)"
FLAG = re.compile(rf"--?{_NAMED}(?P<value>=.*)?", re.IGNORECASE | re.DOTALL)
"""A flag whose value is a secret, with or without `=VALUE`."""

_KEYS = r"(?:KEY|(?<!(?:BOS|CLS|EOS|MAX|PAD|SEP|UNK)[_-])(?<!(?:MASK|STOP)[_-])TOKEN)"  # not those of a tokenizer
NAME = re.compile(rf"(?:{_KEYS}|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?$", re.IGNORECASE)
"""The name of a variable that holds one (to be searched for)."""

KEYS = re.compile(rf"{_KEYS}S?$", re.IGNORECASE)
"""The name of one that may hold several, between commas (to be searched for)."""

_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#:@\"']*:(?P<secret>[^\s/?#\"']+)@")
_HEADER = re.compile(
    r"(?<![\w-])(?:(?:proxy-|x-)?authorization|(?:x-[a-z0-9-]*)?api[-_]?key|x-[a-z0-9-]*(?:key|token|secret))[\"']?\s*[:=]\s*[\"']?"
    r"(?:(?:basic|bearer|digest|negotiate|token)(?:\s|%20)+)?(?P<secret>[^\s\"',;]+)",
    re.IGNORECASE,
)
_QUERY = re.compile(rf"[?&]{_NAMED}=(?P<secret>[^\s&#\"']+)", re.IGNORECASE)
_TOLD = (_URL, _QUERY, _HEADER)
_LEAD = re.compile(r"(?:--?[A-Za-z][\w.-]*=)?(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)=)?(?P<value>.*)", re.DOTALL)
_SHORT = re.compile(r"-e(?=[A-Za-z_][A-Za-z0-9_]*=)")  # docker's -eNAME=VALUE
_SCRIPT_FLAG = re.compile(r"-[a-z]*c")
_VARIABLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|[@*0-9]|\{(?P<braced>[A-Za-z_]\w*)(?::?\?[^{}]*)?\}|\(.*)?|`.*", re.DOTALL)


def in_variable(name: str, value: str) -> bool:
    """Whether a variable holds one: by its name, or by what it says."""
    return bool(value) and (NAME.search(name) is not None or is_told(value) or bool(_of_line(value)))


def is_told(text: str) -> bool:
    """Whether a text says one itself: a URL with a password or a token, or a header that lets in."""
    return any(True for _ in _inside(text))


def parts(value: str) -> tuple[str, ...]:
    """A secret, and what of it somebody would say alone: the password of its URL, what its header lets in by, the value of its flag."""
    return tuple(dict.fromkeys((value, *_inside(value), *_of_line(value))))


def masked(text: str) -> str:
    """A text without what it says itself."""
    for pattern in _TOLD:
        text = pattern.sub(lambda match: match[0].replace(match["secret"], "***"), text)
    return text


def in_arguments(words: Iterable[str]) -> list[str]:
    """The secrets among the words of a command, each with what stands around it in its word.

    After such a flag, given to such a variable, in a URL with a password or an Authorization header; also inside `sh -c "..."`.
    """
    return _found(words, in_shell=False)


def in_script(text: str) -> list[str]:
    """The same for what a shell reads, where a variable that is named is none."""
    return _found(_words(text), in_shell=True)


def variable(word: str) -> str | None:
    """The variable that a shell puts here, and nothing else; "" for what a command prints, even in part; None for any other text."""
    match = _VARIABLE.fullmatch(word)
    return None if match is None else match["bare"] or match["braced"] or ""


def _of_line(text: str) -> list[str]:
    """Those of a text that will be words of a command."""
    return _found((text,), in_shell=True)


def _found(words: Iterable[str], *, in_shell: bool) -> list[str]:
    found: list[str] = []
    before = ""
    for word in words:
        found += _of_word(before, word, in_shell)
        before = word
    return [value for value in found if not in_shell or variable(value) is None]


def _of_word(before: str, word: str, in_shell: bool) -> list[str]:
    flag, flag_before = FLAG.fullmatch(word), FLAG.fullmatch(before)
    if flag_before is not None and flag_before["value"] is None:
        return [word]
    if flag is not None:
        return [flag["value"][1:]] if flag["value"] and len(flag["value"]) > 1 else []
    lead = _LEAD.fullmatch(_SHORT.sub("", word))
    assert lead is not None  # whatever the text is
    name, value = lead["name"], lead["value"]
    is_script = not in_shell and _has_space(word) and _SCRIPT_FLAG.fullmatch(before) is not None
    if not is_script and value:
        if name is not None and NAME.search(name):
            return [value]
        if (name is not None or _is_one(value)) and any(True for _ in _inside(value, in_shell)):
            return [value]
    return in_script(word) if _has_space(word) else []


def _is_one(text: str) -> bool:
    """One value, not a line of several: without a space, a header alone, or JSON."""
    if not _has_space(text) or _HEADER.match(text):
        return True
    try:
        return text[:1] in "{[" and bool(json.loads(text))
    except ValueError:
        return False


def _has_space(text: str) -> bool:
    return any(char.isspace() for char in text)


def _inside(text: str, in_shell: bool = False) -> Iterator[str]:
    for pattern in _TOLD:
        yield from (match["secret"] for match in pattern.finditer(text) if not in_shell or variable(match["secret"]) is None)


def _words(script: str) -> list[str]:
    """What a shell would make of it, roughly; never the script itself again."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:
        words = script.split()
    return [word for word in words if word != script]
