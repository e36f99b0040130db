"""How commands reach the running server: HTTP to its address, one sentence when that fails.

What speaks HTTP is imported when a request is made, not with this module: help, usage errors and offline commands stay fast.
"""

from __future__ import annotations

import codecs
import errno
import functools
import json
import os
import select
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import click

from greenroom.cli import text

if TYPE_CHECKING:
    import aiohttp

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "GREENROOM_API_KEY"
ANSWER_S_MAX = 15.0  # beyond the wait that was asked for
CONNECT_S_MAX = 5.0
KEY_BYTES_MAX = 64 * 1024  # of the file that holds a key; a device never ends
BODY_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 4 << 20

T = TypeVar("T")


class Fault(click.ClickException):
    """An expected failure: its sentence on standard error, exit code 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(self.format_message(), err=True)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str | None = None
    key_source: str = ""  # GREENROOM_API_KEY, or the file's name

    def __repr__(self) -> str:
        return f"Server({self.url!r})"  # never the key


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --url and --api-key-file to a command, which gets a `server`."""

    @click.option(
        "--url",
        metavar="URL",
        envvar="GREENROOM_URL",
        default=DEFAULT_URL,
        show_default=True,
        help="Where greenroom answers [GREENROOM_URL].",
    )
    @click.option("--api-key-file", type=click.Path(), metavar="FILE", help="File that holds the API key (or set GREENROOM_API_KEY).")
    @functools.wraps(command)
    def with_server(*args: Any, url: str, api_key_file: str | None, **rest: Any) -> Any:
        return command(*args, server=Server(checked_url(url), read_key(api_key_file), api_key_file or KEY_VARIABLE), **rest)

    return with_server


def checked_url(url: str) -> str:
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # UnicodeError is one, too
        is_good = False
    if not is_good:
        raise click.UsageError(f"{text.safe(url)!r} is not an address of a server. Write it like {DEFAULT_URL}")
    return full.rstrip("/")


