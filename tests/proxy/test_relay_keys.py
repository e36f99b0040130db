"""What a key is good for, through whole connections: routes by scopes by models, and that no key goes anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from greenroom.config.model import KeyConfig
from greenroom.proxy.admission import Catalog, ModelRoute
from greenroom.proxy.keys import Keys

from .relay_world import Answer, World, a_caller, a_world, on_uvloop, until

CHAT = "POST /v1/chat/completions"
LOOKS = ("GET /api/status", "HEAD /api/status", "GET /metrics", "GET /logs", "GET /logs/stream", "GET /running", "GET /api/nothing")
CHANGES = ("POST /api/models/m/load", "DELETE /api/models/m", "PUT /api/models/m", "GET /unload", "POST /unload", "POST /ui/x")
ASKS = (
    CHAT,
    "POST /v1/embeddings",
    "POST /v/embeddings",
    "GET /props?model=m",
    "GET /upstream/m/x",
    "POST /upstream/m/x",
    "GET /v1/audio/x?model=m",
)
OPEN = ("GET /health", "GET /ready", "OPTIONS /v1/chat/completions", "OPTIONS /api/status")
PAGE = ("GET /ui/", "GET /ui/main.js?v=1", "HEAD /ui/style.css", "GET /favicon.ico")
KEYS = (
    KeyConfig("sk-ask", "asker", ("inference",)),
    KeyConfig("sk-look", "looker", ("view",)),
    KeyConfig("sk-change", "changer", ("admin",)),
    KeyConfig("sk-all", "boss"),
)


@dataclass
class Control:
    """The control plane's side of its socket: the heads that came, and 200 for all of them."""

    path: str
    heads: list[bytes]

    def told(self, number: int = -1) -> dict[bytes, bytes]:
        lines = self.heads[number].split(b"\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines if line)}


@contextlib.asynccontextmanager
async def a_control(folder: Path) -> AsyncIterator[Control]:
    control = Control(str(folder / "control.sock"), [])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                control.heads.append(head)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + (b"" if head.startswith(b"HEAD") else b"ctrl"))
        writer.close()

    server = await asyncio.start_unix_server(answer, control.path)
    try:
        yield control
    finally:
        server.close()
        await asyncio.sleep(0.01)


def request(line: str, key: str = "", model: str = "m", extra: str = "") -> bytes:
    method, _, target = line.partition(" ")
    is_control = target.startswith(("/api/", "/unload", "/ui/"))
    body = json.dumps({"model": model} if model else {}).encode() if method == "POST" and not is_control else b""
    framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{shown}{extra}{framing}\r\n".encode() + body


async def ask(world: World, line: str, key: str = "", model: str = "m", extra: str = "") -> Answer:
    async with a_caller(world) as caller:
        return await caller.ask(request(line, key, model, extra))


def said(answer: Answer) -> tuple[int, str]:
    code = json.loads(answer.body)["error"]["code"] if answer.status >= 400 and answer.body else ""
    return answer.status, code


# -------------------------------------------------------------------------------------------------------------- scopes


def test_every_route_asks_for_its_scope(tmp_path: Path) -> None:
    """Routes by keys: 200 where the key has it, 403 with the missing scope where not, 401 without a key."""

    async def main() -> None:
        async with a_control(tmp_path) as control, a_world(keys=KEYS, control_socket=control.path) as world:
            for scope, lines in (("inference", ASKS), ("view", LOOKS), ("admin", CHANGES)):
                for line in lines:
                    assert (await ask(world, line)).status == 401, line
                    assert (await ask(world, line, "sk-wrong")).status == 401, line
                    for key in KEYS:
                        answer = await ask(world, line, key.key)
                        assert answer.status == (200 if scope in key.scopes else 403), (line, key.name)
                        if answer.status == 403 and not line.startswith("HEAD"):
                            error = json.loads(answer.body)["error"]
                            assert (error["code"], error["type"]) == ("scope_missing", "permission_error")
                            assert f"lacks the scope {scope}, which" in error["message"]
                            assert "sk-" not in error["message"]
            assert len(world.admissions.tickets) == 2 * len(ASKS)

    on_uvloop(main)


