"""No way of writing a request reaches a route that steers an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.proxy.admission import Catalog, ModelRoute
from greenroom.proxy.targets import Kind, route

from .control_routes import (
    ANY_METHOD,
    ASKED,
    OVERRIDING_METHOD,
    OVERRIDING_PATH,
    QUERIES,
    SAFE,
    SPELLINGS,
    WRITING,
    control_route,
)
from .relay_world import Answer, Caller, EngineSide, Seen, World, a_caller, a_world, answer_ok, on_uvloop

NAMES = ("m", "org/name:tag", "sleep", "a", "a/b", "load")
CATALOG = Catalog(models={name: ModelRoute(name) for name in NAMES}, names={name: name for name in NAMES})
DOORS = (b"/upstream/m/", b"/upstream/org%2Fname:tag/", b"/upstream/m//", b"/upstream/sleep/")
WITHOUT_DOOR = (b"/", b"/v1/audio/", b"/v1/models/", b"/upstream/nobody/")
CHANGING = (b"POST", b"PUT", b"PATCH", b"DELETE")
METHODS = (*CHANGING, *sorted(SAFE))


DECLARING = replace(CATALOG, control_words=frozenset({"curtain", "house-lights"}))


def leak(method: bytes, target: bytes, catalog: Catalog = CATALOG) -> str | None:
    """How an engine could get it; None when none can."""
    found = route(method, target, catalog)
    if found.error is not None:
        return None if found.error.status in {403, 404, 405} else f"{method!r} {target!r}: {found.error.status}"
    if found.kind in {Kind.UPSTREAM, Kind.INFERENCE} and found.redirect is None:
        return f"{method!r} {target!r} goes to {found.path!r}"
    return None


def understood_leak(asked: bytes, door: bytes = b"/upstream/m/", query: bytes = b"") -> str | None:
    """For spellings on top of each other, which may spoil each other: what is let through and still understood."""
    found = leak(b"POST", door + asked + query)
    read = control_route((b"POST",), (b"/" + asked,)) if found is not None else None
    return f"{found}, which is {read}" if read is not None else None


def told(leaks: Iterable[str | None]) -> str:
    found = [one for one in leaks if one is not None]
    return "\n".join((f"{len(found)} leaks", *found[:40])) if found else ""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_a_control_route_is_let_through(spelling: str) -> None:
    """Every route of every engine, below every door, by a method that may change something and by those that may not."""
    leaks: list[str | None] = []
    for asked in ASKED:
        path = SPELLINGS[spelling](asked)
        leaks += [leak(b"POST", door + path) for door in (*DOORS, *WITHOUT_DOOR)]
        if asked.replace(b"/0", b"/{}").decode() in ANY_METHOD:
            leaks += [leak(method, b"/upstream/m/" + path) for method in METHODS]
        else:
            leaks += [leak(method, b"/upstream/m/" + path) for method in CHANGING]

    assert not told(leaks)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_a_declared_call_is_let_through(spelling: str) -> None:
    """What the configuration names for sleep and wake is private like what every engine has; without it, it is a path like others."""
    paths = [SPELLINGS[spelling](asked) for asked in (b"curtain", b"stage/house-lights", b"curtain")]

    assert not told(leak(method, door + path, DECLARING) for path in paths for door in DOORS for method in METHODS)
    assert leak(b"POST", b"/upstream/m/curtain") is not None


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_makes_a_difference(query: bytes) -> None:
    """What follows the first `?` is nothing to the routing, raw or not."""
    spellings = ("as it is", "all escaped", "tail: b'/x/..'", "tail: b'%3Fx/y'", "head: b'//'", "upper")

    assert not told(
        leak(method, b"/upstream/m/" + SPELLINGS[name](asked) + query) for asked in ASKED for name in spellings for method in CHANGING
    )


@pytest.mark.parametrize("first", SPELLINGS)
def test_no_two_spellings_on_top_of_each_other_are_let_through(first: str) -> None:
    """Each with each, on one route of every shape."""
    asked = (b"sleep", b"models/load", b"slots/0", b"hicache/storage-backend")

    assert not told(understood_leak(second(SPELLINGS[first](path))) for path in asked for second in SPELLINGS.values())


@pytest.mark.parametrize("asked", ASKED)
def test_the_table_holds_what_it_says(asked: bytes) -> None:
    """The most forgiving engine does take nearly each of these for the route: a table of nonsense would prove nothing."""
    unread = [name for name, spell in SPELLINGS.items() if control_route((b"POST",), (b"/" + spell(asked),)) is None]

    assert set(unread) <= {"escaped nine times"}
    assert control_route((b"GET",), (b"/" + asked,)) is not None or asked.replace(b"0", b"{}").decode() in WRITING


# ------------------------------------------------------------------------------------------------------------ random ones

_PIECES = st.sampled_from(
    [
        *(
            b"/",
            b"/",
            b"//",
            b"..",
            b".",
            b"/../",
            b"%2e",
            b"%2F",
            b"%252f",
            b"%25",
            b"%5c",
            b"\\",
            b";",
            b";x=",
            b"?",
            b"%3f",
            b"%23",
            b"%00",
        ),
        *(
            b"%0a",
            b"%20",
            b"+",
            b"%u0073",
            b"%u002f",
            b"%c0%af",
            b"%c0%ae",
            b"%e0%80%af",
            b"%ff",
            b"%ef%bc%8f",
            b"%ef%bd%93",
            b"%ef%bb%bf",
            b"%",
        ),
        *(b"sleep", b"Sleep", b"sl", b"eep", b"%73leep", b"models", b"load", b"slots", b"0", b"props", b"dumper", b"hicache", b"x", b"v1"),
        *(b"%c1%b3leep", b"pause", b"update_weights", b"chat/completions", b"%zz", b".png", b"http:"),
    ]
)


@given(
    st.sampled_from(ASKED),
    st.lists(st.sampled_from(sorted(SPELLINGS)), min_size=1, max_size=5),
    st.sampled_from(DOORS),
    st.sampled_from(QUERIES),
)
def test_no_composition_of_spellings_is_let_through(asked: bytes, names: list[str], door: bytes, query: bytes) -> None:
    """Up to five of them, one on top of the other."""
    path = asked
    for name in names:
        path = SPELLINGS[name](path)

    assert not understood_leak(path, door, query)


@given(st.sampled_from(METHODS), st.lists(_PIECES, max_size=9).map(b"".join))
def test_what_is_let_through_is_no_control_route_to_anybody(method: bytes, rest: bytes) -> None:
    """The other way round: the most forgiving engine finds none in what any target is forwarded as."""
    found = route(method, b"/upstream/m/" + rest, CATALOG)
    if found.error is None:
        assert control_route((method,), (found.path.partition(b"?")[0],)) is None


# ---------------------------------------------------------------------------------------------------------- and the others


@pytest.mark.parametrize(
    "target",
    [
        b"/upstream/m/files/sleep.txt",
        b"/upstream/m/sleep/notes.txt",
        b"/upstream/m/files/sleep%20diary/day%201.txt",
        b"/upstream/m/asleep",
        b"/upstream/m/sleep-well",
        b"/upstream/m/v1/files?q=/sleep",
        b"/upstream/m/search?path=..%2Fsleep&next=/flush_cache",
        b"/upstream/m/r%C3%A9sum%C3%A9",
        b"/upstream/m/caf%C3%A9/%E4%B8%AD%E6%96%87.html",
        b"/upstream/m/%EF%BD%93/x",
        b"/upstream/m/v1/models/org%2Fname:tag/infer",
        b"/upstream/m/v2/models/%E4%B8%AD%E6%96%87/infer",
        b"/upstream/m/model_weights.json",
        b"/upstream/m/weights",
        b"/upstream/m/a;b=c/d",
        b"/upstream/m/..%2f..%2fetc/passwd",
        b"/upstream/m//double",
        b"/upstream/m/100%",
        b"/upstream/sleep/v1/chat/completions",
        b"/upstream/sleep/",
        b"/upstream/load/x",
        b"/v1/chat/completions?x=/sleep",
        b"/v1/audio/sleepy",
        b"/v1/responses/sleep_1/cancel",
    ],
)
def test_what_only_holds_such_a_word_goes_through(target: bytes) -> None:
    """Files, folders, queries, models: nothing of an engine is closed but what steers it."""
    assert route(b"POST", target, CATALOG).error is None


def test_models_called_like_control_routes_are_looked_up() -> None:
    """They are answered here."""
    for target in (b"/v1/models/sleep", b"/models/sleep", b"/v1/models/load", b"/models/load"):
        found = route(b"GET", target, CATALOG)
        assert (found.kind, found.error) == (Kind.MODELS, None)


# ------------------------------------------------------------------------------------------------- through the data plane


@dataclass
class Recorder:
    """The most forgiving engine: answers everything, and notes what it took for a control route."""

    hits: list[str] = field(default_factory=list)
    asked: int = 0
    accepts_upgrades: bool = True

    async def __call__(self, seen: Seen, side: EngineSide) -> None:
        self.asked += 1
        methods = [seen.method] + [value.upper() for name, value in seen.headers if b"method" in name]
        paths = [seen.target.partition(b"?")[0], *(value.partition(b"?")[0] for name, value in seen.headers if _tells_path(name))]
        found = control_route(methods, paths)
        if found is not None:
            self.hits.append(f"{found}: {seen.method!r} {seen.target!r} {seen.headers!r}")
        if seen.values(b"upgrade") and self.accepts_upgrades:
            await side.send(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n"
            )
            await side.wait_gone()
        else:
            await answer_ok(seen, side)


def _tells_path(name: bytes) -> bool:
    return any(word in name.replace(b"_", b"-") for word in (b"-url", b"-uri", b"-path", b"path-info"))


def head(method: bytes, target: bytes, extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"%b %b HTTP/%b\r\nHost: localhost\r\n%b\r\n" % (method, target, version, extra)


class Lines:
    """Asks one request after the other, over as many connections as that takes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.caller: Caller | None = None

    async def ask(self, request: bytes) -> Answer | None:
        for _ in range(2):
            fresh = self.caller is None
            if self.caller is None:
                self.caller = Caller(*await self.world.connect())
            await self.caller.send(request)
            answer = await self.caller.answer(request.partition(b" ")[0].decode("latin-1"), upgrade=b"Upgrade: websocket" in request)
            if answer is None or answer.status == 101 or answer.headers.get(b"connection") == b"close" or self.caller.eof:
                self.caller.writer.transport.abort()
                self.caller = None
            if answer is not None or fresh:
                return answer
        return None


