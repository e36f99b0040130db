"""vLLM's sleep routes, as the fake has them and as the true server has them: one set of assertions for both."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .vllm_server import Answer, Client, FakeServer

pytestmark = pytest.mark.timeout(600)

QUIET_S = 0.3  # so long is nothing heard of a request that hangs
LONG = 400  # tokens of a request that is in the middle for a while
RELOAD = {"method": "reload_weights"}
WITH_USAGE = {"stream_options": {"include_usage": True}}  # events may hold several tokens


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of version 0.32, awake at the begin of each test and left so."""
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "fake":
        with FakeServer(home, ["vram=1000", "vram_asleep=100", "stream=16x0.002"]) as fake:
            yield fake.client
        return
    from tests.vllm_cpu import rig

    reason = rig.missing() or ("" if "vllm" in request.config.option.markexpr else "takes minutes: make test-vllm")
    if reason:
        pytest.skip(reason)
    with rig.PretendGpu(home, 3000) as gpu, rig.Server(gpu, gpu.model_entry("m", kind="tiny", kv_mib=64)) as true:
        yield Client(true.port, true.name)


@pytest.fixture
def awake(server: Client) -> Iterator[Client]:
    assert not server.is_sleeping()
    yield server
    if server.is_sleeping():
        server.must("/wake_up?tags=weights")
        server.must("/collective_rpc", RELOAD)
        server.must("/wake_up")
        server.must("/reset_prefix_cache")


def wake_from_level_2(server: Client) -> None:
    server.must("/wake_up?tags=weights")
    server.must("/collective_rpc", RELOAD)
    server.must("/wake_up?tags=kv_cache")


# ------------------------------------------------------------------------------------------------------------ the routes


def test_it_tells_its_version(server: Client) -> None:
    answer = server.get("/version")

    assert answer.status == 200
    assert [part.isdigit() for part in answer.json["version"].split(".")[:2]] == [True, True]


@pytest.mark.parametrize(
    ("method", "target"), [("GET", "/sleep"), ("GET", "/wake_up"), ("POST", "/is_sleeping"), ("GET", "/reset_prefix_cache")]
)
def test_a_wrong_method_is_405(server: Client, method: str, target: str) -> None:
    assert server.call(method, target).status == 405


@pytest.mark.parametrize("query", ["level=3", "level=-1", "level=deep", "level=1&mode=softly"])
def test_a_sleep_it_does_not_know_is_400_and_changes_nothing(awake: Client, query: str) -> None:
    answer = awake.post(f"/sleep?{query}")

    assert answer.status == 400
    assert "error" in answer.json
    assert not awake.is_sleeping()


def test_a_call_without_its_method_is_400(awake: Client) -> None:
    assert awake.post("/collective_rpc", {}).status == 400


def test_an_unknown_call_is_500_and_does_no_harm(awake: Client) -> None:
    before = awake.greedy()

    assert awake.post("/collective_rpc", {"method": "no_such_thing"}).status == 500
    assert awake.greedy() == before


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_answers_everything_but_requests(awake: Client, level: int) -> None:
    """Neither /health nor /v1/models tells that it cannot serve; /is_sleeping and the metric do."""
    slept = awake.must(f"/sleep?level={level}")

    assert slept.json == {"status": "sleeping", "level": level}
    assert awake.is_sleeping()
    assert awake.get("/health").status == 200
    assert [card["id"] for card in awake.get("/v1/models").json["data"]] == [awake.name]
    assert awake.sleep_state() == {1: "weights_offloaded", 2: "discard_all"}[level]


def test_awake_again_it_says_so(awake: Client) -> None:
    awake.must("/sleep?level=1")

    assert awake.must("/wake_up").json == {"status": "awake", "tags": None}
    assert not awake.is_sleeping()
    assert awake.sleep_state() == "awake"


# ------------------------------------------------------------------------------------------------------------ repetition


def test_wake_while_awake_is_no_fault(awake: Client) -> None:
    before = awake.greedy()

    assert awake.must("/wake_up").json["status"] == "awake"
    assert awake.must("/wake_up?tags=weights").json["status"] == "awake"
    assert awake.greedy() == before