def test_some_routes_ask_for_less(tmp_path: Path) -> None:
    """Health, preflights and the page's files need no key; lists of models take two scopes; /api/me and mistakes any."""

    async def main() -> None:
        async with a_control(tmp_path) as control, a_world(keys=KEYS, control_socket=control.path) as world:
            for line in (*OPEN, *PAGE):
                assert (await ask(world, line)).status in (200, 204), line
                assert (await ask(world, line, "sk-wrong")).status in (200, 204), line
            for line, status in (("GET /", 301), ("GET /ui", 301), ("GET /upstream/", 301)):
                assert (await ask(world, line)).status == status
            for line in ("GET /ui/../api/status", "GET /ui/%2e%2e/api/status", "GET /ui/..%2fapi/status", "GET /UI/", "POST /ui/"):
                assert (await ask(world, line)).status == 401, line
            for line in ("GET /v1/models", "GET /models", "GET /v1/models/m"):
                answers = [(await ask(world, line, key.key)).status for key in KEYS]
                assert (answers, (await ask(world, line)).status) == ([200, 200, 403, 200], 401)
            for line, status in (("GET /api/me", 200), ("GET /nothing", 404), ("GET /v1/chat/completions", 405), ("POST /api/me", 403)):
                assert (await ask(world, line)).status == 401
                assert (await ask(world, line, "sk-look")).status == status

    on_uvloop(main)


def test_a_page_asks_for_the_key_itself() -> None:
    """A browser's own dialog comes where its user opens an address, never over a script of the page."""
    browser = "User-Agent: Mozilla/5.0\r\nAccept: "

    async def main() -> None:
        async with a_world(keys=KEYS) as world:
            for extra, asks in (("", True), ("User-Agent: curl/8\r\nAccept: */*\r\n", True), (f"{browser}text/html,*/*\r\n", True)):
                async with a_caller(world) as caller:
                    await caller.ask(request("GET /api/status", extra=extra))
                    assert (b"Basic realm" in caller.raw) is asks
            for accept in ("*/*", "text/event-stream", "application/json"):
                async with a_caller(world) as caller:
                    assert (await caller.ask(request("GET /api/events", extra=f"{browser}{accept}\r\n"))).status == 401
                    assert (b"Basic realm" in caller.raw, b"Bearer realm" in caller.raw) == (False, True)

    on_uvloop(main)


def test_the_control_plane_is_told_who_asks_and_nobody_can_pretend(tmp_path: Path) -> None:
    """Name and scopes of the key, never the key; what a client says of itself is dropped, however it is spelt."""
    lies = (
        "X-Greenroom-Key-Name: boss\r\nx-greenroom-scopes: admin\r\nX-GREENROOM-SCOPES: admin\r\n"
        "Connection: keep-alive, x-greenroom-key-name, x-greenroom-scopes\r\nX-Api-Key: sk-wrong\r\nApi-Key: sk-look\r\n"
    )

    async def main() -> None:
        keys = (*KEYS, KeyConfig("sk-odd", "Größe: 1 €", ("view", "admin")))
        async with a_control(tmp_path) as control, a_world(keys=keys, control_socket=control.path) as world:
            assert (await ask(world, "GET /api/me", "sk-look", extra=lies)).status == 200
            head = control.heads[-1].lower()
            assert (head.count(b"x-greenroom-key-name"), head.count(b"x-greenroom-scopes"), head.count(b"sk-")) == (1, 1, 0)
            assert (control.told()[b"x-greenroom-key-name"], control.told()[b"x-greenroom-scopes"]) == (b"looker", b"view")
            assert (await ask(world, "GET /api/me", "sk-odd")).status == 200
            assert control.told()[b"x-greenroom-key-name"] == b"Gr%C3%B6%C3%9Fe: 1 %E2%82%AC"
            assert (await ask(world, "GET /ui/", "sk-all", extra=lies)).status == 200
            assert b"greenroom" not in control.heads[-1]
            world.plane.keys = Keys()
            assert (await ask(world, "POST /api/models/m/load", extra=lies)).status == 200
            assert b"x-greenroom-key-name" not in control.told()
            assert control.told()[b"x-greenroom-scopes"] == b"inference,view,admin"
            assert (await ask(world, "GET /ui/", extra=lies)).status == 200
            assert b"greenroom" not in control.heads[-1]

    on_uvloop(main)