@contextlib.asynccontextmanager
async def a_recorder() -> AsyncIterator[tuple[Recorder, World, Lines]]:
    recorder = Recorder()
    async with a_world(recorder) as world:
        lines = Lines(world)
        yield recorder, world, lines
        if lines.caller is not None:
            lines.caller.writer.transport.abort()
            await asyncio.sleep(0)


async def check(requests: Sequence[bytes], *, base_path: str = "", refused: bool = True) -> None:
    """Ask them all: no hit; `refused`: nothing of it even gets to the engine."""
    async with a_recorder() as (recorder, world, lines):
        world.admissions.base_path = base_path
        passed = []
        for request in requests:
            answer = await lines.ask(request)
            if answer is None or answer.status < 400:
                passed.append(f"{answer and answer.status}: {request!r}")
        assert not told(recorder.hits)
        if refused:
            assert not told(passed)
            assert recorder.asked == 0
            assert not world.admissions.tickets  # and no model was started for it


def test_no_spelling_reaches_an_engine_through_the_data_plane() -> None:
    """The whole table once more, over sockets, to the engine that reads everything in every way."""
    body = b"Content-Length: 0\r\n"

    async def main() -> None:
        await check([head(b"POST", b"/upstream/m/" + spell(asked), body) for spell in SPELLINGS.values() for asked in ASKED])

    on_uvloop(main)


