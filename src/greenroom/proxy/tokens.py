"""How many tokens an answer took, as its engine counted them: read off the two ends of the body after it has passed.

No answer is parsed for this and none is held.  Engines write their counts near an end: `usage` of OpenAI's and Anthropic's
routes, `timings` and `tokens_evaluated` of llama-server, `meta_info` of SGLang.  Where the end of an answer holds none, or
the answer is compressed, the counts are not known; they are never guessed, and a client's request is never changed to get them.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

TAIL_BYTES: Final = 8 * 1024  # kept of the end, at least
HEAD_BYTES: Final = 4 * 1024  # kept of the beginning of an answer that is longer than what is kept of its end
SHORT_BYTES: Final = 2 * TAIL_BYTES  # a body up to this size is looked at as a whole
TRIES_MAX: Final = 4  # places in one end that look like counts

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None
Counts: TypeAlias = tuple[int | None, int | None]  # tokens in, tokens out; None = the engine did not say

UNKNOWN: Final[Counts] = (None, None)

# A key inside a JSON string has its quotes escaped, so it is not taken for one.  The first pattern is the cheaper one.
_FLAT: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*\})").match
_NESTED: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})").match
_NUMBER: Final = re.compile(rb"\s*:\s*(\d{1,15})\s*[,}]")


class Edges:
    """The two ends of a body that passes: all of it while it is short."""

    __slots__ = ("head", "tail")

    def __init__(self) -> None:
        self.head = b""  # of a long one
        self.tail = bytearray()

    def add(self, pieces: list[bytes]) -> None:
        """The next bytes of the body; costs one small copy."""
        tail = self.tail
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(tail) + len(data) <= SHORT_BYTES:
            tail += data
            return
        if not self.head:
            self.head = bytes(tail[:HEAD_BYTES]) + data[: max(0, HEAD_BYTES - len(tail))]
        if len(data) >= TAIL_BYTES:
            tail[:] = data[-TAIL_BYTES:]
        else:
            tail += data
            del tail[:-TAIL_BYTES]


class _Usage(msgspec.Struct, frozen=True, gc=False):
    """What the words for counts are, on all routes together."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    total_tokens: Count = None
    input_tokens: Count = None
    output_tokens: Count = None
    cache_read_input_tokens: Count = None  # Anthropic's: beside input_tokens, not within
    cache_creation_input_tokens: Count = None
    prompt_n: Count = None  # llama-server's: what was computed of the prompt,
    cache_n: Count = None  # and what was not
    predicted_n: Count = None

    def counts(self) -> Counts:
        if self.prompt_n is not None:
            return self.prompt_n + (self.cache_n or 0), self.predicted_n
        if self.input_tokens is not None:
            return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0), self.output_tokens
        out = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        if self.prompt_tokens is None and self.total_tokens is not None:  # rerankers that tell no more
            return max(0, self.total_tokens - (out or 0)), out
        return self.prompt_tokens, out


_decode: Final = msgspec.json.Decoder(_Usage).decode
_KEY: Final = b'"usage"'


def count(ends: Edges | bytes, is_stream: bool, is_whole: bool) -> Counts:
    """The counts in a plain JSON answer or event stream, or in its two ends.  `is_whole`: it ended as its engine meant it to.

    A stream tells what it produced at its end only: of one that broke off at most the tokens in are known.
    """
    tail = ends.tail if isinstance(ends, Edges) else ends
    at = tail.rfind(_KEY)
    if at >= 0 and is_whole and (found := _FLAT(tail, at + 7)) is not None:  # as most engines tell it
        try:
            usage = _decode(found[1])
            if usage.prompt_tokens is not None:
                return usage.prompt_tokens, usage.completion_tokens
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass  # looked for elsewhere
    tokens_in, tokens_out = _search(tail, ends.head if isinstance(ends, Edges) else b"", is_stream)
    return (tokens_in, None) if is_stream and not is_whole else (tokens_in, tokens_out)


def _search(tail: bytes | bytearray, head: bytes, is_stream: bool) -> Counts:
    tokens_in, tokens_out = _last(tail, _KEY)
    if tokens_in is None:
        first_in, first_out = _first(head or tail)
        tokens_in = first_in
        if tokens_out is None and not is_stream:
            tokens_out = first_out
    return (tokens_in, tokens_out) if tokens_in is not None or tokens_out is not None else _in_other_words(tail)


def _in_other_words(tail: bytes | bytearray) -> Counts:
    counts = _last(tail, b'"timings"')
    if counts == UNKNOWN:
        return _last(tail, b'"meta_info"')
    at = tail.rfind(b'"tokens_evaluated"')
    told = _NUMBER.match(tail, at + 18) if at >= 0 else None
    return (int(told[1]), counts[1]) if told is not None else counts


def _last(text: bytes | bytearray, key: bytes) -> Counts:
    """Counts in the last object of this key that tells any."""
    at = len(text)
    for _ in range(TRIES_MAX):
        at = text.rfind(key, 0, at)
        if at < 0:
            break
        found = _read(text, at + len(key))
        if found != UNKNOWN:
            return found
    return UNKNOWN


def _first(text: bytes | bytearray) -> Counts:
    at = text.find(_KEY)
    return _read(text, at + len(_KEY)) if at >= 0 else UNKNOWN


def _read(text: bytes | bytearray, at: int) -> Counts:
    """Counts in the object that follows a key."""
    found = _FLAT(text, at) or _NESTED(text, at)
    if found is None:
        return UNKNOWN
    try:
        usage = _decode(found[1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNKNOWN
    if usage.prompt_tokens is not None:
        return usage.prompt_tokens, usage.completion_tokens
    return usage.counts()


def header_count(value: bytes) -> int | None:
    """What text-embeddings-inference says in a header."""
    return int(value) if value.isdigit() and len(value) <= 15 else None