def test_sleep_while_asleep_changes_nothing_whatever_it_says(awake: Client) -> None:
    """Level 1 cannot be made level 2 in place: the weights come back without a reload.  Even the metric is wrong."""
    before = awake.greedy()
    awake.must("/sleep?level=1")
    again = awake.must("/sleep?level=2")
    assert awake.sleep_state() == "discard_all"
    awake.must("/wake_up")

    assert again.json == {"status": "sleeping", "level": 2}
    assert awake.greedy() == before


def test_a_tag_it_does_not_know_wakes_nothing(awake: Client) -> None:
    awake.must("/sleep?level=1")

    assert awake.must("/wake_up?tags=curtain").json == {"status": "sleeping", "tags": ["curtain"]}
    assert awake.is_sleeping()


def test_many_at_once_are_one(awake: Client) -> None:
    before = awake.greedy()
    with ThreadPoolExecutor(3) as pool:
        for target in ("/sleep?level=1", "/wake_up"):
            assert [answer.status for answer in pool.map(awake.post, [target] * 3)] == [200] * 3

    assert not awake.is_sleeping()
    assert awake.greedy() == before


# ---------------------------------------------------------------------------------------------------------------- answers


def test_greedy_answers_are_the_same_each_time(awake: Client) -> None:
    assert awake.greedy() == awake.greedy()
    assert awake.greedy_chat() == awake.greedy_chat()
    assert awake.greedy(prompt="good evening") != awake.greedy(prompt="the lamp")


@pytest.mark.parametrize("call", [Client.greedy, Client.greedy_chat])
def test_level_1_keeps_the_answers(awake: Client, call: object) -> None:
    before = call(awake)  # type: ignore[operator]
    awake.must("/sleep?level=1")
    awake.must("/wake_up")

    assert call(awake) == before  # type: ignore[operator]


def test_level_2_keeps_the_answers_when_the_weights_are_reloaded_in_between(awake: Client) -> None:
    before = awake.greedy()
    awake.must("/sleep?level=2")
    wake_from_level_2(awake)

    assert awake.greedy() == before


def test_level_2_without_a_reload_answers_wrongly_and_says_nothing(awake: Client) -> None:
    """Until a late reload; what was said meanwhile is still in the prefix cache."""
    before = awake.greedy()
    awake.must("/sleep?level=2")
    awake.must("/wake_up")
    without = awake.greedy()
    awake.must("/collective_rpc", RELOAD)
    awake.must("/reset_prefix_cache")

    assert without != before
    assert awake.greedy() == before


def test_half_awake_is_asleep(awake: Client) -> None:
    """Requests go on waiting until the KV cache is there, too."""
    before = awake.greedy()
    awake.must("/sleep?level=1")
    half = awake.must("/wake_up?tags=weights")
    request = awake.ask()

    assert half.json == {"status": "sleeping", "tags": ["weights"]}
    assert awake.is_sleeping()
    assert request.is_silent(QUIET_S)
    assert awake.must("/wake_up?tags=kv_cache").json == {"status": "awake", "tags": ["kv_cache"]}
    assert not awake.is_sleeping()
    assert request.answer().choice["text"] == before


# ------------------------------------------------------------------------------------------------------- requests and sleep


def test_a_request_to_a_sleeper_hangs_and_is_served_after_the_wake(awake: Client) -> None:
    """Without a byte."""
    before = awake.greedy()
    awake.must("/sleep?level=1")
    request = awake.ask()

    assert request.is_silent(QUIET_S)
    awake.must("/wake_up")
    assert request.answer().choice["text"] == before


def test_a_stream_from_a_sleeper_begins_and_hangs(awake: Client) -> None:
    """Status 200 and the headers come at once, and not one event until the wake."""
    before = awake.greedy()
    awake.must("/sleep?level=1")
    request = awake.ask(stream=True)

    assert request.status() == 200
    assert request.is_silent(QUIET_S)
    awake.must("/wake_up")
    *said, done = request.events()
    assert "".join(event["choices"][0]["text"] for event in said) == before
    assert done == "[DONE]"


def test_a_second_sleep_aborts_what_waits_for_the_wake(awake: Client) -> None:
    """It sleeps already, but the requests that hang are answered: with nothing, as a success."""
    awake.must("/sleep?level=1")
    request = awake.ask()
    assert request.is_silent(QUIET_S)
    awake.must("/sleep?level=1")
    answer = request.answer()

    assert answer.status == 200
    assert answer.choice["finish_reason"] == "abort"
    assert answer.choice["text"] == ""