CHOSEN = (
    "as it is",
    "all escaped",
    "upper",
    "head: b'//'",
    "head: b'x/../'",
    "tail: b'/'",
    "tail: b';a%2fb'",
    "tail: b'%00'",
    "one full-width",
)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
SHAPES: dict[str, tuple[bytes, bytes, bytes, bytes]] = {  # method, version, headers, body
    "PUT": (b"PUT", b"1.1", b"Content-Length: 2\r\n", b"{}"),
    "DELETE": (b"DELETE", b"1.1", b"", b""),
    "PATCH": (b"PATCH", b"1.1", b"Content-Length: 2\r\n", b"{}"),
    "odd method": (b"PROPFIND", b"1.1", b"", b""),
    "CONNECT": (b"CONNECT", b"1.1", b"", b""),
    "HTTP/1.0": (b"POST", b"1.0", b"Content-Length: 2\r\n", b"{}"),
    "chunked": (b"POST", b"1.1", CHUNKED, b"2\r\n{}\r\n0\r\n\r\n"),
    "expecting": (b"POST", b"1.1", b"Expect: 100-continue\r\nContent-Length: 2\r\n", b"{}"),
    "WebSocket by POST": (b"POST", b"1.1", WEBSOCKET + b"Content-Length: 0\r\n", b""),
    "h2c": (b"POST", b"1.1", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\nContent-Length: 0\r\n", b""),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_shape_of_a_request_reaches_a_control_route(shape: str) -> None:
    """Other methods, versions, framings and upgrades."""
    method, version, headers, body = SHAPES[shape]

    async def main() -> None:
        targets = [b"/upstream/m/" + SPELLINGS[name](asked) for name in CHOSEN for asked in ASKED]
        await check([head(method, target, headers, version) + body for target in targets])

    on_uvloop(main)


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
@pytest.mark.parametrize("headers", [b"", WEBSOCKET], ids=["plain", "WebSocket"])
def test_no_method_that_only_reads_reaches_one(method: bytes, headers: bytes) -> None:
    """Some take GET as well, and what they tell is private."""

    async def main() -> None:
        asked = [route_asked.replace("{}", "0").encode() for route_asked in ANY_METHOD]
        await check([head(method, b"/upstream/m/" + SPELLINGS[name](path), headers) for name in CHOSEN for path in asked])

    on_uvloop(main)


def test_no_form_of_a_target_reaches_one() -> None:
    """Absolute, with an authority, the asterisk, without a slash, and without a door."""
    forms = (
        *(
            b"http://localhost/%b",
            b"http://localhost/upstream/m/%b",
            b"https://engine:1/%b",
            b"//engine/%b",
            b"engine:80/%b",
            b"*/%b",
            b"%b",
        ),
        *(b"?/%b", b"/?/%b", b"/upstream/m?/../%b", b"/upstream/m/#/../%b", b"/upstream//m/%b", b"//upstream/m/%b", b"/upstream/m%%2f%b"),
        *(
            b"/UPSTREAM/m/%b",
            b"/upstream/./m/%b",
            b"/upstream/x/../m/%b",
            b"/upstream%%2fm/%b",
            b"/%b",
            b"//%b",
            b"/v/%b",
            b"/audioapi/v1/tasks/run/../%b",
        ),
        *(
            b"/v1/chat/completions/../../%b",
            b"/v1/audio/%b",
            b"/v1/audio/../../%b",
            b"/v1/responses/x/../../../%b",
            b"/api/../%b",
            b"/health/..;/%b",
        ),
    )

    async def main() -> None:
        requests = [
            head(method, form % asked, b"Content-Length: 0\r\n") for form in forms for asked in ASKED for method in (b"POST", b"GET")
        ]
        requests += [head(method, target) for method in METHODS for target in (b"*", b"localhost:80", b"")]
        await check(requests, refused=False)

    on_uvloop(main)


@pytest.mark.parametrize("name", [*OVERRIDING_METHOD, *OVERRIDING_PATH])
def test_no_header_makes_another_request_of_it(name: str) -> None:
    """An engine never sees a header that names another method or path than the request line does."""
    harmless = (b"/upstream/m/props", b"/upstream/m/slots/0", b"/upstream/m/v1/models", b"/upstream/m/models", b"/upstream/m/lora-adapters")
    values = (b"POST", b"delete") if name in OVERRIDING_METHOD else (*(b"/" + path for path in ASKED), b"/models/load?x=1")

    async def main() -> None:
        async with a_recorder() as (recorder, world, lines):
            for spelled in {name, name.lower(), name.upper()}:
                for value in values:
                    line = spelled.encode() + b": " + value + b"\r\n"
                    for target in harmless:
                        await lines.ask(head(b"GET", target, line))
                    await lines.ask(head(b"POST", b"/v1/completions?model=m", line + b"Content-Length: 2\r\n") + b"{}")
            assert not told(recorder.hits)
            assert recorder.asked == len({name, name.lower(), name.upper()}) * len(values) * (len(harmless) + 1)
            assert not any(seen.values(name.lower().encode()) for seen in world.engine.seen)

    on_uvloop(main)


@pytest.mark.parametrize("base_path", ["/root", "/v1", "/models", "/slots", "/dumper", "/hicache"])
def test_no_base_path_completes_one(base_path: str) -> None:
    """The path of the engine's own address goes before what is forwarded, and may be the first half of a route."""
    halves = (b"load", b"unload", b"storage-backend", b"storage-backend/clear")

    async def main() -> None:
        paths = [*ASKED, *halves]
        await check(
            [head(b"POST", b"/upstream/m/" + SPELLINGS[name](path), b"Content-Length: 0\r\n") for name in CHOSEN for path in paths],
            base_path=base_path,
        )

    on_uvloop(main)


def test_nothing_is_slipped_in_behind_an_upgrade() -> None:
    """Bytes behind a WebSocket's head are the socket's: an engine that declines it never gets them as a request."""

    async def main() -> None:
        for accepts in (False, True):
            recorder = Recorder(accepts_upgrades=accepts)
            async with a_world(recorder) as world, a_caller(world) as caller:
                await caller.send(head(b"GET", b"/upstream/m/ws", WEBSOCKET) + head(b"POST", b"/sleep", b"Content-Length: 0\r\n") * 2)
                answer = await caller.answer(upgrade=True)
                assert answer is not None
                assert answer.status == (101 if accepts else 200)
                if not accepts:
                    await caller.read_all()
                assert (recorder.asked, recorder.hits) == (1, [])

    on_uvloop(main)


def test_the_recorder_does_record() -> None:
    """Else zero hits would prove nothing."""
    for method, path, expected in (
        (b"POST", b"/x/%2573LEEP;a%2fb/./", "sleep"),
        (b"GET", b"/flush_cache", "flush_cache"),
        (b"DELETE", b"/slots/7", "slots/{}"),
        (b"GET", b"/slots/7", None),
        (b"POST", b"/files/sleep.txt", None),
    ):
        assert control_route((method,), (path,)) == expected
