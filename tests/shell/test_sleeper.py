"""Recipes are followed as they are written, and no success is believed before the engine says and shows it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from greenroom.engines.base import AsleepCheck, Call, Canary, Readiness, SleepRecipe
from greenroom.host.calls import Line
from greenroom.shell import sleeper as module
from greenroom.shell.sleeper import Sleeper, Trouble, alike, numbers_of, shown

CHECK = AsleepCheck("/is_sleeping")
RECIPE = SleepRecipe(2, (Call("/sleep?level=2"),), (Call("/wake?tags=weights"), Call("/reload"), Call("/wake?tags=kv_cache")), CHECK)
TEXT = Canary("/v1/completions", b'{"prompt":"1 2 3"}', "choices.0.text")
VECTOR = Canary("/v1/embeddings", b'{"input":"1 2 3"}', "data.0.embedding")

Answer = tuple[int, Any]


@dataclass
class Engine:
    """An engine in this process: what it answers on each path, and what it was asked."""

    answers: dict[str, Callable[[], Answer] | Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    asleep: bool = False
    heard: list[str] = field(default_factory=list)
    pause_s: float = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        target = request.raw_path
        if request.path == "/is_sleeping":
            return web.json_response({"is_sleeping": self.asleep})
        self.asked.append(target)
        answer = self.answers.get(target, self.answers.get(request.path, (200, {})))
        status, value = answer() if callable(answer) else answer
        self.asleep = status < 300 and (request.path == "/sleep" or (self.asleep and target != "/wake?tags=kv_cache"))
        return web.json_response(value, status=status)

    def says_text(self, text: str) -> Answer:
        return 200, {"choices": [{"text": text}]}

    @asynccontextmanager
    async def sleeper(self, warmup: str | None = None) -> AsyncIterator[Sleeper]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            line = Line("127.0.0.1", runner.addresses[0][1])
            yield Sleeper(line, line, Readiness("/health", warmup_path=warmup, warmup_body=b'{"a":1}'), lambda: self.heard)
        finally:
            await runner.cleanup()


def trouble(raised: pytest.ExceptionInfo[Trouble]) -> tuple[str, bool]:
    return raised.value.why, raised.value.no_room


# ------------------------------------------------------------------------------------------------------------- recipes


async def test_a_recipe_is_followed_in_order_and_its_end_is_asked_for() -> None:
    """Each call once; awake is what it says itself."""
    engine = Engine()
    async with engine.sleeper() as sleeper:
        await sleeper.fall_asleep(RECIPE, 5)
        assert (engine.asleep, await sleeper.says_asleep(RECIPE)) == (True, True)
        await sleeper.wake_up(RECIPE, 5, compare=False)
        assert (engine.asleep, await sleeper.says_asleep(RECIPE)) == (False, False)

    assert engine.asked == ["/sleep?level=2", "/wake?tags=weights", "/reload", "/wake?tags=kv_cache"]


async def test_a_call_that_fails_ends_the_recipe() -> None:
    """Nothing after it is called: the cache must not come back to weights that were not read."""
    engine = Engine({"/reload": (500, {"detail": "no such file"})}, asleep=True)
    async with engine.sleeper() as sleeper:
        with pytest.raises(Trouble) as raised:
            await sleeper.wake_up(RECIPE, 5, compare=False)

    assert trouble(raised) == ('POST /reload answered 500 {"detail": "no such file"}', False)
    assert engine.asked == ["/wake?tags=weights", "/reload"]


@pytest.mark.parametrize(("status", "fails"), [(404, False), (405, False), (501, False), (500, True), (400, True)])
async def test_an_optional_call_may_be_unknown_and_nothing_else(status: int, fails: bool) -> None:
    """An engine that has no such route has nothing to do there; one that has it and fails is told."""
    recipe = SleepRecipe(1, (), (Call("/wake_up"), Call("/reset_prefix_cache", optional=True)))
    engine = Engine({"/reset_prefix_cache": (status, {})})
    async with engine.sleeper() as sleeper:
        if fails:
            with pytest.raises(Trouble, match=f"answered {status}"):
                await sleeper.wake_up(recipe, 5, compare=False)
        else:
            await sleeper.wake_up(recipe, 5, compare=False)

    assert engine.asked == ["/wake_up", "/reset_prefix_cache"]


async def test_a_call_that_is_not_optional_must_be_known() -> None:
    """404 on the sleep route itself is a failure."""
    engine = Engine({"/sleep": (404, {"detail": "Not Found"})})
    async with engine.sleeper() as sleeper:
        with pytest.raises(Trouble, match="answered 404"):
            await sleeper.fall_asleep(RECIPE, 5)


@pytest.mark.parametrize("falls", [True, False])
async def test_a_success_that_changes_nothing_is_not_believed(falls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call answers 200 and the engine says the opposite: after a while that is what counts."""
    monkeypatch.setattr(module, "SETTLE_S_MAX", 0.2)
    recipe = SleepRecipe(1, (Call("/nothing"),), (Call("/nothing"),), CHECK)
    engine = Engine(asleep=not falls)
    async with engine.sleeper() as sleeper:
        with pytest.raises(Trouble, match=f"still says that it is {'awake' if falls else 'asleep'}"):
            await (sleeper.fall_asleep(recipe, 5) if falls else sleeper.wake_up(recipe, 5, compare=False))


