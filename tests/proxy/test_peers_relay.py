"""Requests that peers answer: routing, failover, keys, loops, and what misbehaving peers do to clients."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from greenroom.config.model import KeyConfig
from greenroom.proxy import peer_probe
from greenroom.proxy.admission import ModelRoute, Refusal
from greenroom.proxy.peer_door import Peers
from greenroom.proxy.peer_probe import PeerWatch, Probe
from tests.proxy.peer_world import (
    CHAT,
    FarWorld,
    TlsEngine,
    a_certificate,
    a_far_world,
    a_peer,
    by,
    dies,
    dies_after_its_head,
    dies_in_its_head,
    dies_in_its_stream,
    hangs,
    never_ends_its_head,
    told,
)
from tests.proxy.relay_world import (
    Answer,
    Engine,
    EngineSide,
    Seen,
    a_caller,
    a_catalog,
    answer_ok,
    get,
    on_asyncio,
    on_uvloop,
    post,
    until,
)
from tests.proxy.test_relay_tunnel import UPGRADE, Socket, echo


async def ask(far: FarWorld, body: bytes = CHAT, **more: Any) -> Answer:
    async with a_caller(far.world) as caller:
        return await caller.ask(post(body, **more))


def error(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.body)["error"]
    return found


# ------------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("run", [on_uvloop, on_asyncio])
def test_a_peer_answers_for_its_model(run: Any) -> None:
    """With its own name there, its key, its base path, and none of the client's secrets."""

    async def main() -> None:
        key = ((b"authorization", b"Bearer of-the-peer"), (b"x-api-key", b"of-the-peer"))
        peer = {"models": {"far": "org/far"}, "base": "/base", "key_headers": key, "route": {"strip_params": ("top_k",)}}
        async with a_far_world(by("p0"), peers=[peer], keys=["of-the-client"]) as far:
            body = b'{"model":"far","top_k":4,"messages":[]}'
            extra = "Authorization: Bearer of-the-client\r\nCookie: a=1\r\nOrigin: http://localhost\r\nX-Mine: 1\r\n"
            answer = await ask(far, body, extra=extra + "X-Greenroom-Deadline-Ms: 5000\r\n")
            seen = far.engines[0].seen[0]
            raw = bytes(far.engines[0].raw).lower()
        assert (answer.status, json.loads(answer.body)) == (200, {"by": "p0"})
        assert answer.headers[b"x-greenroom-peer"] == b"p0"
        assert (answer.headers[b"x-greenroom-model"], answer.headers[b"x-greenroom-start"]) == (b"far", b"hot")
        assert (seen.target, json.loads(seen.body)) == (b"/base/v1/chat/completions", {"model": "org/far", "messages": []})
        assert (seen.values(b"authorization"), seen.values(b"x-api-key")) == ([b"Bearer of-the-peer"], [b"of-the-peer"])
        assert seen.values(b"x-greenroom-hops") == [b"1"]
        assert 1 <= int(seen.values(b"x-greenroom-deadline-ms")[0]) <= 5000
        assert seen.values(b"x-mine") == [b"1"]
        assert seen.values(b"host") == [b"127.0.0.1:%d" % far.engines[0].port]
        assert b"of-the-client" not in raw
        assert b"cookie" not in raw
        assert b"origin" not in raw
        record = far.world.hooks.records[0]
        assert (record.model, record.peer, record.outcome, record.request) == ("far", "p0", "ok", 1)

    run(main)


def test_what_a_proxy_before_greenroom_says_of_its_clients_stays_here() -> None:
    """Addresses, names and tokens of a sign-on are for this machine; what a request itself asks for goes on."""

    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            names = (
                "X-Forwarded-For",
                "Forwarded",
                "Via",
                "X-Real-IP",
                "X-Forwarded-Access-Token",
                "X-Auth-Request-Email",
                "Cf-Access-Jwt-Assertion",
            )
            await ask(far, extra="".join(f"{name}: mine-alone\r\n" for name in names) + "X-Asked: yes\r\n")
            assert b"mine-alone" not in far.engines[0].raw
            assert far.engines[0].seen[0].values(b"x-asked") == [b"yes"]

    on_uvloop(main)


def test_without_keys_of_ours_a_clients_key_is_still_not_forwarded() -> None:
    """It may be meant for an engine of this machine; for another server it is not."""

    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            await ask(far, extra="Authorization: Bearer mine-alone\r\nX-Api-Key: mine-alone\r\nApi-Key: mine-alone\r\n")
            assert b"mine-alone" not in far.engines[0].raw

    on_uvloop(main)


def test_a_local_name_stays_local() -> None:
    """Also one that a peer has, too; that peer's is asked by peer/model."""

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[{"models": ["far", "m", "alias"]}]) as far:
            for name in ("m", "alias"):
                assert (await ask(far, b'{"model":"%b"}' % name.encode())).headers.get(b"x-greenroom-peer") is None
            assert far.engines[0].seen == []
            assert (await ask(far, b'{"model":"p0/m"}')).headers[b"x-greenroom-peer"] == b"p0"
            assert json.loads(far.engines[0].seen[0].body)["model"] == "m"

    on_uvloop(main)