def read_key(path: str | None) -> str | None:
    """The key from the file, else from the environment.  Not from the command line, where every user of the machine could read it."""
    if path is None:
        key, source = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
        if not key:
            return None
    else:
        try:
            with open(path, "rb") as file:
                key, source = file.read(KEY_BYTES_MAX).decode().strip(), path
        except (OSError, UnicodeDecodeError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) else "it is not text"
            raise click.UsageError(f"cannot read the API key in {text.safe(path)}: {reason}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise click.UsageError(f"{text.safe(source)} holds no usable API key: one line of printable characters without spaces is expected")
    return key


def model_path(model: str, part: str = "") -> str:
    """The route of a model; the whole name is one segment, whatever characters it has."""
    return f"/api/models/{quote(model, safe='', errors='surrogateescape')}" + (f"/{part}" if part else "")


def run(work: Awaitable[T]) -> T:
    import asyncio

    async def main() -> T:
        return await work

    return asyncio.run(main())


def run_while_read(work: Awaitable[T]) -> T:
    """`run` for output without an end: BrokenPipeError as soon as its reader has gone, not only with the next line."""
    import asyncio

    async def main() -> T:
        task, is_gone = asyncio.current_task(), False
        assert task is not None

        def leave() -> None:
            nonlocal is_gone
            if not is_gone:
                is_gone = True
                task.cancel()

        loop = asyncio.get_running_loop()
        with reader_watch() as watched:
            if watched is not None:
                loop.add_reader(watched, leave)
            try:
                return await work
            except asyncio.CancelledError:
                if not is_gone:
                    raise
                raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more") from None
            finally:
                if watched is not None:
                    loop.remove_reader(watched)

    return asyncio.run(main())


@contextmanager
def reader_watch() -> Iterator[int | None]:
    """A descriptor that becomes readable when standard output's reader closes it; None where that cannot be told."""
    with ExitStack() as stack:
        watched = None
        try:
            watcher = stack.enter_context(select.epoll())
            watcher.register(sys.stdout.fileno(), 0)  # errors and hang-ups are always reported
            watched = watcher.fileno()
        except (OSError, ValueError, AttributeError):
            pass  # a file, no descriptor at all, or a system without epoll
        yield watched


class Client:
    """One connection pool to the server; every failure is a Fault."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def __aenter__(self) -> Client:
        import aiohttp

        headers = {"Authorization": f"Bearer {self.server.key}"} if self.server.key else {}
        self._session = aiohttp.ClientSession(headers=headers, read_bufsize=1 << 18)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The JSON object at `path`; a Fault with the server's own sentence when it is refused."""
        _, value = await self.ask("GET", path, **query)
        return value

    async def ask(self, method: str, path: str, *, wait_s: float = 0.0, **query: Any) -> tuple[int, dict[str, Any]]:
        """(status, JSON object) of an answer below 400."""
        import aiohttp

        try:
            async with self._request(method, path, query, total_s=wait_s + ANSWER_S_MAX) as response:
                body = await read_body(response)
                return response.status, self._value(response, body)
        except (aiohttp.ClientError, OSError) as fault:
            raise self._fault(fault) from None

    async def lines(self, path: str, *, accept: str = "text/plain", **query: Any) -> AsyncIterator[str]:
        """The lines of a text answer as they come, without their ends."""
        import aiohttp

        try:
            async with self._request("GET", path, query, total_s=None, accept=accept) as response:
                if response.status >= 400:
                    self._value(response, await read_body(response))
                async for line in split_lines(response.content.iter_any()):
                    yield line
        except (aiohttp.ClientError, OSError) as fault:
            raise self._fault(fault) from None

    def _request(
        self, method: str, path: str, query: dict[str, Any], *, total_s: float | None, accept: str = "application/json"
    ) -> aiohttp.client._RequestContextManager:
        import aiohttp
        from yarl import URL

        shown = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items() if value is not None)
        address = URL(f"{self.server.url}{path}" + (f"?{shown}" if shown else ""), encoded=True)
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S_MAX)
        return self._session.request(method, address, timeout=timeout, headers={"Accept": accept}, allow_redirects=False)

    def _value(self, response: aiohttp.ClientResponse, body: bytes) -> dict[str, Any]:
        try:
            value = json.loads(body)
        except ValueError:
            value = None
        if response.status < 400 and response.status != 202 and response.status != 200:
            value = None
        if not isinstance(value, dict):
            raise Fault(f"{self.server.url} answers, but not as greenroom does (status {response.status}). Is --url right?")
        if response.status >= 400:
            raise Fault(self._refusal(response, value))
        return value

    def _refusal(self, response: aiohttp.ClientResponse, value: dict[str, Any]) -> str:
        error = value.get("error")
        said = text.safe(str(error.get("message", ""))) if isinstance(error, dict) else text.safe(str(error or ""))
        if response.status == 401:
            return self._no_entry()
        message = said or f"{self.server.url} refused with status {response.status}"
        retry = response.headers.get("Retry-After", "")
        return f"{message} (try again in {retry} s)" if retry.isdigit() else message

    def _no_entry(self) -> str:
        where = self.server.url
        if self.server.key is None:
            return f"{where} asks for an API key and none was given: set GREENROOM_API_KEY, or give --api-key-file FILE"
        return f"{where} does not accept the API key from {text.safe(self.server.key_source)}: put in one of `apiKeys` of its configuration"

    def _fault(self, fault: Exception) -> Fault:
        """What to tell of a request that got no answer."""
        import aiohttp

        where = self.server.url
        if isinstance(fault, TimeoutError):
            return Fault(f"{where} did not answer in time. Is it greenroom, and is the machine alive?")
        if isinstance(fault, aiohttp.ClientConnectorError):
            if isinstance(fault.os_error, ConnectionRefusedError):
                return Fault(f"no greenroom answers at {where}. Start one with `greenroom serve -c greenroom.yaml`")
            return Fault(f"cannot reach {where}: {text.safe(fault.os_error.strerror or str(fault.os_error))}")
        return Fault(f"the connection to {where} broke: {text.safe(str(fault)) or type(fault).__name__}")


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    pieces, length = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        length += len(piece)
        if length > BODY_BYTES_MAX:
            raise Fault(f"the answer is larger than {BODY_BYTES_MAX >> 20} MiB; this is not how greenroom answers")
    return b"".join(pieces)


async def split_lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines as they are complete; one that never ends is given out in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    async for piece in pieces:
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
        if len(rest) > LINE_BYTES_MAX:
            yield rest
            rest = ""
    if rest:
        yield rest


def print_json(value: Any) -> None:
    """Indented; ASCII only, so that no name can reach the terminal as a control sequence."""
    click.echo(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    click.echo(json.dumps(value, separators=(",", ":")))
