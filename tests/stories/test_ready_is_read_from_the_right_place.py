"""B50: "ready" was read from the wrong place."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from .rig import Rig, fake, together

WARMUP = {"path": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "warm up"}]}}
WARM_S = 0.4
LOAD_S = 0.6


async def test_no_request_reaches_an_engine_before_it_can_serve(tmp_path: Path) -> None:
    """Six engines that look ready in six wrong ways: each is preloaded once and then answers 20 chats at once."""
    models = {
        "models-early": fake(ready_after=LOAD_S, models_early=1),
        "port-late": fake(listen_after=LOAD_S),
        "no-health": fake(ready_after=LOAD_S, health="404"),
        "slow-first": fake(warm_s=WARM_S, config={"warmup": WARMUP}),
        "no-root": fake(ready_after=0.1),
        "ipv6": fake(host="::1", config={"proxy": "http://localhost:${PORT}"}),
    }
    preload = {"hooks": {"on_startup": {"preload": list(models)}}}
    async with Rig(tmp_path, models, config=preload) as rig:
        await asyncio.gather(*(rig.wait_state(name, "ready") for name in models))
        replies = await together(*(rig.chat(name) for name in models for _ in range(20)))
        assert [reply for reply in replies if not reply.done] == []
        assert {name: rig.starts(name) for name in models} == dict.fromkeys(models, 1)
        for name in models:
            ready_at = rig.journal(name, "ready")[0]["at"]
            assert len(rig.inferences(name)) == 20 + (name == "slow-first")
            assert [line for line in rig.inferences(name) if line["at"] < ready_at] == []
            assert {line["target"] for line in rig.journal(name, "begin") if line["method"] == "GET"} <= {"/v1/models"}
        warmed_at = rig.journal("slow-first", "end")[0]["at"]
        assert rig.inferences("slow-first")[1]["at"] >= warmed_at
        ready_at = {name: rig.journal(name, "ready")[0]["at"] - rig.journal(name, "start")[0]["at"] for name in models}
        assert min(ready_at["models-early"], ready_at["port-late"], ready_at["no-health"]) >= LOAD_S * 0.9


async def test_a_stranger_on_the_port_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    """Another program took the port and answers 200 to everything: ours is started on another one, and the stranger sees no request."""
    async with Rig(tmp_path, {"a": fake(start_1__listen_after=0.4)}) as rig:
        asked: list[bytes] = []
        waiting = asyncio.ensure_future(rig.chat("a"))
        port = (await rig.wait_journal("a", "start"))["port"]
        stranger = await asyncio.start_server(impostor(asked), "127.0.0.1", port)
        async with stranger:
            assert (await waiting).done
            replies = await together(*(rig.chat("a") for _ in range(20)))
            assert [reply.status for reply in replies] == [200] * 20
            assert [line for line in asked if not line.startswith((b"GET /health", b"HEAD /health"))] == []
            ports = [line["port"] for line in rig.journal("a", "start")]
            assert (len(ports), ports[0] == port, ports[1] == port) == (2, True, False)
            stranger.close()


def impostor(asked: list[bytes]) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    return answer
