"""A stretch of a file by HTTP: what servers answer to a Range, believed only where it fits what was asked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

from .facts import Damaged, NotFound, Refused, StoreError, Unreachable
from .guard import shown
from .web import AGAIN, unreachable, words

CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
ERROR_BYTES = 2048  # of a refusal's text


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file from `start` on.  `whole`: the server does not know ranges, so it starts at 0 whatever was asked.

    `read` gives the next bytes, b"" at the end; it raises Unreachable when the connection breaks.
    """

    start: int
    whole: bool
    read: Callable[[], Awaitable[bytes]]


Opened = AbstractAsyncContextManager[Stretch]
Opener = Callable[[int, int], Opened]  # offset, length


def range_headers(offset: int, length: int, size: int) -> dict[str, str]:
    """All of a file is asked for plainly: servers without ranges answer that too."""
    return {} if offset == 0 and length == size else {"Range": f"bytes={offset}-{offset + length - 1}"}


@asynccontextmanager
async def stretch(answer: aiohttp.ClientResponse, offset: int, length: int, size: int, what: str) -> AsyncIterator[Stretch]:
    """The stretch that an answer to a GET holds.  Raises NotFound, Refused, Damaged or Unreachable for any other answer."""
    if answer.status == 206:
        _check_range(answer, offset, length, size, what)
        yield Stretch(offset, False, _reader(answer))
        return
    if answer.status == 200:
        _check_length(answer.headers.get("Content-Length"), size, what, answer.url)
        yield Stretch(0, True, _reader(answer))
        return
    if answer.status == 416:
        raise Damaged(f"{what}: {answer.url.host} has less of it than the {size:,} bytes it declares; whoever offers it has to mend it")
    raise await refusal(answer, what)


async def refusal(answer: aiohttp.ClientResponse, what: str) -> StoreError:
    """The error that a status means."""
    try:
        said = words(await answer.content.read(ERROR_BYTES)) if answer.method != "HEAD" else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        said = ""
    return status_error(answer.status, answer.url, what, said)


def status_error(status: int, url: URL, what: str, said: str = "") -> StoreError:
    host = url.host_port_subcomponent
    if status in (404, 410):
        return NotFound(f"{host} has no {what}{said}")
    if status in (401, 403):
        return Refused(f"{host} does not give {what} to us ({status}{said}): log in with an account that may have it")
    if status in AGAIN:
        return Unreachable(f"{host} answers {status} for {what}{said}: try again later")
    return StoreError(f"{host} answers {status} for {what} at {shown(url)}{said}")


def _check_range(answer: aiohttp.ClientResponse, offset: int, length: int, size: int, what: str) -> None:
    written = answer.headers.get("Content-Range", "")
    match = CONTENT_RANGE.fullmatch(written.strip())
    if match is None:
        raise Damaged(f"{what}: {answer.url.host} sends a part without saying which (Content-Range {written[:60]!r})")
    first, last, total = int(match[1]), int(match[2]), match[3]
    if first != offset or last >= offset + length or last < first:
        raise Damaged(f"{what}: asked for bytes {offset}-{offset + length - 1}, {answer.url.host} sends {first}-{last}")
    if total != "*" and int(total) != size:
        raise Damaged(f"{what}: declared with {size:,} bytes, but {answer.url.host} has {int(total):,}")


def _check_length(written: str | None, size: int, what: str, url: URL) -> None:
    if written is not None and written.isdecimal() and int(written) != size:
        raise Damaged(f"{what}: declared with {size:,} bytes, but {url.host} sends {int(written):,}")


def _reader(answer: aiohttp.ClientResponse) -> Callable[[], Awaitable[bytes]]:
    content = answer.content

    async def read() -> bytes:
        try:
            return await content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise unreachable(answer.url, exc) from None

    return read


async def bytes_of(opener: Opener, offset: int, length: int) -> AsyncIterator[bytes]:
    """The bytes themselves, whatever the server makes of ranges."""
    async with opener(offset, length) as found:
        skip = offset - found.start
        while length and (data := await found.read()):
            data, skip = data[skip:], max(0, skip - len(data))
            data = data[:length]
            length -= len(data)
            if data:
                yield data