async def test_what_it_says_may_take_a_moment() -> None:
    """Asked until it changes."""
    engine, looks = Engine(), []

    async def late(request: web.Request) -> web.Response:
        looks.append(1)
        return web.json_response({"is_sleeping": len(looks) > 3})

    engine.handle, usual = engine.handle, engine.handle  # type: ignore[method-assign]

    async def route(request: web.Request) -> web.Response:
        return await (late if request.path == "/is_sleeping" else usual)(request)

    engine.handle = route  # type: ignore[method-assign]
    async with engine.sleeper() as sleeper:
        await sleeper.fall_asleep(RECIPE, 5)
    assert len(looks) == 4


async def test_a_check_may_ask_for_any_value_deep_in_the_answer() -> None:
    """As declared by the operator."""
    recipe = SleepRecipe(1, (Call("/sleep"),), (), AsleepCheck("/state", "engine.mode", "resting"))
    async with Engine({"/state": (200, {"engine": {"mode": "resting"}})}).sleeper() as sleeper:
        await sleeper.fall_asleep(recipe, 5)


async def test_a_check_that_fails_is_told() -> None:
    """Without it nothing is known."""
    recipe = SleepRecipe(1, (Call("/sleep"),), (), AsleepCheck("/state"))
    async with Engine({"/state": (500, {"detail": "dead"})}).sleeper() as sleeper:
        with pytest.raises(Trouble, match="GET /state answered 500"):
            await sleeper.fall_asleep(recipe, 5)
        assert await sleeper.says_asleep(recipe) is False


async def test_all_calls_together_have_one_time_limit() -> None:
    """Each may be short: their sum counts."""
    async with slow_engine(0.25) as sleeper:
        began_at = time.monotonic()
        with pytest.raises(Trouble, match="was not answered in"):
            await sleeper.wake_up(RECIPE, 0.6, compare=False)
        assert 0.5 < time.monotonic() - began_at < 3
        assert sleeper.awaited == "POST /wake?tags=kv_cache was not answered"


@asynccontextmanager
async def slow_engine(pause_s: float) -> AsyncIterator[Sleeper]:
    """One that takes so long for each call."""
    import asyncio

    engine = Engine(asleep=True)
    usual = engine.handle

    async def late(request: web.Request) -> web.Response:
        await asyncio.sleep(pause_s)
        return await usual(request)

    engine.handle = late  # type: ignore[method-assign]
    async with engine.sleeper() as sleeper:
        yield sleeper