def test_peers_of_one_model_are_asked_by_name_or_as_they_come() -> None:
    """peer/model asks just this one, and no other after it."""

    async def main() -> None:
        async with a_far_world(by("p0"), told(503)) as far:
            assert (await ask(far)).headers[b"x-greenroom-peer"] == b"p0"
            answer = await ask(far, b'{"model":"p1/far"}')
            assert (answer.status, answer.headers[b"x-greenroom-peer"], error(answer)["message"]) == (503, b"p1", "not now")
            unknown = await ask(far, b'{"model":"p2/far"}')
            assert unknown.status == 404
            assert "p0/far" not in unknown.body.decode()  # it is not listed, so it is not suggested

    on_uvloop(main)


def test_models_of_peers_are_listed_without_asking_them() -> None:
    """With their owner, each name once; the full names are not listed, but there."""

    async def main() -> None:
        async with a_far_world(by("p0"), by("p1"), peers=[{"models": ["far", "other"]}, {}]) as far:
            async with a_caller(far.world) as caller:
                listed = {one["id"]: one for one in json.loads((await caller.ask(get("/v1/models"))).body)["data"]}
                one = json.loads((await caller.ask(get("/v1/models/p1/far"))).body)
            assert {name: entry["owned_by"] for name, entry in listed.items()} == {
                "m": "greenroom",
                "org/name:tag": "greenroom",
                "far": "p0",
                "other": "p0",
            }
            assert listed["far"]["status"] == {"value": "loaded", "state": "peer"}
            assert (one["id"], one["owned_by"]) == ("p1/far", "p1")
            assert far.engines[0].connections == far.engines[1].connections == 0

    on_uvloop(main)


def test_scopes_of_keys_hold_for_peers_models() -> None:
    """A key of one model uses no other, and no other name of it, wherever it is served."""

    async def main() -> None:
        keys = [
            KeyConfig("k-far", "a", ("inference",), ("far",)),
            KeyConfig("k-m", "b", ("inference",), ("m",)),
            KeyConfig("k-p1", "c", ("inference",), ("p1/*",)),
        ]
        async with a_far_world(by("p0"), by("p1"), keys=keys) as far:
            found = {}
            for key in ("k-far", "k-m", "k-p1"):
                for name in ("far", "p0/far", "p1/far"):
                    body = b'{"model":"%b"}' % name.encode()
                    found[key, name] = (await ask(far, body, extra=f"Authorization: Bearer {key}\r\n")).status
            async with a_caller(far.world) as caller:
                listed = json.loads((await caller.ask(get("/v1/models", "Authorization: Bearer k-far\r\n"))).body)["data"]
        assert [pair for pair, status in found.items() if status == 200] == [("k-far", "far"), ("k-p1", "p1/far")]
        assert {status for pair, status in found.items() if status != 200} == {403}
        assert [one["id"] for one in listed] == ["far"]

    on_uvloop(main)


def test_only_inference_goes_to_a_peer_by_its_raw_path() -> None:
    """/upstream/MODEL/ leads to another server's inference routes and to nothing else there."""

    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            async with a_caller(far.world) as caller:
                assert (await caller.ask(post(CHAT, "/upstream/far/v1/chat/completions"))).status == 200
                for path in ("/slots", "/metrics", "/api/status", "/v1/models", "/health", "/", "/v1/audio/../../api/status"):
                    refused = await caller.ask(get(f"/upstream/far{path}"))
                    assert refused.status in (403, 404), path
            for path in ("/sleep", "/unload", "/api/models/far/unload", "/upstream/x/v1/chat/completions", "/v1/load_lora_adapter"):
                assert (await ask(far, target=f"/upstream/far{path}")).status in (403, 404), path
            assert [seen.target for seen in far.engines[0].seen] == [b"/v1/chat/completions"]

    on_uvloop(main)


def test_a_model_named_in_the_query_is_renamed_there() -> None:
    """As the WebSocket routes and some GETs name it."""

    async def main() -> None:
        async with a_far_world(by("p0"), peers=[{"models": {"far": "org/far &x"}}]) as far:
            async with a_caller(far.world) as caller:
                assert (await caller.ask(get("/v1/audio/voices?a=1&model=far"))).status == 200
            assert far.engines[0].seen[0].target == b"/v1/audio/voices?a=1&model=org/far%20%26x"

    on_uvloop(main)


# ------------------------------------------------------------------------------------------------------------ failover


@pytest.mark.parametrize("run", [on_uvloop, on_asyncio])
@pytest.mark.parametrize(
    "reply",
    [dies, dies_in_its_head, dies_after_its_head, told(502), told(503), told(504), told(429), told(307), told(401), never_ends_its_head],
)
def test_the_next_peer_answers_for_one_that_does_not(reply: Any, run: Any) -> None:
    """The same body, once; the client sees the second's answer alone."""

    async def main() -> None:
        async with a_far_world(reply, by("p1")) as far:
            answer = await ask(far, b'{"model":"far","n":1}' + b" " * 300_000)
            assert (answer.status, json.loads(answer.body), answer.complete) == (200, {"by": "p1"}, True)
            assert answer.headers[b"x-greenroom-peer"] == b"p1"
            assert [len(engine.seen) for engine in far.engines] == [1, 1]
            assert far.engines[0].seen[0].body == far.engines[1].seen[0].body
            assert far.standing("p0").outcomes == {"failed": 1}
            assert far.standing("p1").outcomes == {"ok": 1}
            assert [record.peer for record in far.world.hooks.records] == ["p1"]
            assert far.world.stats["memory_bytes_now"] == 0

    run(main)


