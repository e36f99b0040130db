"""A peer serves several models: whatever a client writes, it is asked for the one that was looked at here."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

import pytest
from wsproto.events import TextMessage

from greenroom.config.model import KeyConfig
from greenroom.proxy.admission import Catalog, ModelRoute

from .peer_world import FarWorld, a_far_world, a_peer, by
from .relay_world import Answer, Seen, a_caller, get, on_uvloop, post, until
from .test_peers_relay import UPGRADE, FarSocket, echo, error

KEYS = (KeyConfig("k-far", "team", ("inference",), ("far",)), KeyConfig("k-all", "boss"))
AS_TEAM = "Authorization: Bearer k-far\r\n"
PEER = {"models": {"far": "there", "second": "secret"}}
FORM = "multipart/form-data; boundary=b"
URLENCODED = "application/x-www-form-urlencoded"


def field(name: str, value: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def a_file(size: int) -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size + b"\r\n"


async def ask(far: FarWorld, request: bytes) -> Answer:
    async with a_caller(far.world) as caller:
        return await caller.ask(request)


def models_in(seen: Seen) -> set[str]:
    """Every model that some reader may find in a request."""
    query = seen.target.partition(b"?")[2].decode()
    found = {value for mark in "&;" for name, value in parse_qsl(query, separator=mark) if name.strip().lower() == "model"}
    (kind,) = seen.values(b"content-type") or [b""]
    if kind == b"application/json":
        pairs = json.loads(seen.body, object_pairs_hook=list)
        found |= {value for name, value in pairs if name.lower() == "model"}
    elif kind == URLENCODED.encode():
        found |= {value for name, value in parse_qsl(seen.body.decode()) if name.lower() == "model"}
    elif kind:
        assert kind == b'multipart/form-data; boundary="b"'
        parts = seen.body.split(b"--b\r\n")[1:]
        found |= {part.split(b"\r\n")[2].decode() for part in parts if b'name="model"' in part.lower()}
    return found


CHAT = "/v1/chat/completions"
JSON = "application/json"
TRICKS = {
    "two keys": (CHAT, b'{"model":"secret","model":"far"}', JSON, ""),
    "two keys, one escaped": (CHAT, b'{"mod\\u0065l":"secret","model":"far"}', JSON, ""),
    "another case": (CHAT, b'{"model":"far","Model":"secret","MODEL":"secret"}', JSON, ""),
    "query": (CHAT + "?model=secret", b'{"model":"far"}', JSON, ""),
    "encoded query": (CHAT + "?%6dodel=secret", b'{"model":"far"}', JSON, ""),
    "query behind a semicolon": (CHAT + "?a=1;model=secret", b'{"model":"far"}', JSON, ""),
    "JSON that is a form as well": (CHAT, b'{"model":"far","x":"&model=secret&"}', URLENCODED, ""),
    "JSON of two types": (CHAT, b'{"model":"far","x":"&model=secret&"}', URLENCODED, f"Content-Type: {JSON}\r\n"),
    "form with query": ("/v1/audio/transcriptions?model=secret", field("model", "far") + b"--b--\r\n", FORM, ""),
    "form with two boundaries": ("/v1/audio/transcriptions", field("model", "far") + b"--b--\r\n", FORM + "; boundary=c", ""),
    "form, urlencoded": ("/v1/audio/speech", b"%6dodel=far&x=1", URLENCODED + "; charset=utf-16", ""),
    "raw path, no name": ("/upstream/far" + CHAT, b'{"messages":[]}', JSON, ""),
    "raw path, null": ("/upstream/far" + CHAT, b'{"model":null}', JSON, ""),
    "raw path, same name": ("/upstream/far" + CHAT, b'{"model":"secret","model":"far"}', JSON, ""),
    "raw path, no type": ("/upstream/far/tokenize", b'{"content":"x"}', "", ""),
    "raw path, JSON that is a form as well": ("/upstream/far/completion", b'{"x":"&model=secret&"}', URLENCODED, ""),
    "raw path, form": ("/upstream/far/v1/audio/transcriptions", a_file(10) + b"--b--\r\n", FORM, ""),
    "raw path, spooled form": ("/upstream/far/v1/audio/transcriptions", a_file(600_000) + b"--b--\r\n", FORM, ""),
    "raw path, urlencoded": ("/upstream/far/v1/audio/speech", b"x=1", URLENCODED, ""),
}


@pytest.mark.parametrize("there", ["there", "far"])
@pytest.mark.parametrize("trick", TRICKS)
def test_a_peer_is_asked_for_the_model_that_was_looked_at(trick: str, there: str) -> None:
    """In the one way that every reader understands alike, whether its name there is another or the same."""
    target, body, content_type, extra = TRICKS[trick]

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[{"models": {"far": there, "second": "secret"}}], keys=KEYS) as far:
            answer = await ask(far, post(body, target, AS_TEAM + extra, content_type))
            assert (answer.status, answer.headers[b"x-greenroom-model"]) == (200, b"far")
            (seen,) = far.engines[0].seen
        assert models_in(seen) == {there}
        assert seen.target.startswith(target.removeprefix("/upstream/far").partition("?")[0].encode())
        assert seen.values(b"content-length") == [b"%d" % len(seen.body)]

    on_uvloop(main)


REFUSED = {
    "key": (CHAT, b'{"model":"second"}', JSON, 403, "key_not_allowed"),
    "key, raw path": ("/upstream/second" + CHAT, b'{"model":"second"}', JSON, 403, "key_not_allowed"),
    "key, last of two": (CHAT, b'{"model":"far","model":"second"}', JSON, 403, "key_not_allowed"),
    "raw path, other name": ("/upstream/far" + CHAT, b'{"model":"second"}', JSON, 400, "two_models"),
    "raw path, last of two": ("/upstream/far" + CHAT, b'{"model":"far","model":"second"}', JSON, 400, "two_models"),
    "raw path, name there": ("/upstream/far" + CHAT, b'{"model":"secret"}', JSON, 400, "two_models"),
    "raw path, query": ("/upstream/far" + CHAT + "?model=second", b"{}", JSON, 400, "two_models"),
    "raw path, form": ("/upstream/far/v1/images/edits", field("model", "second") + b"--b--\r\n", FORM, 400, "two_models"),
    "raw path, no JSON": ("/upstream/far" + CHAT, b"model=second", JSON, 400, "bad_json"),
    "two fields": ("/v1/images/edits", field("model", "secret") + field("model", "far") + b"--b--\r\n", FORM, 400, "bad_model"),
    "two fields, urlencoded": ("/v1/images/edits", b"model=secret&model=far", URLENCODED, 400, "bad_model"),
    "another case, urlencoded": ("/v1/images/edits", b"Model=secret&model=far", URLENCODED, 400, "bad_model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_who_names_another_model_is_refused_and_no_peer_hears_of_it(case: str) -> None:
    """By name, by path, or by both at once."""
    target, body, content_type, status, code = REFUSED[case]

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[PEER], keys=KEYS) as far:
            answer = await ask(far, post(body, target, AS_TEAM, content_type))
            assert (answer.status, error(answer)["code"]) == (status, code)
            assert far.engines[0].connections == 0

    on_uvloop(main)


def test_a_compressed_body_does_not_pass_unread_by_the_raw_path() -> None:
    """As little as by the path itself."""

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[PEER]) as far:
            answer = await ask(far, post(b"\x1f\x8b", "/upstream/far" + CHAT, "Content-Encoding: gzip\r\n"))
            assert (answer.status, error(answer)["code"]) == (415, "unsupported_encoding")
            assert far.engines[0].connections == 0

    on_uvloop(main)


def test_a_request_without_a_body_names_the_model_in_its_query() -> None:
    """By the raw path, and for the default model: else the peer would take its own default."""

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[PEER]) as far:
            for target in ("/upstream/far/props", "/upstream/far/props?autoload=0", "/upstream/far/v1/audio/voices?model=far"):
                assert (await ask(far, get(target))).status == 200
            far.world.plane.catalog = Catalog(far.world.plane.catalog.models, far.world.plane.catalog.names, default_model="far")
            assert (await ask(far, get("/v1/audio/voices"))).status == 200
            assert [seen.target for seen in far.engines[0].seen] == [
                b"/props?model=there",
                b"/props?autoload=0&model=there",
                b"/v1/audio/voices?model=there",
                b"/v1/audio/voices?model=there",
            ]

    on_uvloop(main)


def test_filters_hold_by_the_raw_path() -> None:
    """What a peer is never to be told, and always."""

    async def main() -> None:
        route = {"strip_params": ("top_k",), "set_params": {"user": "lab"}, "set_params_by_id": {"far": {"n": 1}}}
        async with a_far_world(by("p0"), peers=[{**PEER, "route": route}]) as far:
            assert (await ask(far, post(b'{"top_k":4,"x":1}', "/upstream/far" + CHAT))).status == 200
            assert json.loads(far.engines[0].seen[0].body) == {"x": 1, "model": "there", "user": "lab", "n": 1}

    on_uvloop(main)


def test_the_next_peer_is_asked_for_its_own_name() -> None:
    """A body that was written for one is written anew for the other, forms as well."""

    async def main() -> None:
        async with a_far_world(by("p0"), by("p1")) as far:
            gone = a_peer("p0", 1, {"far": "one"}, priority=1)
            far.take(gone, a_peer("p1", far.engines[1].port, {"far": "two"}))
            form = a_file(300_000) + b"--b--\r\n"
            for body, content_type in ((b"{}", JSON), (form, FORM)):
                assert (await ask(far, post(body, "/upstream/far/v1/images/edits", "", content_type))).status == 200
            assert [models_in(seen) for seen in far.engines[1].seen] == [{"two"}, {"two"}]

    on_uvloop(main)


def test_headers_by_which_gateways_choose_a_model_stay_here() -> None:
    """The body says it."""

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[PEER]) as far:
            names = ("X-Gateway-Model-Name", "X-Gateway-Base-Model-Name", "X-Gateway-Destination-Endpoint", "x-ai-eg-model")
            extra = "".join(f"{name}: secret\r\n" for name in (*names, "X-Prefiller-Host-Port"))
            assert (await ask(far, post(b'{"model":"far"}', extra=extra))).status == 200
            assert b"secret" not in far.engines[0].raw

    on_uvloop(main)


class RawSocket(FarSocket):
    target = "/upstream/far/v1/realtime"

    async def open(self, early: bytes = b"") -> dict[bytes, bytes]:
        await self.caller.send(get(self.target, UPGRADE + AS_TEAM) + early)
        answer = await self.caller.answer(upgrade=True)
        assert answer is not None
        return answer.headers if answer.status == 101 else {b"": b"%d" % answer.status}


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("/upstream/far/v1/realtime", b"/v1/realtime?model=there"),
        ("/upstream/far/v1/realtime?intent=x", b"/v1/realtime?intent=x&model=there"),
        ("/v1/realtime?model=far&%6dodel=secret", b"/v1/realtime?model=there&model=there"),
        ("/upstream/far/v1/realtime?model=second", None),
        ("/v1/realtime?model=second", None),
    ],
)
def test_a_websocket_is_opened_for_the_model_that_was_looked_at(target: str, seen: bytes | None) -> None:
    """In its target; what is said in it later is between client and peer."""

    async def main() -> None:
        async with a_far_world(echo, peers=[PEER], keys=KEYS) as far, a_caller(far.world) as caller:
            socket = RawSocket(caller)
            socket.target = target
            opened = await socket.open()
            if seen is None:
                assert opened[b""] in (b"400", b"403")
                assert far.engines[0].connections == 0
                return
            await socket.send(TextMessage("hello"))
            assert await socket.message() == "hello"
            assert far.engines[0].seen[0].target == seen

    on_uvloop(main)


def test_a_model_that_moves_to_a_peer_takes_no_raw_request_with_it() -> None:
    """Its head was read while an engine of this machine had the model, its body came after the reload."""

    async def main() -> None:
        async with a_far_world(by("p0"), keys=KEYS) as far, a_caller(far.world) as caller:
            head, _, body = post(b'{"model":"secret"}', "/upstream/m/any/path", "Authorization: Bearer k-all\r\n").partition(b"\r\n\r\n")
            await caller.send(head + b"\r\n\r\n")
            await until(lambda: far.world.stats["requests"])
            far._local = Catalog(models={}, names={})
            far.take(a_peer("p0", far.engines[0].port, {"m": "there"}))
            await caller.send(body)
            answer = await caller.answer()
            assert answer is not None
            assert (answer.status, error(answer)["code"], answer.headers[b"retry-after"]) == (503, "moved", b"1")
            assert far.engines[0].connections == 0

    on_uvloop(main)


@pytest.mark.parametrize("how", ["prefer", "overflow"])
def test_what_is_asked_of_an_engine_raw_goes_to_no_peer(how: str) -> None:
    """Not where peers have the model as well: the body is the engine's affair, and arrives as it is."""

    async def main() -> None:
        more: dict[str, Any] = {how: True}
        key = [KeyConfig("k-far", "team", ("inference",), ("m",))]
        async with a_far_world(by("p0"), keys=key, catalog=Catalog({"m": ModelRoute("m", use_model_name="x")}, {"m": "m"})) as far:
            far.take(a_peer("p0", far.engines[0].port, {"m": "there"}, **more))
            body = b'{"model":"one-of-its-adapters",\n"model":"another"}'
            assert (await ask(far, post(body, "/upstream/m" + CHAT, AS_TEAM))).status == 200
            assert [seen.body for seen in far.world.engine.seen] == [body]
            assert far.engines[0].connections == 0

    on_uvloop(main)