# ------------------------------------------------------------------------------------------------------------- no room


@pytest.mark.parametrize(
    ("said", "heard", "no_room"),
    [
        ({"detail": "CUDA out of memory. Tried to allocate 1.50 GiB"}, [], True),
        ({"error": {"message": "Call to wake_up method failed: CUDA Error: out of memory at cumem_allocator.cpp:139"}}, [], True),
        ({"detail": "Internal Server Error"}, ["INFO one", "ERROR CUDA Error: out of memory at cumem_allocator.cpp:139"], True),
        ({"detail": "Internal Server Error"}, ["INFO one"], False),
        ({"detail": "illegal memory access"}, [], False),
    ],
)
async def test_want_of_memory_is_told_from_other_faults(said: dict[str, Any], heard: list[str], no_room: bool) -> None:
    """By what it answers, or by what it prints meanwhile."""
    engine = Engine({"/wake": (500, said)}, asleep=True, heard=heard)
    async with engine.sleeper() as sleeper:
        with pytest.raises(Trouble) as raised:
            await sleeper.wake_up(RECIPE, 5, compare=False)
    assert raised.value.no_room is no_room


# ------------------------------------------------------------------------------------------------------------ canaries


async def test_the_first_question_that_is_answered_is_its_canary() -> None:
    """An embedder refuses text; what it answers is remembered and compared after a wake."""
    engine = Engine({"/v1/completions": (404, {"detail": "Not Found"}), "/v1/embeddings": (200, {"data": [{"embedding": [0.25, -0.5]}]})})
    async with engine.sleeper() as sleeper:
        assert await sleeper.record([TEXT, VECTOR]) == ""
        assert sleeper.recorded is not None
        assert (sleeper.recorded.canary, sleeper.recorded.answer) == (VECTOR, [0.25, -0.5])
        engine.answers["/v1/embeddings"] = (200, {"data": [{"embedding": [0.2501, -0.5]}]})
        await sleeper.wake_up(RECIPE, 5, compare=True)
        engine.answers["/v1/embeddings"] = (200, {"data": [{"embedding": [0.5, -0.5]}]})
        with pytest.raises(Trouble, match="answers differently since its wake"):
            await sleeper.wake_up(RECIPE, 5, compare=True)

    assert VECTOR.body in engine.bodies


async def test_an_answer_of_which_a_part_is_missing_is_no_canary() -> None:
    """Nothing is like nothing: compared later, every answer of that shape would do."""
    scores = Canary("/score", b"{}", "data.*.score")
    async with Engine({"/score": (200, {"data": [{"value": 0.5}, {"value": 0.25}]})}).sleeper() as sleeper:
        assert "POST /score answers 200" in await sleeper.record([scores])
        assert sleeper.recorded is None


@pytest.mark.parametrize(
    "answer", [(200, {"choices": [{"text": ""}]}), (200, {"data": []}), (200, {"choices": []}), (500, {"detail": "no"})]
)
async def test_an_answer_that_says_nothing_is_no_canary(answer: Answer) -> None:
    """What cannot be compared is told, and level 2 is not used on trust."""
    async with Engine({"/v1/completions": answer}).sleeper() as sleeper:
        assert "POST /v1/completions answers" in await sleeper.record([TEXT])
        assert sleeper.recorded is None