def test_sleep_aborts_what_runs_and_calls_it_a_success(awake: Client) -> None:
    """A stream ends properly, a plain answer is 200 with the text so far: only the reason tells."""
    stream, plain = awake.ask(LONG, stream=True), awake.ask(LONG)
    events = stream.events()
    for _ in events:
        if awake.metric("vllm:num_requests_running") == 2:
            break
    awake.must("/sleep?level=1")
    *middle, last, done = events
    answer = plain.answer()

    assert done == "[DONE]"
    assert len(middle) < LONG - 1
    assert last["choices"][0]["finish_reason"] == "abort"
    assert answer.status == 200
    assert answer.choice["finish_reason"] == "abort"
    assert answer.json["usage"]["completion_tokens"] < LONG


def test_sleep_can_wait_for_what_runs(awake: Client) -> None:
    """It says that it sleeps at once, keeps new requests, and sleeps when the last one has ended."""
    with ThreadPoolExecutor(1) as pool:
        events = awake.ask(LONG, stream=True, **WITH_USAGE).events()
        next(events)
        sleep = pool.submit(awake.must, "/sleep?level=1&mode=wait")
        for _ in events:
            if awake.is_sleeping():
                break
        late = awake.ask()
        is_slept_early = sleep.done()
        *_, last, usage, done = events
        sleep.result()

        assert not is_slept_early
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert usage["usage"]["completion_tokens"] == LONG
        assert late.is_silent(QUIET_S)
    awake.must("/wake_up")
    assert late.answer().choice["finish_reason"] == "length"


def test_a_wake_while_sleep_still_waits_leaves_it_asleep_and_unpaused(awake: Client) -> None:
    """200 and "awake", and then it falls asleep all the same: the next request would run on memory that is not there."""
    with ThreadPoolExecutor(1) as pool:
        events = awake.ask(LONG, stream=True).events()
        next(events)
        sleep = pool.submit(awake.must, "/sleep?level=1&mode=wait")
        while not awake.is_sleeping():
            pass
        assert awake.must("/wake_up").json["status"] == "awake"
        *_, last, done = events
        sleep.result()

    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert awake.is_sleeping()
    assert awake.get("/is_paused").json == {"is_paused": False}


def test_sleep_can_freeze_what_runs(awake: Client) -> None:
    """The stream stands still and goes on after the wake, to its full length."""
    events = awake.ask(LONG, stream=True, **WITH_USAGE).events()
    next(events)
    awake.must("/sleep?level=1&mode=keep")
    assert awake.is_sleeping()
    awake.must("/wake_up")
    *_, last, usage, done = events

    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert usage["usage"]["completion_tokens"] == LONG


def test_a_client_that_hangs_up_is_dropped(awake: Client) -> None:
    awake.must("/sleep?level=1")
    request = awake.ask()
    assert request.is_silent(QUIET_S)
    request.hang_up()
    awake.must("/wake_up")
    awake.greedy()

    assert awake.metric("vllm:num_requests_running") == 0
    assert awake.metric("vllm:num_requests_waiting") == 0


# --------------------------------------------------------------------------------------------------------------- pausing


def test_level_0_is_a_pause(awake: Client) -> None:
    """It says that it sleeps and gives nothing back."""
    before = awake.greedy()
    awake.must("/sleep?level=0")
    request = awake.ask()

    assert awake.is_sleeping()
    assert request.is_silent(QUIET_S)
    awake.must("/wake_up?tags=scheduling")
    assert request.answer().choice["text"] == before


def test_a_pause_looks_like_sleep_and_a_wake_ends_it(awake: Client) -> None:
    paused = awake.must("/pause?mode=keep")

    assert paused.json == {"status": "paused"}
    assert awake.get("/is_paused").json == {"is_paused": True}
    assert awake.is_sleeping()
    awake.must("/wake_up")
    assert awake.get("/is_paused").json == {"is_paused": False}
    assert not awake.is_sleeping()


def test_resume_takes_a_sleeper_for_awake(awake: Client) -> None:
    """200, and the next request would run on memory that is not there: never send it."""
    awake.must("/sleep?level=1")

    assert awake.must("/resume").json == {"status": "resumed"}
    assert awake.get("/is_paused").json == {"is_paused": False}
    assert awake.is_sleeping()


def test_the_prefix_cache_can_be_forgotten(awake: Client) -> None:
    answer: Answer = awake.must("/reset_prefix_cache")

    assert answer.json == {"success": True}