# -------------------------------------------------------------------------------------------------------------- models


def a_catalog() -> Catalog:
    routes = {name: ModelRoute(name, aliases) for name, aliases in (("chat-7b", ("chat",)), ("chat-70b", ()), ("embed", ("e[1]",)))}
    names = {name: name for name in routes} | {"chat": "chat-7b", "e[1]": "embed"}
    return Catalog(models=routes, names=names, include_aliases_in_list=True)


@pytest.mark.parametrize(
    ("models", "may"),
    [
        (None, {"chat-7b", "chat-70b", "embed"}),
        (("chat-7b",), {"chat-7b"}),
        (("chat",), {"chat-7b"}),
        (("chat-*",), {"chat-7b", "chat-70b"}),
        (("chat-7?",), {"chat-7b"}),
        (("chat-7*", "embed"), {"chat-7b", "chat-70b", "embed"}),
        (("e[1]",), {"embed"}),
        (("CHAT*", "gone"), set()),
        (("*",), {"chat-7b", "chat-70b", "embed"}),
    ],
)
def test_a_key_uses_and_sees_its_models_only(models: tuple[str, ...] | None, may: set[str]) -> None:
    """By id or alias, in body, query and path: the same answer; lists and hints name nothing else."""
    asked = {"chat-7b": "chat-7b", "chat": "chat-7b", "chat-70b": "chat-70b", "embed": "embed", "e[1]": "embed"}

    async def main() -> None:
        async with a_world(keys=[KeyConfig("sk-team", "team", models=models)], catalog=a_catalog()) as world:
            for name, model in asked.items():
                wanted = (200, "") if model in may else (403, "key_not_allowed")
                quoted = name.replace("[", "%5B").replace("]", "%5D")
                assert said(await ask(world, CHAT, "sk-team", name)) == wanted
                assert said(await ask(world, f"GET /upstream/{quoted}/x", "sk-team")) == wanted
                assert said(await ask(world, f"GET /props?model={quoted}", "sk-team")) == wanted
                assert said(await ask(world, f"GET /v1/models/{quoted}", "sk-team")) == wanted
            assert {ticket.wish.model for ticket in world.admissions.tickets} == may
            listed = json.loads((await ask(world, "GET /v1/models", "sk-team")).body)["data"]
            assert {entry["id"] for entry in listed} == {name for name, model in asked.items() if model in may}
            for line, model in ((CHAT, "chat-71b"), ("GET /upstream/chat-71b/x", ""), ("GET /v1/models/chat-71b", "")):
                answer = await ask(world, line, "sk-team", model)
                assert said(answer) == (404, "model_not_found")
                told = json.loads(answer.body)["error"]["message"]
                assert [model for model in ("chat-7b", "chat-70b") if model not in may and model in told] == []

    on_uvloop(main)


def test_the_default_model_is_no_way_around() -> None:
    """A request without a model is for the default one."""

    async def main() -> None:
        catalog = Catalog(models=a_catalog().models, names=a_catalog().names, default_model="embed")
        async with a_world(keys=[KeyConfig("sk-team", "team", models=("chat",))], catalog=catalog) as world:
            assert said(await ask(world, CHAT, "sk-team", "")) == (403, "key_not_allowed")
            assert not world.admissions.tickets

    on_uvloop(main)


