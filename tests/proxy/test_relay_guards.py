"""Names and keys together, through whole connections (B42)."""

from __future__ import annotations

import json

from greenroom.proxy.guards import Guards

from .relay_world import Answer, a_caller, a_world, on_uvloop

KEY = "Authorization: Bearer k1\r\n"
CHAT = b'{"model":"m"}'


def chat(host: str, extra: str = "") -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(CHAT)}\r\n{extra}\r\n".encode() + CHAT


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"] if answer.status >= 400 else ""


def test_with_keys_a_client_may_call_us_by_any_name() -> None:
    """`my-box` of a LAN, `llama-swap` of a cluster: the key opens, the name does not matter; without the key neither opens."""

    async def main() -> None:
        async with a_world(keys=["k1"]) as world:
            world.plane.guards = Guards("0.0.0.0", (), ("*",), check_host=False)
            async with a_caller(world) as caller:
                for host in ("my-box:8080", "llama-swap:8080", "my-box:8080", "10.0.0.5"):
                    assert said(await caller.ask(chat(host, KEY))) == (200, "")
            async with a_caller(world) as caller:
                assert said(await caller.ask(chat("evil.example"))) == (401, "bad_key")
            async with a_caller(world) as caller:  # a page that re-pointed its own name
                assert said(await caller.ask(chat("evil.example", "Origin: http://evil.example\r\n"))) == (401, "bad_key")
            async with a_caller(world) as caller:
                line = b"GET /api/status HTTP/1.1\r\nHost: my-box\r\nOrigin: http://page.elsewhere\r\n" + KEY.encode() + b"\r\n"
                assert said(await caller.ask(line)) == (403, "foreign_origin")
            assert len(world.admissions.tickets) == 4

    on_uvloop(main)


def test_without_keys_another_name_is_refused() -> None:
    """Nobody is asked; our own name on the same address is served."""

    async def main() -> None:
        async with a_world() as world:
            async with a_caller(world) as caller:
                assert said(await caller.ask(chat("localhost:8080"))) == (200, "")
                assert said(await caller.ask(chat("my-box:8080"))) == (403, "unknown_host")
            assert len(world.admissions.tickets) == 1

    on_uvloop(main)


def test_a_connection_is_judged_again_when_the_rules_change() -> None:
    """What was remembered of its host under keys does not outlive the keys."""

    async def main() -> None:
        async with a_world() as world:
            world.plane.guards = Guards("127.0.0.1", (), ("*",), check_host=False)
            async with a_caller(world) as caller:
                assert said(await caller.ask(chat("my-box:8080"))) == (200, "")
                world.plane.guards = Guards("127.0.0.1", (), ("*",))
                assert said(await caller.ask(chat("my-box:8080"))) == (403, "unknown_host")
            world.plane.guards = Guards("127.0.0.1", (), ("*",), check_host=False)
            async with a_caller(world) as caller:
                assert said(await caller.ask(chat("my-box:8080"))) == (200, "")

    on_uvloop(main)
