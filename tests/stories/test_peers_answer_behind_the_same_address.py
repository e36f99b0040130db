"""Two real greenrooms: models of the one are asked at the address of the other, whatever happens to the one."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.peer_world import TlsEngine, a_certificate, by

from .rig import DEVICE, WAIT_S_MAX, Rig, codes, fake, together

SECRET = "sk-of-the-peer-4711"
ENDLESS = {"stream": "600x0.05"}


def a_rig(folder: Path, *args: Any, config: Mapping[str, Any] | None = None, **more: Any) -> Rig:
    """Two of them take no port of each other."""
    folder.mkdir()
    first = 20_000 + os.getpid() * 40 % 20_000 + (20 if folder.name in ("near", "two") else 0)
    return Rig(folder, *args, config={"startPort": first, **(config or {})}, **more)


def peer(rig: Rig, *models: str | dict[str, str], **more: Any) -> dict[str, Any]:
    return {"proxy": f"http://127.0.0.1:{rig.port}", "apiKey": SECRET, "models": list(models), **more}


async def peer_status(rig: Rig, name: str = "box") -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in (await rig.status())["peers"] if one["id"] == name)
    return found


async def wait_peer(rig: Rig, wanted: Mapping[str, Any], name: str = "box", within_s: float = 2 * WAIT_S_MAX) -> dict[str, Any]:
    """Until the status says so of a peer."""
    deadline = time.monotonic() + within_s
    while not wanted.items() <= (now := await peer_status(rig, name)).items():
        assert time.monotonic() < deadline, f"{now} is not {wanted}"
        await asyncio.sleep(0.05)
    return now


def greenroom(*words: str) -> str:
    code = "import sys; from greenroom.cli import main; sys.argv[0] = 'greenroom'; main()"
    return subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True, timeout=60).stdout


async def test_a_stream_a_hang_up_a_kill_and_what_is_told_of_it(tmp_path: Path) -> None:
    """Events come one by one; who leaves frees the far engine; a killed peer is told as such, and is known to be down soon after."""
    async with a_rig(tmp_path / "far", {"big": fake(config={"parallel": 1}, parallel=1)}) as far:
        config = {"peers": {"box": peer(far, "big", {"renamed": "big"})}}
        async with a_rig(tmp_path / "near", {"small": fake()}, config=config, may_abort=True) as near:
            assert far.starts("big") == 0
            listed = {one["id"]: one["owned_by"] for one in (await near.api("GET", "/v1/models")).json["data"]}
            assert listed == {"small": "greenroom", "big": "box", "renamed": "box"}
            await wait_peer(near, {"healthy": True, "requests": 0})
            assert far.starts("big") == 0  # neither the list nor a probe starts anything

            whole = await near.chat("big", stream=True)
            assert whole.done
            assert whole.headers["x-greenroom-peer"] == "box"
            assert len(whole.arrivals) > 3
            other = await near.chat("renamed")
            assert (other.status, other.headers["x-greenroom-model"]) == (200, "renamed")
            assert codes(await together(near.chat("small"), near.chat("big"))) == [200, 200]

            stream = await near.ask("big", stream=True, fe=ENDLESS)
            await stream.events(5)
            assert (await peer_status(near))["in_flight"] == 1
            stream.close()
            await far.wait_journal("big", "gone")
            await wait_peer(near, {"in_flight": 0})

            rows = (await near.api("GET", "/api/requests?limit=50")).json["requests"]
            assert [(one["model"], one["outcome"]) for one in rows if one["model"] in ("big", "renamed")] == [
                ("big", "client_gone"),
                ("big", "ok"),
                ("renamed", "ok"),
                ("big", "ok"),
            ]
            figures = (await near.api("GET", "/metrics")).body.decode()
            assert 'greenroom_peer_up{peer="box"} 1\n' in figures
            assert 'greenroom_peer_requests_total{peer="box",outcome="ok"} 3\n' in figures
            assert 'greenroom_peer_requests_total{peer="box",outcome="client_gone"} 1\n' in figures
            shown = await asyncio.to_thread(greenroom, "ps", "--url", f"http://127.0.0.1:{near.port}")
            assert f"peer box  http://127.0.0.1:{far.port}  up for " in shown

            stream = await near.ask("big", stream=True, fe=ENDLESS)
            await stream.events(2)
            (running,) = (await near.api("GET", "/api/requests?outcome=open")).json["requests"]
            assert (running["model"], running["outcome"], running["code"]) == ("big", "running", "peer:box")
            assert (await near.api("DELETE", f"/api/requests/{running['id']}")).status == 200
            cancelled = await stream.rest()
            assert (cancelled.complete, cancelled.error["code"]) == (False, "cancelled")
            await far.wait_journal("big", "gone", 2)

            stream = await near.ask("big", stream=True, fe=ENDLESS)
            await stream.events(5)
            await far.kill_server()
            reply = await stream.rest()
            assert "The peer box failed" in reply.error["message"]
            assert not reply.complete
            refused = await near.chat("big")
            assert refused.status in (502, 503)
            assert (await near.chat("small")).status == 200
            for _ in range(2):
                await near.chat("big")
            down = await wait_peer(near, {"healthy": False})
            assert down["last_error"].startswith("it takes no connection")
            began = time.monotonic()
            refused = await near.chat("big")
            assert (refused.status, refused.error["code"]) == (503, "peers_down")
            assert int(refused.headers["retry-after"]) >= 1
            assert time.monotonic() - began < 2
            shown = await asyncio.to_thread(greenroom, "ps", "--url", f"http://127.0.0.1:{near.port}")
            assert "DOWN for " in shown
            everything = "".join(near.output) + json.dumps(await near.status()) + figures + shown
            assert SECRET not in everything
            assert SECRET not in (near.state_dir / "greenroom.log").read_text()
        await far.start_server()  # which takes away what the killed one left


async def test_two_greenrooms_that_name_each_other_do_not_send_a_request_in_circles(tmp_path: Path) -> None:
    """It is refused after three hops, with a sentence; what one of them really has is served by either."""
    async with (
        a_rig(tmp_path / "one", {"a": fake()}) as one,
        a_rig(tmp_path / "two", {"b": fake()}, config={"peers": {"one": peer(one, "a", "nowhere")}}) as two,
    ):
        one.write_config({"a": fake()}, peers={"two": peer(two, "b", "nowhere")})
        one.reload()
        await wait_peer(one, {"healthy": True}, "two")
        assert codes(await together(one.chat("b"), two.chat("a"), one.chat("a"), two.chat("b"))) == [200] * 4
        for rig in (one, two):
            lost = await rig.chat("nowhere")
            assert (lost.status, lost.error["code"]) == (508, "peer_loop")
            assert "has passed 3 greenrooms" in lost.error["message"]


async def test_a_raw_path_leads_to_no_other_model_of_a_peer(tmp_path: Path) -> None:
    """Whatever the body says: a peer serves more than what is named here."""
    async with (
        a_rig(tmp_path / "far", {"chat": fake(), "secret": fake()}) as far,
        a_rig(tmp_path / "near", {}, config={"peers": {"box": peer(far, {"small": "chat"})}}) as near,
    ):
        raw, kind = "/upstream/small/v1/chat/completions", {"Content-Type": "application/json"}
        bodies = (
            b'{"messages":[]}',
            b'{"messages":[],"model":"small"}',
            b'{"model":"secret","Model":"secret","messages":[],"model":"small"}',
        )
        for body in bodies:
            reply = await (await near.send("POST", raw, body, kind)).rest()
            assert (reply.status, reply.headers["x-greenroom-model"]) == (200, "small")
        for name in ("secret", "chat"):
            other = await (await near.ask(name, path=raw)).rest()
            assert (other.status, other.error["code"]) == (400, "two_models")
        assert (far.starts("chat"), far.starts("secret")) == (1, 0)


async def test_a_machine_without_room_hands_on_and_keeps_what_fits(tmp_path: Path) -> None:
    """One row in the ledger, with who answered; two full machines that help each other out pass a request on once."""
    async with a_rig(tmp_path / "far", {"m": fake(vram=1000)}) as far:
        config = {"peers": {"box": peer(far, "m", overflow=True)}}
        async with a_rig(tmp_path / "near", {"m": fake(vram=90_000), "fits": fake()}, config=config) as near:
            replies = await together(near.chat("m"), near.chat("m", stream=True), near.chat("fits"))
            assert codes(replies) == [200, 200, 200]
            assert [reply.headers.get("x-greenroom-peer") for reply in replies] == ["box", "box", None]
            assert all(reply.done for reply in replies)

            far.write_config({"m": fake(vram=90_000)}, peers={"near": peer(near, "m", overflow=True)})
            far.reload()
            await wait_peer(far, {"healthy": True}, "near")
            refused = await near.chat("m")
            assert (refused.status, refused.error["code"]) == (503, "too_big")
            assert (await peer_status(near))["requests"] == 3
            assert (await peer_status(far, "near"))["requests"] == 0

            deadline = time.monotonic() + WAIT_S_MAX
            while True:  # the ledger writes a second or two later
                rows = [one for one in (await near.api("GET", "/api/requests?limit=50")).json["requests"] if one["model"] == "m"]
                if [one.get("code") for one in rows[1:]] == ["peer:box", "peer:box"]:
                    break
                assert time.monotonic() < deadline, rows
                await asyncio.sleep(0.2)
            assert [(one["outcome"], one["status"]) for one in rows[1:]] == [("ok", 200), ("ok", 200)]


async def test_a_reload_moves_a_model_away_and_back_while_it_is_in_use(tmp_path: Path) -> None:
    """Model by model behind the same address: a stream of each place lives through both reloads."""
    async with (
        a_rig(tmp_path / "far", {"m": fake()}) as far,
        a_rig(tmp_path / "near", {"m": fake(), "n": fake()}) as near,
    ):
        at_home = await near.ask("n", stream=True, fe={"stream": "40x0.05"})
        await at_home.events(2)
        assert (await near.chat("m")).headers.get("x-greenroom-peer") is None
        near.write_config({"n": fake()}, peers={"box": peer(far, "m")})
        near.reload()
        await wait_peer(near, {"healthy": True})
        away = await near.ask("m", stream=True, fe={"stream": "40x0.05"})
        await away.events(2)
        assert away.reply.headers["x-greenroom-peer"] == "box"
        near.write_config({"m": fake(), "n": fake()}, peers={})
        await near.reloaded()
        assert (await near.chat("m")).headers.get("x-greenroom-peer") is None
        assert (await away.rest()).done
        assert (await at_home.rest()).done


async def test_a_peer_behind_tls_by_its_own_authority(tmp_path: Path) -> None:
    """From the configuration to the wire: with `tls_ca` it answers, without it nothing is sent and the reason is told."""
    certificate = a_certificate(tmp_path)
    async with TlsEngine(by("tls"), certificate) as engine:
        box = {"proxy": f"https://localhost:{engine.port}/base", "apiKey": SECRET, "models": ["m"], "tls_ca": str(certificate[0])}
        strange = {**box, "models": ["n"], "tls_ca": None}
        async with a_rig(tmp_path / "near", {}, config={"peers": {"box": box, "strange": strange}}) as near:
            reply = await near.chat("m")
            assert (reply.status, reply.json) == (200, {"by": "tls"})
            refused = await near.chat("n")
            assert (refused.status, refused.error["code"]) == (502, "peer_failed")
            assert "its certificate cannot be trusted: self-signed certificate" in refused.error["message"]
            chats = [seen for seen in engine.seen if seen.method == b"POST"]
            assert [(seen.target, seen.values(b"authorization")) for seen in chats] == [
                (b"/base/v1/chat/completions", [b"Bearer " + SECRET.encode()])
            ]
            await wait_peer(near, {"healthy": False}, "strange")  # probes find it, too


@pytest.mark.engine
async def test_a_real_llama_server_behind_two_greenrooms(tmp_path: Path, llama_server: Path, tiny_chat: Path) -> None:
    """Streamed and whole, with its tokens counted at both addresses; the first has no engine of its own."""
    entry = {"cmd": [str(llama_server), "-m", str(tiny_chat), "--port", "${PORT}"], "memory": "600MiB", "device": DEVICE}
    async with (
        a_rig(tmp_path / "far", {"tiny": entry}) as far,
        a_rig(tmp_path / "near", {}, config={"peers": {"box": peer(far, {"chat": "tiny"})}}) as near,
    ):
        whole = await near.chat("chat", max_tokens=8)
        assert whole.status == 200
        told = whole.json["usage"]
        stream = await near.chat("chat", stream=True, max_tokens=8)
        assert stream.done
        for rig, model in ((near, "chat"), (far, "tiny")):
            rows = (await rig.api("GET", "/api/requests?limit=10")).json["requests"]
            mine = [one for one in rows if one["model"] == model]
            assert len(mine) == 2
            assert (mine[-1]["tokens_in"], mine[-1]["tokens_out"]) == (told["prompt_tokens"], told["completion_tokens"])
        stranger = await near.ask("chat", stream=True, max_tokens=4000)
        await stranger.events(1)
        stranger.close()
        await wait_peer(near, {"in_flight": 0})
        deadline = time.monotonic() + WAIT_S_MAX
        while (await far.model("tiny"))["instances"][0]["in_flight"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await near.api("GET", "/metrics?engines=1")
