"""One HTTP client for all places that models come from: guarded at every hop, tried again within limits, bounded."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from greenroom import __version__

from .facts import Refused, StoreError, Unreachable
from .guard import DEFAULT_PORTS, HOPS_MAX, Guard, Policy, host_port, shown
from .tls import Tls

CONNECT_S_MAX = 20.0
SILENCE_S_MAX = 60.0  # without a byte
TRIES_MAX = 5  # of one request, the first included
BACKOFF_S = 0.5  # doubled with every try, and spread so that many clients do not come back together
BACKOFF_S_MAX = 15.0
RETRY_AFTER_S_MAX = 60.0  # a server that wants more is told to the user instead
TEXT_BYTES_MAX = 4 * 1024 * 1024  # of a manifest, a token, an answer of an API
WORDS_CHARS_MAX = 200  # of what a server says went wrong
GOODBYE_S_MAX = 1.0  # between two ends of a TLS connection
READ_BUFFER_BYTES = 256 * 1024  # so that a piece is still in the CPU's cache when it is written and hashed
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
REDIRECTS = frozenset({301, 302, 303, 307, 308})

Headers = CIMultiDictProxy[str]
Body = Callable[[], Any]  # makes the body of one try: bytes, or an iterator over a file


@dataclass(frozen=True, slots=True)
class Text:
    """A small answer, read whole.  `url` is where it came from in the end."""

    status: int
    headers: Headers
    data: bytes
    url: URL


class Web:
    """Use it inside one event loop; `close` it."""

    def __init__(self, policy: Policy, tls: Tls | None = None, *, backoff_s: float = BACKOFF_S) -> None:
        self.tls = tls or Tls()
        self.backoff_s = backoff_s
        self.guard = Guard(policy.naming(*_proxies()))
        self._session: aiohttp.ClientSession | None = None
        self._leaving: set[asyncio.Future[None]] = set()  # connections that were closed before their answers' ends

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._leaving:  # with TLS both sides say goodbye: a loop that ends before leaves sockets open
            await asyncio.wait(self._leaving, timeout=GOODBYE_S_MAX)

    async def text(
        self, method: str, url: URL, *, headers: Mapping[str, str] | None = None, body: Body | None = None, bytes_max: int = TEXT_BYTES_MAX
    ) -> Text:
        """A whole answer of any status; raises Refused when it is longer than `bytes_max`, Unreachable when there is none."""
        async with self.open(method, url, headers=headers, body=body) as answer:
            return Text(answer.status, answer.headers, await bounded(answer, bytes_max), answer.url)

    def open(
        self, method: str, url: URL, *, headers: Mapping[str, str] | None = None, body: Body | None = None, tries: int = TRIES_MAX
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """An answer whose body is read by the caller; any status but those that are worth another try.

        Redirects of GET and HEAD are followed.  An Authorization header goes to the host it was given for, and to no other.
        """
        return self._open(method, url, headers, body, tries)

    @asynccontextmanager
    async def _open(
        self, method: str, url: URL, headers: Mapping[str, str] | None, body: Body | None, tries: int
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        answer = await self.ask(method, url, headers=headers, body=body, tries=tries)
        try:
            yield answer
        finally:
            answer.close()  # what was not read is not wanted: no reading on to use the connection again, a stream may be endless

    async def ask(
        self, method: str, url: URL, *, headers: Mapping[str, str] | None = None, body: Body | None = None, tries: int = TRIES_MAX
    ) -> aiohttp.ClientResponse:
        """As `open`, but the caller closes the answer."""

        async def once() -> aiohttp.ClientResponse:
            return await self._followed(method, url, dict(headers or {}), body)

        return await again(once, tries, self.backoff_s, url)

    async def _followed(self, method: str, url: URL, headers: dict[str, str], body: Body | None) -> aiohttp.ClientResponse:
        came_from: URL | None = None
        for _ in range(HOPS_MAX + 1):
            answer = await self._asked(method, url, headers, body, came_from)
            target = answer.headers.get("Location")
            if answer.status not in REDIRECTS or target is None or method not in ("GET", "HEAD"):
                return answer
            answer.close()
            came_from, url = url, _joined(url, target)
            self.guard.check(url, came_from)
            if came_from.origin() != url.origin():
                headers = {name: value for name, value in headers.items() if name.lower() not in ("authorization", "cookie")}
        raise Refused(f"{came_from.host if came_from else url.host} redirects more than {HOPS_MAX} times: refused")

    async def _asked(
        self, method: str, url: URL, headers: Mapping[str, str], body: Body | None, came_from: URL | None
    ) -> aiohttp.ClientResponse:
        self.guard.check(url, came_from)
        port = url.port or DEFAULT_PORTS[url.scheme]
        context = self.tls.context(url.host or "", port) if url.scheme == "https" else True
        sent = CIMultiDict({"Accept-Encoding": "identity", **headers})
        try:
            return await self._opened().request(
                method, url, headers=sent, data=body() if body else None, allow_redirects=False, ssl=context, proxy=_proxy_for(url)
            )
        except Refused as exc:
            if came_from is None:
                raise
            raise Refused(f"{came_from.host} redirects elsewhere: {exc}") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError) as exc:
            raise _unreachable(url, exc) from None  # its cause holds the request, and that the Authorization header

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No cache of names: the address that was checked is the one connected to, every time.
            connector = aiohttp.TCPConnector(resolver=self.guard, use_dns_cache=False, limit=0)
            self._session = aiohttp.ClientSession(
                response_class=_answers(self._leaving),
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX),
                headers={"User-Agent": f"greenroom/{__version__}"},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                trust_env=False,
            )
        return self._session


def _answers(leaving: set[asyncio.Future[None]]) -> type[aiohttp.ClientResponse]:
    """Answers that note whose connections they close."""

    class Answer(aiohttp.ClientResponse):
        def close(self) -> None:
            protocol = self.connection.protocol if self.connection is not None else None
            if protocol is not None and (gone := protocol.closed) is not None:
                leaving.add(gone)
                gone.add_done_callback(leaving.discard)
            super().close()

    return Answer


class Distrusted(Unreachable):
    """TLS, but with a certificate nobody vouches for."""


class NotTls(Unreachable):
    """Something answers, but not in TLS."""


async def again(once: Callable[[], Awaitable[aiohttp.ClientResponse]], tries: int, backoff_s: float, url: URL) -> aiohttp.ClientResponse:
    """Asks until there is an answer that means something; the last bad one is the caller's."""
    for number in range(1, tries + 1):
        pause_s = min(BACKOFF_S_MAX, backoff_s * 2 ** (number - 1)) * random.uniform(0.7, 1.3)
        try:
            answer = await once()
            if answer.status not in AGAIN or number == tries:
                return answer
            wanted_s = retry_after_s(answer.headers.get("Retry-After", ""))
            answer.close()
            if wanted_s is not None and wanted_s > RETRY_AFTER_S_MAX:
                raise StoreError(f"{url.host} answers {answer.status} and asks to come back in {wanted_s:.0f} s: try again then")
            pause_s = max(pause_s, wanted_s or 0.0)
        except (Distrusted, NotTls):
            raise
        except Unreachable:
            if number == tries:
                raise
        await asyncio.sleep(pause_s)
    raise AssertionError("tries is at least 1")


