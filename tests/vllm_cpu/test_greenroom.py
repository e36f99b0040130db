"""greenroom in front of true vLLM servers that share a pretend GPU with room for one of them awake."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.stories.rig import Reply, Rig, until

from .rig import PretendGpu, rss_mib, tree, weights_mib

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

KV_MIB = 512
ONE_AWAKE_MIB = 2000  # of two that need 1,394 each, and 100 asleep
START_S_MAX = 400  # on a loaded machine
ROUNDS = 25


class House(Rig):
    """A greenroom on a pretend GPU."""

    def __init__(self, home: Path, gpu: PretendGpu, models: dict[str, Any], **config: Any) -> None:
        self.gpu = gpu
        # What vLLM leaves behind there is its own affair.  Its sockets lie there, and a socket's path has 107 characters at most.
        self._scratch = tempfile.TemporaryDirectory(prefix="gr-", ignore_cleanup_errors=True)
        entries = {
            name: {"healthCheckTimeout": START_S_MAX, **entry, "env": {**entry["env"], "TMPDIR": self._scratch.name}}
            for name, entry in models.items()
        }
        devices = {"devices": {"gpu0": {"headroom": "0MiB"}}, **config}
        super().__init__(home, entries, budget_mib=gpu.total_mib, config=devices, env=gpu.env)

    async def __aexit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await super().__aexit__(kind, fault, trace)
        finally:
            self._scratch.cleanup()

    def check_latency(self) -> None:
        """Says nothing here: a server that starts takes both cores for itself."""

    def is_garbage(self, text: str) -> bool:
        """Models with random weights say anything; tests compare what they say."""
        return False

    async def greedy(self, model: str, path: str = "/v1/completions") -> Reply:
        asked = {"prompt": "good evening", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return await (await self.ask(model, path=path, **asked)).rest()

    async def rerank(self, model: str) -> Reply:
        return await (await self.ask(model, path="/v1/rerank", query="the actor", documents=["the green room"])).rest()

    async def workers(self, model: str) -> list[int]:
        """The processes of a model that hold weights."""
        (instance,) = (await self.model(model))["instances"]
        return sorted(set(tree(instance["pid"])) & set(self.gpu.ledger.held()))


def tokens(reply: Reply) -> list[int]:
    assert reply.status == 200, reply.body
    found: list[int] = reply.json["choices"][0]["token_ids"]
    return found


async def told(house: House, kind: str) -> list[str]:
    return [event["text"] for event in await house.events() if event["kind"] == kind]


@pytest.mark.parametrize("level", [1, 2])
async def test_two_models_alternate_and_never_answer_otherwise(tmp_path: Path, level: int) -> None:
    """Fifty requests: each model is started once and sleeps in between; answers stay the same, and the card is never overbooked."""
    with PretendGpu(tmp_path, ONE_AWAKE_MIB) as gpu:
        models = {name: gpu.model_entry(name, seed=seed, kv_mib=KV_MIB, sleep=level) for seed, name in enumerate("ab", 1)}
        async with House(tmp_path, gpu, models) as house:
            first = {}
            awake_mib = {}
            for name in "ab":
                first[name] = tokens(await house.greedy(name))
                awake_mib[name] = rss_mib(await house.workers(name))
            replies = [(name, await house.greedy(name)) for _ in range(ROUNDS) for name in "ab"]
            await house.wait_state("a", "asleep")
            asleep_mib = rss_mib(await house.workers("a"))
            held = gpu.ledger.held()
            states = {name: await house.model(name) for name in "ab"}
            print(f"level {level}: RSS {awake_mib['a']} -> {asleep_mib} MiB", await told(house, "ready"), await told(house, "asleep"))

            assert first["a"] != first["b"]
            assert [tokens(reply) for _, reply in replies] == [first[name] for name, _ in replies]
            assert {reply.headers["x-greenroom-start"] for _, reply in replies} == {"wake"}
            assert {name: (state["starts"], state["wake_failures"]) for name, state in states.items()} == {"a": (1, 0), "b": (1, 0)}
            assert states["a"]["wakes"] == states["b"]["wakes"] == ROUNDS
            assert awake_mib["a"] - asleep_mib >= 0.9 * (weights_mib("mid-1") + KV_MIB)
            assert sum(held.values()) <= gpu.ledger.total
            assert states["a"]["instances"][0]["reserved_mib"] == gpu.context_mib
        assert not gpu.ledger.held()


@pytest.mark.parametrize("level", [1, 2])
async def test_a_reranker_scores_the_same_after_its_wake(tmp_path: Path, level: int) -> None:
    """Its canary is a score; it shares the card with a chat model."""
    with PretendGpu(tmp_path, 900, context_mib=0) as gpu:  # an encoder holds its weights alone, and here they are small
        models = {
            "chat": gpu.model_entry("chat", kind="tiny", kv_mib=KV_MIB, sleep=level),
            "rank": gpu.model_entry("rank", kind="rerank", kv_mib=KV_MIB, sleep=level),
        }
        async with House(tmp_path, gpu, models) as house:
            scores, texts = [], []
            for _ in range(4):
                ranked = await house.rerank("rank")
                assert ranked.status == 200, ranked.body
                scores.append(ranked.json["results"][0]["relevance_score"])
                texts.append(tokens(await house.greedy("chat")))

            assert len(set(scores)) == 1
            assert texts == texts[:1] * 4
            assert (await house.model("rank"))["starts"] == 1


async def test_a_wake_without_room_ends_in_an_answer_or_a_reason(tmp_path: Path) -> None:
    """Another program takes the card unseen: the wake fails, so does the start, and the client is told; when it goes, all is served."""
    with PretendGpu(tmp_path, 1100) as gpu:
        models = {name: gpu.model_entry(name, kind="tiny", seed=seed, kv_mib=KV_MIB, sleep=1) for seed, name in enumerate("ab", 1)}
        async with House(tmp_path, gpu, models, scheduling={"room_wait_s": 5}) as house:
            expected = tokens(await house.greedy("a"))
            tokens(await house.greedy("b"))
            assert (await house.api("POST", "/api/models/b/sleep?wait=60")).status == 200
            show, gpu.show = gpu.show, lambda: None  # type: ignore[method-assign]  # the driver shows it too late
            with gpu.taken_outside(500):
                refused = await house.greedy("a")
                failures = (await house.model("a"))["wake_failures"]
                gpu.show = show  # type: ignore[method-assign]
                gpu.show()
                seen = await house.greedy("a")
            served = await house.greedy("a")
            for _ in range(60):
                if served.status == 200:
                    break
                await asyncio.sleep(float(served.headers.get("retry-after", "1")))
                served = await house.greedy("a")

            assert refused.status == 503, refused.body
            assert failures >= 1
            assert seen.status == 503
            assert "MiB" in seen.json["error"]["message"] or "GiB" in seen.json["error"]["message"]
            assert tokens(served) == expected


async def test_a_sleeper_whose_worker_was_killed_is_started_again(tmp_path: Path) -> None:
    """Its API server goes on for seconds, healthy or not; who asks meanwhile is served all the same."""
    with PretendGpu(tmp_path, 1100) as gpu:
        models = {"a": gpu.model_entry("a", kind="tiny", kv_mib=KV_MIB, sleep=1)}
        async with House(tmp_path, gpu, models) as house:
            expected = tokens(await house.greedy("a"))
            assert (await house.api("POST", "/api/models/a/sleep?wait=60")).status == 200
            (worker,) = await house.workers("a")
            os.kill(worker, signal.SIGKILL)

            assert tokens(await house.greedy("a")) == expected
            assert (await house.model("a"))["starts"] == 2


async def test_a_killed_supervisor_leaves_no_sleeper(tmp_path: Path) -> None:
    """Engines end with it, asleep or not; the next one starts anew."""
    with PretendGpu(tmp_path, 1100) as gpu:
        models = {name: gpu.model_entry(name, kind="tiny", seed=seed, kv_mib=KV_MIB, sleep=1) for seed, name in enumerate("ab", 1)}
        async with House(tmp_path, gpu, models) as house:
            expected = tokens(await house.greedy("a"))
            tokens(await house.greedy("b"))
            pids = [pid for name in "ab" for pid in tree((await house.model(name))["instances"][0]["pid"])]
            await house.kill_server()
            await until(lambda: not gpu.ledger.held() and not any(map(is_alive, pids)), "every engine is gone", 60)
            await house.start_server()

            assert tokens(await house.greedy("a")) == expected


async def ended_requests(house: House, count: int) -> list[dict[str, Any]]:
    """The requests that greenroom tells of, oldest first, once so many have ended: each is told a moment after its last byte."""
    deadline = time.monotonic() + 30
    while True:
        rows = (await house.api("GET", "/api/requests")).json["requests"]
        if len(rows) >= count and {row["outcome"] for row in rows} == {"ok"}:
            return sorted(rows, key=lambda row: int(row["id"]))
        assert time.monotonic() < deadline, f"not {count} ended requests: {rows}"
        await asyncio.sleep(0.05)


def usage_of(reply: Reply) -> tuple[int, int] | None:
    """What the engine itself said that it read and wrote; None when it did not."""
    assert reply.done, reply
    parts = [json.loads(payload) for payload in reply.tokens] if reply.is_stream else [reply.json]
    told = [part["usage"] for part in parts if part.get("usage")]
    return (told[-1]["prompt_tokens"], told[-1]["completion_tokens"]) if told else None


async def test_tokens_told_are_those_that_the_engine_counted(tmp_path: Path) -> None:
    """Chat and completions, whole, long, as streams, of several choices; a stream without its usage tells none, and none is guessed."""
    with PretendGpu(tmp_path, 1100) as gpu:
        async with House(tmp_path, gpu, {"a": gpu.model_entry("a", kind="tiny", kv_mib=KV_MIB)}) as house:
            with_usage = {"stream": True, "stream_options": {"include_usage": True}}
            each_time = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            forms: list[dict[str, Any]] = [
                {},
                {"max_tokens": 1},
                {"n": 3},
                {"logprobs": True, "top_logprobs": 5, "max_tokens": 200},  # the counts come after tens of KiB
                with_usage,
                {**with_usage, "max_tokens": 200},
                {**with_usage, "n": 3},
                each_time,
                {"stream": True},
            ]
            said, asked = [], []
            for path, what in (("/v1/chat/completions", "chat"), ("/v1/completions", "completion")):
                for n, form in enumerate(forms):
                    prompt = "good evening " * (n + 1)  # so that no two ask for the same
                    words = {"prompt": prompt} if what == "completion" else {"messages": [{"role": "user", "content": prompt}]}
                    if what == "completion" and "logprobs" in form:
                        form = {"logprobs": 5, "max_tokens": form["max_tokens"]}
                    reply = await (await house.ask("a", path=path, **{"max_tokens": 7 + n, "ignore_eos": True, **words, **form})).rest()
                    said.append(usage_of(reply))
                    asked.append(f"{path} {form}")
            rows = await ended_requests(house, len(said))

            told = [(row["tokens_in"], row["tokens_out"]) for row in rows]
            assert dict(zip(asked, told, strict=True)) == {name: counts or (None, None) for name, counts in zip(asked, said, strict=True)}
            assert [name for name, counts in zip(asked, said, strict=True) if counts is None] == [asked[8], asked[17]]
            assert len({counts for counts in said if counts}) > 10, "counts that differ, or equality says nothing"


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