async def test_a_text_must_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are shown, short."""
    engine = Engine()
    engine.answers["/v1/completions"] = engine.says_text(" 10 11")
    async with engine.sleeper() as sleeper:
        assert await sleeper.record([TEXT]) == ""
        await sleeper.wake_up(RECIPE, 5, compare=True)
        engine.answers["/v1/completions"] = engine.says_text("!" * 500)
        with pytest.raises(Trouble) as raised:
            await sleeper.wake_up(RECIPE, 5, compare=True)
        assert "' 10 11'" in raised.value.why
        assert len(raised.value.why) < 200
        engine.answers["/v1/completions"] = (500, {"detail": "CUDA out of memory. Tried to allocate"})
        engine.heard.append("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB")
        with pytest.raises(Trouble) as failed:
            await sleeper.wake_up(RECIPE, 5, compare=True)
        assert ("after its wake, POST /v1/completions answered 500" in failed.value.why, failed.value.no_room) == (True, True)


async def test_nothing_is_compared_that_was_not_recorded_or_not_wanted() -> None:
    """Then a canary costs nothing."""
    engine = Engine()
    async with engine.sleeper() as sleeper:
        await sleeper.wake_up(RECIPE, 5, compare=True)
        engine.answers["/v1/completions"] = engine.says_text("one")
        await sleeper.record([TEXT])
        engine.answers["/v1/completions"] = engine.says_text("other")
        await sleeper.wake_up(RECIPE, 5, compare=False)

    assert engine.asked.count("/v1/completions") == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a", "a", True),
        ("a", "b", False),
        (0.5, 0.50001, True),
        (0.5, 0.51, False),
        ([0.1, 0.2], [0.1, 0.2000001], True),
        ([0.1, 0.2], [0.1], False),
        ([[0.1], [0.2]], [[0.1], [0.3]], False),
        (0.0, 1e-9, True),
        ("0.5", 0.5, False),
        (None, None, True),
        (None, 0.0, False),
    ],
)
def test_alike_but_for_rounding(one: Any, other: Any, same: bool) -> None:
    """Numbers may differ a little, text and lengths not at all."""
    assert alike(one, other) is same


def test_a_long_answer_is_shown_short() -> None:
    assert (shown("abc"), len(shown("x" * 1000)) < 60) == ("'abc'", True)


# ------------------------------------------------------------------------------------------------------ versions, warm-up


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.11.1rc2.dev14+gabc", (0, 11, 1)),
        ("0.8.5.post1", (0, 8, 5)),
        ("0.19.0+cpu", (0, 19, 0)),
        ("dev", ()),
        ("", ()),
    ],
)
def test_versions(text: str, numbers: Sequence[int]) -> None:
    """As far as they are numbers."""
    assert numbers_of(text) == tuple(numbers)


@pytest.mark.parametrize(
    ("answer", "version"), [((200, {"version": "0.24.0"}), (0, 24, 0)), ((404, {}), ()), ((200, {"version": 3}), ()), ((200, []), ())]
)
async def test_a_version_that_is_not_told_is_not_known(answer: Answer, version: tuple[int, ...]) -> None:
    """No fault: the recipe for any version is used then."""
    async with Engine({"/version": answer}).sleeper() as sleeper:
        await sleeper.learn_version(Call("/version", "GET"))
        assert sleeper.version == version


async def test_the_warm_up_is_sent_with_its_body_and_a_refusal_is_only_noted() -> None:
    """A refused warm-up is the configuration's fault; the engine serves."""
    engine = Engine({"/v1/warm": (400, {})})
    async with engine.sleeper("/v1/warm") as sleeper:
        assert await sleeper.warm_up(5) == "warm-up POST /v1/warm answered 400"
    assert (engine.asked, engine.bodies) == (["/v1/warm"], [b'{"a":1}'])
    async with Engine().sleeper() as sleeper:
        assert await sleeper.warm_up(5) == ""


async def test_a_doze_is_seen_by_its_check_alone() -> None:
    """Nobody there, or another answer: it does not doze."""
    engine = Engine({"/props": (200, {"is_sleeping": True})})
    async with engine.sleeper() as sleeper:
        assert await sleeper.is_dozing(AsleepCheck("/props")) is True
        engine.answers["/props"] = (503, {"is_sleeping": True})
        assert await sleeper.is_dozing(AsleepCheck("/props")) is False
    assert await sleeper.is_dozing(AsleepCheck("/props")) is False