# --------------------------------------------------------------------------------------------------------------- limit


def test_a_key_has_only_so_many_requests_at_once() -> None:
    """Waiting ones count; each end makes room, also a hang-up; other keys are not touched; a reload forgets nobody."""
    keys = [KeyConfig("sk-two", "two", limit=2), KeyConfig("sk-all", "all")]

    async def main() -> None:
        async with a_world(keys=keys) as world, a_caller(world) as first, a_caller(world) as second:
            world.admissions.hold = True
            await first.send(request(CHAT, "sk-two"))
            await second.send(request(CHAT, "sk-two"))
            await world.admissions.ticket(1)
            for _ in range(2):
                answer = await ask(world, CHAT, "sk-two")
                assert (said(answer), answer.headers[b"retry-after"]) == ((429, "key_limit"), b"1")
                world.plane.keys = Keys(keys, world.plane.keys)
            assert len(world.admissions.tickets) == 2
            second.writer.transport.abort()
            await until(lambda: world.admissions.tickets[1].named("cancel"))
            world.admissions.hold = False
            assert said(await ask(world, CHAT, "sk-two")) == (200, "")
            assert said(await ask(world, CHAT, "sk-all")) == (200, "")
            world.admissions.admit(world.admissions.tickets[0])
            answer = await first.answer()
            assert answer is not None
            assert answer.status == 200
            for _ in range(5):
                assert said(await ask(world, CHAT, "sk-two")) == (200, "")
                assert said(await ask(world, CHAT, "sk-two", "nothing")) == (404, "model_not_found")

    on_uvloop(main)


# -------------------------------------------------------------------------------------------------------- no key leaks


def test_engines_and_records_get_names_and_never_keys() -> None:
    """Whatever headers a key came in; a refused request is told under its key's name, too."""

    async def main() -> None:
        async with a_world(keys=[KeyConfig("sk-team", "team", ("inference",))]) as world:
            for extra in (
                "Authorization: Bearer sk-team\r\n",
                "X-API-Key: sk-team\r\nApi-Key: sk-team\r\nProxy-Authorization: sk-team\r\n",
            ):
                assert said(await ask(world, CHAT, extra=extra)) == (200, "")
            assert said(await ask(world, "GET /api/status", "sk-team")) == (403, "scope_missing")
            assert said(await ask(world, CHAT, "sk-wrong")) == (401, "bad_key")
            assert b"sk-team" not in world.engine.raw
            records = world.hooks.records
            assert [record.client for record in records] == ["team", "team", "team", "127.0.0.1"]
            assert {ticket.wish.client for ticket in world.admissions.tickets} == {"team"}
            assert "sk-" not in repr(records)

    on_uvloop(main)


def test_a_reload_counts_from_the_next_request_on_an_open_connection() -> None:
    """Scopes, models and the key itself; also when the connection presented the same before."""

    async def main() -> None:
        async with a_world(keys=[KeyConfig("sk-team", "team")]) as world, a_caller(world) as caller:
            assert said(await caller.ask(request(CHAT, "sk-team"))) == (200, "")
            world.plane.keys = Keys([KeyConfig("sk-team", "team", models=("org/*",))], world.plane.keys)
            assert said(await caller.ask(request(CHAT, "sk-team"))) == (403, "key_not_allowed")
            assert said(await caller.ask(request(CHAT, "sk-team", "org/name:tag"))) == (200, "")
            world.plane.keys = Keys([KeyConfig("sk-team", "renamed")], world.plane.keys)
            assert said(await caller.ask(request(CHAT, "sk-team"))) == (200, "")
            world.plane.keys = Keys([KeyConfig("sk-other", "team")], world.plane.keys)
            assert said(await caller.ask(request(CHAT, "sk-team"))) == (401, "bad_key")
            assert [record.client for record in world.hooks.records] == ["team", "team", "team", "renamed", "127.0.0.1"]

    on_uvloop(main)
