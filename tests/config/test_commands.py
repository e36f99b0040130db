"""Splitting commands: quotes, comments, paths, and no shell."""

from __future__ import annotations

import shlex
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config.commands import COMMAND_CHARS_MAX, CommandError, split, without_comments


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("fe --port ${PORT}", ("fe", "--port", "${PORT}")),
        ("fe 'a b' \"c d\" e'f g'h", ("fe", "a b", "c d", "ef gh")),
        ('fe "say \\"hi\\"" \'"\'', ("fe", 'say "hi"', '"')),
        ("fe \\\n  --a 1 \\  \n  --b 2\\\n", ("fe", "--a", "1", "--b", "2")),
        ("fe\n\n   # whole line\n --a 1  # end of line\n\n --b", ("fe", "--a", "1", "--b")),
        ("fe # comment with a quote ' and \\\n --b", ("fe", "--b")),
        ("fe --color=#ff00aa '#x' \"# y\"", ("fe", "--color=#ff00aa", "#x", "# y")),
        ('fe --path "C:\\models\\x y.gguf" C:\\models\\x.gguf', ("fe", "--path", "C:\\models\\x y.gguf", "C:\\models\\x.gguf")),
        ("fe a\\ b \\#c \\'d", ("fe", "a b", "#c", "'d")),
        ("fe $(id) ; rm | cat && * ~ `x` > y", ("fe", "$(id)", ";", "rm", "|", "cat", "&&", "*", "~", "`x`", ">", "y")),
        ("fe \"\" ''", ("fe", "", "")),
        ('fe "a\\nb" "a\\\\b"', ("fe", "a\\nb", "a\\b")),
        ("   \n # only a comment\n", ()),
    ],
)
def test_a_command_is_split_without_a_shell(text: str, argv: tuple[str, ...]) -> None:
    """Quotes, escapes and comments as people expect them; everything else literally."""
    assert split(text) == argv


@pytest.mark.parametrize(("text", "offset"), [('fe "x', 0), ("fe\n --a\n --b 'x\n --c", 2), ("fe it's", 0)])
def test_a_quote_that_is_never_closed_is_told_with_its_line(text: str, offset: int) -> None:
    """The offset counts lines from the first one of the command."""
    with pytest.raises(CommandError, match="is never closed") as caught:
        split(text)
    assert caught.value.line_offset == offset


def test_an_unclosed_quote_does_not_show_what_it_quotes() -> None:
    """It may be a secret; the flag before it says where to look."""
    with pytest.raises(CommandError) as caught:
        split('fe --api-key "sk-very-secret')
    assert "after --api-key is never closed" in str(caught.value)
    assert "sk-very" not in str(caught.value)


def test_comments_can_be_emptied_line_for_line() -> None:
    """What is left has the same lines and the same words."""
    assert without_comments("fe # a\n# b\n --c '# d'\n") == "fe #\n#\n --c '# d'\n"


def test_a_command_has_a_largest_size() -> None:
    """Longer ones are refused, not split."""
    with pytest.raises(CommandError, match="at most"):
        split("x" * (COMMAND_CHARS_MAX + 1))


_WORDS = st.lists(st.text(alphabet=string.printable + "äß€", max_size=12), min_size=1, max_size=8)


@given(_WORDS)
def test_what_a_shell_would_quote_comes_back_as_it_was(words: list[str]) -> None:
    """split undoes shlex.join for any arguments."""
    words = [word.replace("\r", "") for word in words]
    assert split(shlex.join(words)) == tuple(words)


@given(st.text(alphabet=" \t\n#'\"\\abc$-", max_size=60))
def test_taking_comments_out_first_changes_nothing(text: str) -> None:
    """Splitting is the same with and without that step, and any text is split or refused."""
    try:
        expected = split(text)
    except CommandError as exc:
        offset: int | None = exc.line_offset
    else:
        offset = None
        assert split(without_comments(text)) == expected
    assert offset is None or 0 <= offset <= text.count("\n")