def test_a_spooled_upload_is_sent_again() -> None:
    """A form of several MiB, from its temporary file."""

    async def main() -> None:
        async with a_far_world(told(503), by("p1"), peers=[{}, {"models": {"far": "renamed"}}]) as far:
            form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nfar\r\n--b\r\nContent-Disposition: form-data; name="file"; '
            form += b'filename="x"\r\n\r\n' + b"z" * 3_000_000 + b"\r\n--b--\r\n"
            answer = await ask(far, form, target="/v1/audio/transcriptions", content_type="multipart/form-data; boundary=b")
            assert json.loads(answer.body) == {"by": "p1"}
            first, second = far.engines[0].seen[0].body, far.engines[1].seen[0].body
            assert first == form
            assert second == form.replace(b"\r\nfar\r\n", b"\r\nrenamed\r\n")
            await until(lambda: far.world.stats["spool_files_now"] == 0)

    on_uvloop(main)


def test_an_answer_that_has_begun_is_never_begun_again() -> None:
    """The client gets an error event and no end; the second peer is not asked."""

    async def main() -> None:
        async with a_far_world(dies_in_its_stream, by("p1")) as far:
            answer = await ask(far)
            assert answer.status == 200
            assert not answer.complete
            assert answer.body.startswith(b"data: one\n\n")
            assert b'"message":"The peer p0 failed: it' in answer.body
            assert far.engines[1].seen == []
            assert far.standing().outcomes == {"engine_broke": 1}
            assert far.standing().failures == 1

    on_uvloop(main)


def test_a_peer_that_hangs_costs_its_time_and_no_more() -> None:
    """Then the next one is asked, and the hanging connection is gone."""

    async def main() -> None:
        async with a_far_world(hangs, by("p1"), peers=[{"response_s": 0.3}, {}]) as far:
            assert json.loads((await ask(far)).body) == {"by": "p1"}
            await until(far.engines[0].sides[0].gone.is_set)
            assert far.standing("p0").last_error == "nothing came from it for 0.3 s"
            assert far.standing("p0").is_up  # it is there, but does not serve this model

    on_uvloop(main)


def test_a_peer_that_falls_silent_within_its_answer_is_cut() -> None:
    """The client learns it; a client that reads slowly is no reason."""

    async def stalls(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n")
        await side.wait_gone()

    async def main() -> None:
        async with a_far_world(stalls, by("p1"), peers=[{"stall_s": 0.3}, {}]) as far:
            answer = await ask(far)
            assert not answer.complete
            assert b"peers.p0.stall_timeout" in answer.body
            await until(far.engines[0].sides[0].gone.is_set)
            assert far.engines[1].seen == []

    on_uvloop(main)


def test_a_peer_that_takes_no_body_is_left() -> None:
    """It reads the head and stops; the next one gets the whole body."""

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        await gone.wait()
        writer.transport.abort()

    gone = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1 << 10)
        async with a_far_world(by("p1")) as far:
            slow = a_peer("p0", server.sockets[0].getsockname()[1], priority=1, stall_s=0.3)
            far.take(slow, a_peer("p1", far.engines[0].port))
            body = b'{"model":"far","n":"' + b"x" * (20 << 20) + b'"}'
            assert json.loads((await ask(far, body)).body) == {"by": "p1"}
            assert far.engines[0].seen[0].body == body
            gone.set()
        server.close()

    on_uvloop(main)


def test_what_a_peer_says_of_its_own_host_is_not_said_of_ours() -> None:
    """Cookies, other addresses, orders to browsers."""
    extra = 'Set-Cookie: a=b\r\nAlt-Svc: h3=":443"\r\nStrict-Transport-Security: max-age=9\r\nClear-Site-Data: *\r\nX-Request-Id: 7\r\n'
    ours = "X-Greenroom-Model: other\r\nX-Greenroom-Peer: other\r\nAccess-Control-Allow-Origin: *\r\n"

    async def main() -> None:
        async with a_far_world(told(200, extra=extra + ours)) as far:
            answer = await ask(far)
            assert set(answer.headers) == {
                b"content-type",
                b"content-length",
                b"x-request-id",
                b"x-greenroom-model",
                b"x-greenroom-start",
                b"x-greenroom-wait-ms",
                b"x-greenroom-peer",
            }
            assert (answer.headers[b"x-greenroom-model"], answer.headers[b"x-greenroom-peer"]) == (b"far", b"p0")

    on_uvloop(main)


def test_what_the_only_peer_says_is_relayed() -> None:
    """Its refusal with its Retry-After, its error; but no redirect, and not its word about our key."""

    async def main() -> None:
        for status in (429, 503, 500, 502, 400, 404, 403):
            async with a_far_world(told(status, extra="Retry-After: 7\r\n")) as far:
                answer = await ask(far)
                assert (answer.status, error(answer)["message"], answer.headers[b"retry-after"]) == (status, "not now", b"7")
        for status, words in ((302, "a redirect, and those are not followed"), (401, "does not take the key of peers.p0")):
            async with a_far_world(told(status, extra="Location: http://169.254.169.254/\r\n")) as far:
                answer = await ask(far)
                assert (answer.status, error(answer)["code"]) == (502, "peer_failed")
                assert words in error(answer)["message"]
                assert b"location" not in answer.headers

    on_uvloop(main)


