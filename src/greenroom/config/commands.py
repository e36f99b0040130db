"""Splitting a command written as text into its arguments: shell quoting and comments, but no shell.

Nothing is ever expanded or executed: `$(id)`, `;`, `|` and `*` arrive as they are.  Compared with a POSIX
shell a backslash before a letter, a digit, `.`, `_` or `-` stays (so `C:\\models\\x.gguf` survives), a line
end separates words with or without a backslash before it, and `#` at the start of a word begins a
comment that ends with its line, even inside a folded block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

COMMAND_CHARS_MAX = 128 * 1024  # the kernel takes no single argument beyond this either
_BLANKS = " \t\r"
_IN_DOUBLE = '"\\$`'


class CommandError(ValueError):
    """A command that cannot be split; `line_offset` counts lines from its first one."""

    def __init__(self, message: str, line_offset: int) -> None:
        super().__init__(message)
        self.line_offset = line_offset


@dataclass(slots=True)
class _Scan:
    """Words found so far, and the comments left out, as spans of the text."""

    text: str
    at: int = 0
    words: list[str] = field(default_factory=list)
    comments: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> None:
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n" or c in _BLANKS:
                self.at += 1
            elif c == "#":
                self._comment()
            elif end := self._continuation():
                self.at = end
            else:
                self.words.append(self._word())

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        self.comments.append((self.at, end))
        self.at = end

    def _continuation(self) -> int:
        """Where the next line starts when a backslash ends this one, else 0."""
        if self.text[self.at] != "\\":
            return 0
        end = self.at + 1
        while end < len(self.text) and self.text[end] in _BLANKS:
            end += 1
        is_last = end == len(self.text)
        return end if is_last else (end + 1 if self.text[end] == "\n" else 0)

    def _word(self) -> str:
        out: list[str] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n" or c in _BLANKS or self._continuation():
                break
            if c == "'":
                out.append(self._single())
            elif c == '"':
                out.append(self._double())
            elif c == "\\":
                following = self.text[self.at + 1]
                out.append("\\" + following if following.isalnum() or following in "._-" else following)
                self.at += 2
            else:
                out.append(c)
                self.at += 1
        return "".join(out)

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self._unbalanced("'")
        start, self.at = self.at + 1, end + 1
        return self.text[start:end]

    def _double(self) -> str:
        opened = self.at
        out: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == '"':
                self.at += 1
                return "".join(out)
            if c == "\\" and self.text[self.at + 1 : self.at + 2] in tuple(_IN_DOUBLE):
                out.append(self.text[self.at + 1])
                self.at += 2
            elif c == "\\" and self.text[self.at + 1 : self.at + 2] == "\n":
                self.at += 2
            else:
                out.append(c)
                self.at += 1
        self.at = opened
        raise self._unbalanced('"')

    def _unbalanced(self, quote: str) -> CommandError:
        flag = re.findall(r"(?:^|\s)(--?[A-Za-z][\w-]*)", self.text[: self.at])  # never the quoted text: it may be a secret
        after = f" after {flag[-1][:40]}" if flag else ""
        message = f"the quote {quote}{after} is never closed. Close it, or put a backslash before it to mean the character."
        return CommandError(message, self.text.count("\n", 0, self.at))


def split(text: str) -> tuple[str, ...]:
    """The arguments of a command; CommandError for an unbalanced quote or one beyond COMMAND_CHARS_MAX."""
    if len(text) > COMMAND_CHARS_MAX:
        raise CommandError(f"the command has {len(text):,} characters; at most {COMMAND_CHARS_MAX:,} are taken.", 0)
    scan = _Scan(text)
    scan.run()
    return tuple(scan.words)


def without_comments(text: str) -> str:
    """The same text, line for line, with every comment emptied to its `#`; CommandError like `split`."""
    scan = _Scan(text)
    scan.run()
    out, last = [], 0
    for start, end in scan.comments:
        out.append(text[last : start + 1])
        last = end
    return "".join([*out, text[last:]])
