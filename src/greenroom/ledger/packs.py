"""Many hot requests as one row of the file: columns, which cost a tenth of as many rows.

    pack = Pack.of(model, values)          # flat: WIDTH values a request, one request after the other
    pack.values()                          # what RequestRows are made from

Only requests that were admitted at once, waited nothing and ended well are packed, and only where many come together:
whoever asks for those that waited or went wrong need not look into packs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, Final, TypeAlias

import msgspec

FIELDS: Final = (
    "request", "at", "duration_s", "first_byte_s", "tokens_in", "tokens_out", "generation", "client", "priority", "path", "before",
)  # fmt: skip
WIDTH: Final = len(FIELDS)
REQUEST, AT, DURATION_S, FIRST_BYTE_S, TOKENS_IN, TOKENS_OUT = range(6)
STATUS: Final = 200  # of every one of them
LEAST: Final = 64  # requests of one model at a time; fewer are written as rows
MOST: Final = 256  # in one pack: what is read for one of them
DURATION_S_MAX: Final = 60.0  # who took longer is written as a row, so that a pack tells of a short time
NOT_TOLD: Final = -1  # in place of None, where counts are

Column: TypeAlias = tuple[str, bytes] | list[Any]  # numbers as of `array`; or the values that occur, then the place of each one's
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Any]).decode


@dataclass(frozen=True, slots=True)
class Pack:
    """`columns` as in FIELDS."""

    model: str
    columns: tuple[Sequence[Any], ...]

    @classmethod
    def of(cls, model: str, flat: Sequence[Any]) -> Pack:
        return cls(model, tuple(flat[place::WIDTH] for place in range(WIDTH)))

    def __len__(self) -> int:
        return len(self.columns[REQUEST])

    def values(self, which: Iterable[int] | None = None) -> Iterator[list[Any]]:
        """As `schema.request_values`, of all or of those at these places."""
        columns, model = self.columns, self.model
        for one in range(len(self)) if which is None else which:
            (request, at, duration_s, first_byte_s, tokens_in, tokens_out, generation, client, priority, path, before) = [
                column[one] for column in columns
            ]
            yield [
                request, at, model, generation, client, priority, path, 0.0, 0.0, 0.0, 0.0, first_byte_s, duration_s, tokens_in, tokens_out,
                "hot", "ok", STATUS, "", before,
            ]  # fmt: skip

    def packed(self) -> Packed:
        """Raises UnicodeError for a text that is none."""
        request, at, duration_s, first_byte_s, tokens_in, tokens_out, *repeated = self.columns
        columns = _encode(
            [
                _numbers("I", request), _numbers("d", at), _numbers("d", duration_s), _numbers("d", first_byte_s, nan),
                _numbers("i", tokens_in, NOT_TOLD), _numbers("i", tokens_out, NOT_TOLD), *map(_repeated, repeated),
            ]
        )  # fmt: skip
        return Packed(self.model, max(at), min(at), len(at), min(request), max(request), columns)


@dataclass(frozen=True, slots=True)
class Packed:
    """A row of the file."""

    model: str
    at: float  # the latest arrival
    since: float  # the earliest
    count: int
    low: int  # the least and the greatest number
    high: int
    columns: bytes

    def values(self) -> tuple[Any, ...]:
        return self.model, self.at, self.since, self.count, self.low, self.high, self.columns

    def pack(self) -> Pack:
        return unpacked(self.model, self.columns)


def unpacked(model: str, packed: bytes) -> Pack:
    request, at, duration_s, first_byte_s, tokens_in, tokens_out, *repeated = _decode(packed)
    numbers = (*map(_array, (request, at, duration_s)), _told(first_byte_s), _told(tokens_in), _told(tokens_out))
    return Pack(model, (*numbers, *(_values(column, len(numbers[REQUEST])) for column in repeated)))


def times(packed: bytes) -> tuple[Sequence[float], Sequence[float]]:
    """(arrivals, durations), which is all that some want."""
    _, at, duration_s, *_ = _decode(packed)
    return _array(at), _array(duration_s)


# ------------------------------------------------------------------ columns


def _numbers(kind: str, column: Sequence[Any], none: float | None = None) -> tuple[str, bytes]:
    """Integers that are too large for `kind` "i" are kept as "q"."""
    if none is not None and None in column:
        column = [none if one is None else one for one in column]
    try:
        return kind, array(kind, column).tobytes()
    except OverflowError:
        return "q", array("q", column).tobytes()


def _array(column: Sequence[Any]) -> array[Any]:
    kind, packed = column
    return array(kind, packed)


def _told(column: Sequence[Any]) -> Sequence[Any]:
    """With None where nothing was told."""
    found = _array(column)
    if found.typecode == "d":
        return [None if isnan(one) else one for one in found]
    return [None if one == NOT_TOLD else one for one in found] if NOT_TOLD in found else found


def _repeated(column: Sequence[Any]) -> list[Any]:
    first = column[0]
    if column.count(first) == len(column):
        return [[first], None]
    found = {value: place for place, value in enumerate(dict.fromkeys(column))}
    return [list(found), _numbers("B" if len(found) <= 256 else "I", list(map(found.__getitem__, column)))]


def _values(column: list[Any], count: int) -> Sequence[Any]:
    values, places = column
    return values * count if places is None else [values[place] for place in _array(places)]