def test_all_that_failed_are_named() -> None:
    """In one sentence, with the reason of each."""

    async def main() -> None:
        async with a_far_world(dies, told(308)) as far:
            answer = await ask(far)
            assert answer.status == 502
            message = error(answer)["message"]
            assert message.startswith("No peer answered for far: p0: it ")
            assert "; p1: it answered 308" in message

    on_uvloop(main)


def test_a_rest_that_was_asked_for_is_kept() -> None:
    """429 with Retry-After: the other one gets what comes until then; models beside it are asked as before."""

    async def main() -> None:
        peers = [{"models": ["far", "beside"], "priority": 1}, {"models": ["far", "beside"]}]
        replies = [told(429, extra="Retry-After: 60\r\n"), by("p1")]
        async with a_far_world(*replies, peers=peers) as far:
            for _ in range(3):
                assert json.loads((await ask(far)).body) == {"by": "p1"}
            assert len(far.engines[0].seen) == 1
            assert far.standing("p0").failures == 0
            await ask(far, b'{"model":"beside"}')
            assert len(far.engines[0].seen) == 2

    on_uvloop(main)


def test_a_resting_peer_is_asked_before_nobody_answers() -> None:
    """Where the other is gone it may say for itself; the client hears when to come again."""

    async def main() -> None:
        async with a_far_world(told(429, extra="Retry-After: 60\r\n"), dies) as far:
            first = await ask(far)  # p0 asks for a rest, p1 dies
            assert (first.status, error(first)["code"], first.headers[b"retry-after"]) == (503, "peer_failed", b"60")
            assert "p0: it answered 429; p1: it " in error(first)["message"]
            again = await ask(far)  # p1 dies, p0 says it once more
            assert (again.status, again.headers[b"x-greenroom-peer"], again.headers[b"retry-after"]) == (429, b"p0", b"60")
            far.engines[1].reply = told(500)
            assert (await ask(far)).status == 500  # an answer of p1, if a bad one: p0 is left in peace
            far.engines[1].reply = told(502)
            assert (await ask(far)).status == 502
            assert len(far.engines[0].seen) == 2

    on_uvloop(main)


def test_a_circuit_opens_and_closes_again() -> None:
    """Three failures; then nobody asks it, clients hear when it is tried again; one trial brings it back."""

    async def main() -> None:
        async with a_far_world(dies) as far:
            for _ in range(3):
                assert (await ask(far)).status == 502
            refused = await ask(far)
            assert (refused.status, error(refused)["code"], refused.headers[b"retry-after"]) == (503, "peers_down", b"5")
            assert len(far.engines[0].seen) == 3
            standing = far.standing()
            assert not standing.is_up
            async with a_caller(far.world) as caller:
                listed = json.loads((await caller.ask(get("/v1/models/far"))).body)
            assert listed["status"] == {"value": "unloaded", "state": "peer_down"}

            real, late = far.door.clock, [5.1]
            far.door.clock = lambda: real() + late[0]
            assert (await ask(far)).status == 502  # the trial fails
            assert (await ask(far)).status == 503
            late[0] = 16.0
            far.engines[0].reply = by("p0")
            assert (await ask(far)).status == 200
            assert standing.is_up
            assert (await ask(far)).status == 200

    on_uvloop(main)


def test_a_client_that_leaves_the_trial_leaves_no_verdict() -> None:
    """The next request tries instead."""

    async def main() -> None:
        async with a_far_world(dies) as far:
            for _ in range(3):
                await ask(far)
            real = far.door.clock
            far.door.clock = lambda: real() + 6
            far.engines[0].reply = hangs
            async with a_caller(far.world) as caller:
                await caller.send(post(CHAT))
                await far.engines[0].wait_seen(4)
                assert (await ask(far)).status == 503  # one trial at a time
            await until(lambda: far.standing().outcomes["client_gone"] == 1)
            far.engines[0].reply = by("p0")
            assert (await ask(far)).status == 200

    on_uvloop(main)


# ---------------------------------------------------------------------------------------------------------- streaming


def test_a_client_that_hangs_up_ends_the_peers_work() -> None:
    """At once, not when the answer ends."""

    async def streams(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n")
        await side.wait_gone()

    async def main() -> None:
        async with a_far_world(streams) as far:
            async with a_caller(far.world) as caller:
                await caller.send(post(CHAT))
                await caller.read_until(b"data: one")
                assert far.standing().in_flight == 1
            await until(far.engines[0].sides[0].gone.is_set)
            assert far.standing().outcomes == {"client_gone": 1}
            assert far.standing().failures == 0

    on_uvloop(main)


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_slow_client_holds_its_peer_back(tmp_path: Path, is_secure: bool) -> None:
    """What is not read is not fetched, behind TLS as well; and slowness of the client is no silence of the peer."""
    sent = 0

    async def pours(seen: Seen, side: EngineSide) -> None:
        nonlocal sent
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64 << 4):
            await side.send(b"x" * (64 << 10))
            sent += 64 << 10

    async def main() -> None:
        certificate = a_certificate(tmp_path)
        engine = TlsEngine(pours, certificate) if is_secure else Engine(pours)
        async with engine, a_far_world() as far:
            tls = trusting(certificate[0]) if is_secure else None
            far.take(a_peer("p0", engine.port, tls=tls, host="localhost" if is_secure else "127.0.0.1", stall_s=0.2))
            async with a_caller(far.world) as caller:
                await caller.send(post(CHAT))
                await caller.read_until(b"xxx")
                before = -1
                while before != sent:  # until nothing moves any more
                    before = sent
                    await asyncio.sleep(0.5)
                assert sent < 40 << 20
                data = len(bytes(caller.raw).partition(b"\r\n\r\n")[2])
                while data < 64 << 20:
                    piece = await caller._read()
                    assert piece
                    data += len(piece)
            await until(lambda: far.standing().outcomes["ok"] == 1)

    on_uvloop(main)