def retry_after_s(value: str) -> float | None:
    """Seconds of a Retry-After header: a number or a date; None when it is neither."""
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


async def bounded(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body; raises Refused beyond `bytes_max`."""
    data = bytearray()
    try:
        if (answer.content_length or 0) > bytes_max and answer.method != "HEAD":
            raise Refused(f"{answer.url.host} sends {answer.content_length:,} bytes where at most {bytes_max:,} are taken: refused")
        async for piece in answer.content.iter_any():
            data += piece
            if len(data) > bytes_max:
                raise Refused(f"{answer.url.host} sends more than the {bytes_max:,} bytes that are taken: refused")
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise _unreachable(answer.url, exc) from None
    return bytes(data)


def words(text: Text | bytes) -> str:
    """What a server says went wrong, on one line, without control characters: `: authentication required`."""
    data = text.data if isinstance(text, Text) else text
    said = _message(data) or data[: 4 * WORDS_CHARS_MAX].decode("utf-8", "replace")
    said = " ".join("".join(char if char.isprintable() else " " for char in said).split())
    return f": {said[:WORDS_CHARS_MAX]}" if said and not said.startswith(("<", "{")) else ""


def _message(data: bytes) -> str:
    """The text in `{"errors": [{"message": …}]}` or `{"error": …}`."""
    try:
        value = json.loads(data)
        found = value["errors"][0]["message"] if "errors" in value else value["error"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def _unreachable(url: URL, exc: BaseException) -> Unreachable:
    place = f"{url.scheme}://{host_port(url.host or '', url.port or DEFAULT_PORTS.get(url.scheme, 0))}"
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        why = getattr(exc.certificate_error, "verify_message", "") or "it cannot be verified"
        named = "name its authority (--tls-ca FILE; in a configuration `pull: {tls_ca: FILE}`)"
        return Distrusted(f"the certificate of {place} is not trusted ({why}): if it is yours, {named}")
    if isinstance(exc, aiohttp.ClientConnectorSSLError | ssl.SSLError):
        reason = getattr(getattr(exc, "os_error", exc), "reason", "") or "no TLS"
        return NotTls(f"{place} does not speak TLS as expected ({str(reason).replace('_', ' ').lower()}): --plain-http, if it has none")
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return Unreachable(f"the name {url.host} leads to no address: check it, and the network")
    if isinstance(exc, TimeoutError):
        return Unreachable(f"{place} did not answer within {CONNECT_S_MAX:.0f} s, or was silent for {SILENCE_S_MAX:.0f} s")
    os_error = getattr(exc, "os_error", exc)
    why = getattr(os_error, "strerror", None) or str(exc) or type(exc).__name__
    return Unreachable(f"{place} cannot be reached, or broke off: {why}")


def unreachable(url: URL, exc: BaseException) -> Unreachable:
    """What a broken connection means, in words that hold no secret."""
    return _unreachable(url, exc)


def _joined(url: URL, target: str) -> URL:
    try:
        return url.join(URL(target, encoded=True))
    except ValueError:
        raise Refused(f"{shown(url)} redirects to something that is no address: refused") from None


def _proxies() -> list[str]:
    """Hosts of the proxies that the environment names; they may be inside."""
    found = []
    for scheme, written in urllib.request.getproxies_environment().items():
        url = URL(written)
        if scheme in DEFAULT_PORTS and url.host:
            found.append(host_port(url.host, url.port or DEFAULT_PORTS.get(url.scheme, 80)))
    return found


def _proxy_for(url: URL) -> URL | None:
    proxies = urllib.request.getproxies_environment()
    written = proxies.get(url.scheme)
    place = host_port(url.host or "", url.port or DEFAULT_PORTS[url.scheme])
    if not written or urllib.request.proxy_bypass(place) or (url.host or "") in ("localhost", "127.0.0.1", "::1"):
        return None
    return URL(written)