def test_connections_to_a_peer_are_used_again() -> None:
    """And one that died meanwhile costs nobody anything."""

    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            for _ in range(3):
                assert (await ask(far)).status == 200
            assert far.engines[0].connections == 1
            far.engines[0].sides[0].fin()
            assert (await ask(far)).status == 200
            assert far.engines[0].connections == 2
            assert far.standing().failures == 0

    on_uvloop(main)


# --------------------------------------------------------------------------------------------------------------- loops


def test_a_request_that_went_in_circles_is_refused() -> None:
    """After three greenrooms, and when the count is no number; nobody is asked."""

    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            for value in ("3", "4", "999", "x", "-1"):
                answer = await ask(far, extra=f"X-Greenroom-Hops: {value}\r\n")
                assert (answer.status, error(answer)["code"]) == (508, "peer_loop")
            assert far.engines[0].connections == 0
            assert (await ask(far, extra="X-Greenroom-Hops: 2\r\n")).status == 200
            assert far.engines[0].seen[0].values(b"x-greenroom-hops") == [b"3"]
            assert far.door.open == {}

    on_uvloop(main)


def test_engines_of_this_machine_are_not_told_of_hops() -> None:
    """And serve requests that came a long way."""

    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            answer = await ask(far, b'{"model":"m"}', extra="X-Greenroom-Hops: 3\r\n")
            assert answer.status == 200
            assert b"hops" not in far.world.engine.raw.lower()

    on_uvloop(main)


# ------------------------------------------------------------------------------------------------------------ overflow


BUSY = Refusal(429, "queue_full", "256 requests already wait for m.", 12.0)


def test_a_peer_helps_out_where_this_machine_refuses() -> None:
    """With `overflow` alone, for refusals that say not now, for a client's own request."""

    async def main() -> None:
        sharing = {"models": {"m": "m-there"}, "overflow": True}
        async with a_far_world(by("p0"), peers=[sharing]) as far:
            local = far.world.admissions
            assert (await ask(far, b'{"model":"m"}')).headers.get(b"x-greenroom-peer") is None
            local.refusal = BUSY
            answer = await ask(far, b'{"model":"alias"}')
            assert (answer.status, answer.headers[b"x-greenroom-peer"], answer.headers[b"x-greenroom-model"]) == (200, b"p0", b"m")
            assert json.loads(far.engines[0].seen[0].body) == {"model": "m-there"}
            came_from_a_peer = await ask(far, b'{"model":"m"}', extra="X-Greenroom-Hops: 1\r\n")
            assert (came_from_a_peer.status, error(came_from_a_peer)["code"]) == (429, "queue_full")
            async with a_caller(far.world) as caller:
                assert (await caller.ask(get("/upstream/m/slots"))).status == 429  # raw paths stay here
            for refusal in (
                Refusal(503, "shutting_down", "Bye."),
                Refusal(404, "unknown_model", "Gone."),
                Refusal(410, "cancelled", "No."),
            ):
                local.refusal = refusal
                assert (await ask(far, b'{"model":"m"}')).status == refusal.status
            assert len(far.engines[0].seen) == 1
            assert far.world.hooks.records[1].peer == "p0"

    on_uvloop(main)


def test_without_overflow_a_local_model_is_refused_as_ever() -> None:
    async def main() -> None:
        async with a_far_world(by("p0"), peers=[{"models": ["m"]}]) as far:
            far.world.admissions.refusal = BUSY
            assert (await ask(far, b'{"model":"m"}')).status == 429
            assert far.engines[0].connections == 0

    on_uvloop(main)


def test_where_no_peer_helps_the_machines_own_refusal_is_told() -> None:
    """With its Retry-After, and what the peers said."""

    async def main() -> None:
        async with a_far_world(dies, peers=[{"models": ["m"], "overflow": True}]) as far:
            far.world.admissions.refusal = BUSY
            answer = await ask(far, b'{"model":"m"}')
            assert (answer.status, error(answer)["code"], answer.headers[b"retry-after"]) == (429, "queue_full", b"12")
            assert "256 requests already wait for m; no peer helped out: p0: it" in error(answer)["message"]

    on_uvloop(main)


def test_a_waiting_request_goes_to_a_peer_when_it_is_refused_at_last() -> None:
    """Streaming clients have had a comment by then; the answer follows it."""

    async def stream(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 25\r\n\r\ndata: one\n\ndata: [DONE]\n\n")

    async def main() -> None:
        limits = {"keepalive_after_s": 0.1}
        peers = [{"models": ["m"], "overflow": True}] * 2
        async with a_far_world(told(503), stream, peers=peers, limits=limits) as far:
            far.world.admissions.hold = True
            async with a_caller(far.world) as caller:
                await caller.send(post(b'{"model":"m","stream":true}'))
                ticket = await far.world.admissions.ticket()
                await caller.read_until(b": loading")
                ticket.waiter.refused(Refusal(503, "no_room", "No room."))
                raw = await caller.read_until(b"0\r\n\r\n")
            assert raw.count(b"HTTP/1.1 200 OK") == 1
            assert raw.endswith(b"\r\ndata: one\n\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            assert [len(engine.seen) for engine in far.engines] == [1, 1]

    on_uvloop(main)


def test_a_preferred_peer_is_asked_before_this_machine() -> None:
    """Which serves when the peer cannot, with the body as its own engine wants it; the model stays this machine's."""

    async def main() -> None:
        route = ModelRoute("m", use_model_name="m-here", strip_params=("n",))
        peers = [{"models": {"m": "m-there"}, "prefer": True}, {"models": {"m": "m-after"}, "overflow": True}]
        async with a_far_world(by("p0"), by("p1"), peers=peers, catalog=a_catalog(m=route)) as far:
            first = await ask(far, b'{"model":"m","n":1}')
            assert (first.headers[b"x-greenroom-peer"], far.world.admissions.tickets) == (b"p0", [])
            assert json.loads(far.engines[0].seen[0].body) == {"model": "m-there", "n": 1}

            for reply in (told(503), dies, told(302), told(429)):
                far.engines[0].reply = reply
                answer = await ask(far, b'{"model":"m","n":1}')
                assert (answer.status, answer.headers.get(b"x-greenroom-peer")) == (200, None)
                assert json.loads(far.world.engine.seen[-1].body) == {"model": "m-here"}
            assert [record.peer for record in far.world.hooks.records] == ["p0", "", "", "", ""]

            far.world.admissions.refusal = BUSY
            helped = await ask(far, b'{"model":"m","n":1}')
            assert (helped.status, helped.headers[b"x-greenroom-peer"]) == (200, b"p1")
            assert json.loads(far.engines[1].seen[0].body) == {"model": "m-after", "n": 1}
            count = len(far.engines[0].seen)
            assert (await ask(far, b'{"model":"m"}', extra="X-Greenroom-Hops: 1\r\n")).status == 429
            assert len(far.engines[0].seen) == count  # one that came from a peer is answered here, or not

    on_uvloop(main)


def test_rerank_of_a_shared_model_speaks_the_dialect_of_who_answers() -> None:
    """As it came to the peer, translated for the engine of this machine: both its tries of an unknown dialect."""

    async def picky(seen: Seen, side: EngineSide) -> None:
        if "texts" not in json.loads(seen.body):
            await told(422)(seen, side)
        else:
            await told(200, body=b'[{"index":0,"score":0.5}]')(seen, side)

    async def main() -> None:
        body = b'{"model":"m","query":"q","documents":["d"]}'
        async with a_far_world(told(503), peers=[{"models": ["m"], "prefer": True}]) as far:
            far.world.engine.reply = picky
            answer = await ask(far, body, target="/v1/rerank")
            assert json.loads(answer.body)["results"][0]["index"] == 0
            assert far.engines[0].seen[0].body == body
            assert [seen.target for seen in far.world.engine.seen] == [b"/v1/rerank", b"/rerank"]

    on_uvloop(main)


def test_who_waits_here_after_its_peer_failed_is_told_so() -> None:
    """Streaming clients get comments as ever."""

    async def main() -> None:
        peers = [{"models": ["m"], "prefer": True}]
        async with a_far_world(dies, peers=peers, limits={"keepalive_after_s": 0.1}) as far:
            far.world.admissions.hold = True
            async with a_caller(far.world) as caller:
                await caller.send(post(b'{"model":"m","stream":true}'))
                await caller.read_until(b": loading")
                far.world.admissions.admit(await far.world.admissions.ticket())
                await far.world.engine.wait_seen(1)
            await until(lambda: far.world.admissions.tickets[0].outcome is not None or far.world.hooks.records)

    on_uvloop(main)


def test_a_client_may_leave_while_this_machine_lets_it_wait() -> None:
    async def main() -> None:
        async with a_far_world(by("p0"), peers=[{"models": ["m"], "overflow": True}]) as far:
            far.world.admissions.hold = True
            async with a_caller(far.world) as caller:
                await caller.send(post(b'{"model":"m"}'))
                ticket = await far.world.admissions.ticket()
            await ticket.wait_for("cancel")
            assert far.engines[0].connections == 0

    on_uvloop(main)


def test_an_engine_that_died_before_its_answer_is_replaced_by_a_peer() -> None:
    async def main() -> None:
        async with a_far_world(by("p0"), peers=[{"models": ["m"], "overflow": True}]) as far:
            far.world.engine.reply = dies
            answer = await ask(far, b'{"model":"m"}')
            assert (answer.status, answer.headers[b"x-greenroom-peer"]) == (200, b"p0")

    on_uvloop(main)


# ----------------------------------------------------------------------------------------------------------------- TLS


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


@pytest.mark.parametrize("run", [on_uvloop, on_asyncio])
def test_a_peer_behind_tls(tmp_path: Path, run: Any) -> None:
    """By its own authority and its name; connections are used again; a client that leaves ends it."""

    async def main() -> None:
        certificate = a_certificate(tmp_path)
        async with TlsEngine(by("tls"), certificate) as engine, a_far_world() as far:
            far.take(a_peer("p0", engine.port, tls=trusting(certificate[0]), host="localhost"))
            for _ in range(2):
                answer = await ask(far, b'{"model":"far"}' + b" " * 200_000)
                assert (answer.status, json.loads(answer.body)) == (200, {"by": "tls"})
            assert engine.connections == 1
            engine.reply = hangs
            async with a_caller(far.world) as caller:
                await caller.send(post(CHAT))
                await engine.wait_seen(3)
            await until(engine.sides[0].gone.is_set)
            engine.reply = dies_in_its_stream
            broken = await ask(far)
            assert not broken.complete
            assert b"The peer p0 failed" in broken.body

    run(main)


@pytest.mark.parametrize("run", [on_uvloop, on_asyncio])
def test_a_certificate_that_is_not_trusted_gets_nothing(tmp_path: Path, run: Any) -> None:
    """Self-signed, of another name, or expired: no request is sent, the reason is told, the next peer answers."""

    async def main() -> None:
        good = a_certificate(tmp_path)
        (tmp_path / "old").mkdir()
        old = a_certificate(tmp_path / "old", days=-30)
        other = a_certificate(tmp_path, name="elsewhere.example")
        cases = [
            (good, ssl.create_default_context(), "self-signed certificate"),
            (other, trusting(other[0]), "Hostname mismatch, certificate is not valid for 'localhost'"),
            (old, trusting(old[0]), "certificate has expired"),
        ]
        for certificate, context, words in cases:
            async with TlsEngine(by("tls"), certificate) as engine, a_far_world() as far:
                far.take(a_peer("p0", engine.port, tls=context, host="localhost"))
                answer = await ask(far)
                assert (answer.status, error(answer)["code"]) == (502, "peer_failed")
                assert f"its certificate cannot be trusted: {words}" in error(answer)["message"]
                assert engine.seen == []

    run(main)


def test_plain_http_where_tls_is_expected_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_far_world(by("p0")) as far:
            far.take(a_peer("p0", far.engines[0].port, tls=ssl.create_default_context(), connect_s=2.0))
            answer = await ask(far)
            assert answer.status == 502
            assert far.engines[0].seen == []
            far.engines[0].faults.clear()  # h11 saw a TLS greeting

    on_uvloop(main)


class FarSocket(Socket):
    async def open(self, early: bytes = b"") -> dict[bytes, bytes]:
        upgrade = UPGRADE.replace("realtime, other", "realtime, openai-insecure-api-key.sk-of-the-client, other")
        await self.caller.send(get("/v1/realtime?model=far", upgrade) + early)
        answer = await self.caller.answer(upgrade=True)
        assert answer is not None
        assert answer.status == 101
        return answer.headers


@pytest.mark.parametrize("run", [on_uvloop, on_asyncio])
@pytest.mark.parametrize("is_secure", [False, True])
def test_a_websocket_to_a_peer(tmp_path: Path, is_secure: bool, run: Any) -> None:
    """Also behind TLS, which has no half-closed connections; a key among the sub-protocols stays here."""
    large = bytes(range(256)) * 4096

    async def main() -> None:
        certificate = a_certificate(tmp_path)
        engine = TlsEngine(echo, certificate) if is_secure else Engine(echo)
        async with engine, a_far_world() as far:
            tls = trusting(certificate[0]) if is_secure else None
            far.take(a_peer("p0", engine.port, {"far": "there"}, tls=tls, host="localhost" if is_secure else "127.0.0.1"))
            async with a_caller(far.world) as caller:
                socket = FarSocket(caller)
                headers = await socket.open()
                assert (headers[b"sec-websocket-protocol"], headers[b"x-greenroom-peer"]) == (b"realtime", b"p0")
                await socket.send(BytesMessage(large))
                assert await socket.message() == large
                await socket.send(CloseConnection(1000))
                assert isinstance(await socket.event(), CloseConnection)
                await until(lambda: far.standing().outcomes["ok"] == 1)
            async with a_caller(far.world) as caller:
                await FarSocket(caller).open()
                assert far.standing().in_flight == 1
            await until(lambda: far.standing().in_flight == 0)
            await until(lambda: all(side.gone.is_set() or side.writer.is_closing() for side in engine.sides))
            assert engine.seen[0].target == b"/v1/realtime?model=there"
            assert b"sk-of-the-client" not in engine.raw

    run(main)


def test_an_upgrade_that_one_peer_refuses_goes_to_the_next() -> None:
    async def main() -> None:
        async with a_far_world(told(503), echo) as far, a_caller(far.world) as caller:
            socket = FarSocket(caller)
            assert (await socket.open())[b"x-greenroom-peer"] == b"p1"
            await socket.send(TextMessage("hello"))
            assert await socket.message() == "hello"

    on_uvloop(main)


def test_clients_are_not_told_where_a_peer_lives() -> None:
    """Neither its address nor its port, when nobody listens there; also with several addresses."""

    async def main() -> None:
        async with a_far_world() as far:
            for host in ("127.0.0.1", "localhost", "no-such-host.invalid"):
                far.take(a_peer("p0", 9, host=host))
                answer = await ask(far)
                assert (answer.status, error(answer)["code"]) == (502, "peer_failed")
                message = error(answer)["message"]
                assert message.startswith("No peer answered for far: p0: it takes no connection (")
                assert not any(word in message for word in ("127.0.0.1", "::1", "localhost", "no-such-host", " 9"))

    on_uvloop(main)


# ------------------------------------------------------------------------------------------------------------- probes


async def probed(far: FarWorld, watch: PeerWatch, times: int = 1) -> None:
    for _ in range(times):
        watch.step(far.door.clock())
        await until(lambda: all(probe.is_over for probe in watch._running))
        watch.step(far.door.clock())


@pytest.mark.parametrize("reply", [answer_ok, told(404), told(401)])
def test_a_probe_finds_a_peer_that_is_there(reply: Any) -> None:
    """With its key, at its base path; who worked lately is not asked."""

    async def main() -> None:
        key = ((b"authorization", b"Bearer k"),)
        async with a_far_world(reply, peers=[{"base": "/b", "key_headers": key}]) as far:
            watch = PeerWatch(far.door, far.world.server.pool)
            for _ in range(3):
                await ask(far, b'{"model":"m"}')
            await probed(far, watch, 4)
            assert [(seen.method, seen.target) for seen in far.engines[0].seen] == [(b"GET", b"/b/health")]
            assert far.engines[0].seen[0].values(b"authorization") == [b"Bearer k"]
            assert far.standing().is_up
            assert far.standing().requests == 0

    on_uvloop(main)


@pytest.mark.parametrize("reply", [dies, told(500), told(503), dies_in_its_head, never_ends_its_head])
def test_probes_find_a_peer_that_is_gone_and_back(reply: Any) -> None:
    """Three in a row; then clients are refused without waiting for it, until a probe is answered."""

    async def main() -> None:
        async with a_far_world(reply) as far:
            watch = PeerWatch(far.door, far.world.server.pool, every_s=0.0)
            await probed(far, watch, 3)
            assert not far.standing().is_up
            assert (await ask(far)).status == 503
            far.engines[0].reply = by("p0")
            await probed(far, watch, 2)
            assert far.standing().is_up
            assert (await ask(far)).status == 200

    on_uvloop(main)


def test_a_peer_in_doubt_is_probed_sooner() -> None:
    """After its first failure every 2 s, until it is down; then every 15 s again."""

    async def main() -> None:
        async with a_far_world(dies) as far:
            watch = PeerWatch(far.door, far.world.server.pool)
            real, late = far.door.clock, [0.0]
            far.door.clock = lambda: real() + late[0]
            counts = []
            for later_s in (0.0, 1.0, 1.1, 2.1, 2.1, 10.0, 3.0):
                late[0] += later_s
                await probed(far, watch)
                counts.append(len(far.engines[0].seen))
            assert counts == [1, 1, 2, 3, 3, 3, 4]

    on_uvloop(main)


def test_a_probe_that_gets_no_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, with its connection; one that is fed without end as well."""

    async def endless(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not side.writer.is_closing():
            await side.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await asyncio.sleep(0)

    async def main() -> None:
        monkeypatch.setattr(peer_probe, "PROBE_S_MAX", 0.2)
        async with a_far_world(hangs) as far:
            watch = PeerWatch(far.door, far.world.server.pool)
            watch.step(far.door.clock())
            await far.engines[0].wait_seen(1)
            while not far.standing().health.failures:
                watch.step(far.door.clock())
                await asyncio.sleep(0.01)
            assert far.standing().last_error == "it sent no answer to GET /health within 0.2 s"
            await until(far.engines[0].sides[0].gone.is_set)
            far.engines[0].reply = endless
            probe = Probe(far.world.server.pool, far.door.peers.all[0], 1e9)
            await until(lambda: probe.is_over)
            assert probe.verdict == ""

    on_uvloop(main)


def test_a_watch_ends_with_its_task() -> None:
    """And leaves no connection."""

    async def main() -> None:
        async with a_far_world(hangs) as far:
            task = asyncio.ensure_future(PeerWatch(far.door, far.world.server.pool).run())
            await far.engines[0].wait_seen(1)
            task.cancel()
            await asyncio.wait({task})
            await until(far.engines[0].sides[0].gone.is_set)

    on_uvloop(main)


# -------------------------------------------------------------------------------------------------------------- reload


def test_a_reload_adds_and_removes_peers_and_cuts_no_stream() -> None:
    """What is known of one that stays is kept."""
    go_on = asyncio.Event()

    async def streams(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n")
        await go_on.wait()
        await side.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def main() -> None:
        async with a_far_world(streams, by("p1")) as far:
            first, second = far.door.peers.all
            far.take(first)
            async with a_caller(far.world) as caller:
                await caller.send(post(CHAT))
                await caller.read_until(b"data: one")
                before = far.standing("p0")
                far.take(first, a_peer("p1", far.engines[1].port, ["new"]))
                assert far.standing("p0") is before
                assert (await ask(far, b'{"model":"new"}')).status == 200
                far.take(second)
                assert (await ask(far)).headers[b"x-greenroom-peer"] == b"p1"
                far.take()
                assert (await ask(far)).status == 404
                go_on.set()
                assert b"[DONE]" in await caller.read_until(b"0\r\n\r\n")
            await until(lambda: before.in_flight == 0)

    on_uvloop(main)


def test_another_server_under_the_same_name_starts_anew() -> None:
    """What was found out about the first says nothing about it."""
    before = Peers([a_peer("p0", 1)])
    before.standings["p0"].failures = 9
    assert Peers([a_peer("p0", 1)], 5.0, before).standings["p0"].failures == 9
    assert Peers([a_peer("p0", 2)], 5.0, before).standings["p0"].failures == 0
