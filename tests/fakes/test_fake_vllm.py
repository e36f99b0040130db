"""The fake vLLM where the contract with the true one does not reach: other versions, memory, and hazards as told."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .vllm_server import Asked, Client, FakeServer

QUIET_S = 0.1
SLOW = "stream=16x0.02"
RELOAD = {"method": "reload_weights"}
MEMORY = ("vram=8000", "vram_asleep=1000,800", "weights=5000")


def fake(tmp_path: Path, *knobs: str, **more: Any) -> FakeServer:
    return FakeServer(tmp_path / "fake", [*MEMORY, *knobs], **more)


def wake_from_level_2(client: Client) -> None:
    client.must("/wake_up?tags=weights")
    client.must("/collective_rpc", RELOAD)
    client.must("/wake_up?tags=kv_cache")


# --------------------------------------------------------------------------------------------------------------- versions


def test_without_dev_mode_there_are_no_sleep_routes(tmp_path: Path) -> None:
    with fake(tmp_path, dev_mode=False) as server:
        client = server.client
        calls = [client.post("/sleep"), client.post("/wake_up"), client.get("/is_sleeping"), client.post("/collective_rpc", RELOAD)]

        assert [answer.status for answer in calls] == [404] * 4
        assert client.get("/version").status == 200
        assert client.greedy()


@pytest.mark.parametrize(
    ("version", "slept", "forgot", "paused"),
    [
        ("0.11.0", b"", b"", 404),
        ("0.25.0", b"", b"", 200),
        ("0.28.0", b"", b'{"success": true}', 200),
        ("0.32.0", b'{"status": "sleeping", "level": 1}', b'{"success": true}', 200),
    ],
)
def test_what_it_says_depends_on_its_version(tmp_path: Path, version: str, slept: bytes, forgot: bytes, paused: int) -> None:
    with fake(tmp_path, f"version={version}") as server:
        client = server.client

        assert client.must("/sleep?level=1").body == slept
        assert client.is_sleeping()
        client.must("/wake_up")
        assert client.must("/reset_prefix_cache").body == forgot
        assert client.get("/is_paused").status == paused


@pytest.mark.parametrize(("version", "level_3", "softly"), [("0.16.0", 200, 200), ("0.28.0", 200, 500), ("0.32.0", 400, 400)])
def test_what_it_accepts_depends_on_its_version(tmp_path: Path, version: str, level_3: int, softly: int) -> None:
    """Level 3 drops the weights where it is accepted."""
    with fake(tmp_path, f"version={version}") as server:
        client = server.client
        before = client.greedy()
        asked = client.post("/sleep?level=3").status
        client.must("/wake_up")

        assert asked == level_3
        assert (client.greedy() == before) == (level_3 != 200)
        assert client.post("/sleep?level=1&mode=softly").status == softly


@pytest.mark.parametrize("version", ["0.11.0", "0.16.0"])
def test_an_old_one_dies_when_it_is_put_to_sleep_over_a_request(tmp_path: Path, version: str) -> None:
    """B29."""
    with fake(tmp_path, f"version={version}", SLOW) as server:
        events = server.client.ask(stream=True).events()
        next(events)
        with pytest.raises((ConnectionError, OSError)):
            server.client.post("/sleep?level=1")

        assert server.exit_code() == 134
        assert server.journal("sleep_begin")[0]["in_flight"] == 1
        assert "[DONE]" not in list(events)


@pytest.mark.parametrize("knobs", [["version=0.16.0"], ["version=0.32.0", "strict=1"]])
def test_an_old_one_dies_of_a_request_while_it_sleeps(tmp_path: Path, knobs: list[str]) -> None:
    """B29."""
    with fake(tmp_path, *knobs) as server:
        server.client.must("/sleep?level=1")
        request = server.client.ask()

        assert server.exit_code() == 134
        assert len(server.journal("asleep_request")) == 1
        request.hang_up()


@pytest.mark.parametrize(("version", "dies"), [("0.17.0", True), ("0.22.1", True), ("0.24.0", False)])
def test_some_run_requests_when_half_awake(tmp_path: Path, version: str, dies: bool) -> None:
    with fake(tmp_path, f"version={version}") as server:
        server.client.must("/sleep?level=1")
        server.client.must("/wake_up?tags=weights")
        assert server.client.is_sleeping()
        request = server.client.ask()
        if dies:
            assert server.exit_code() == 134
        else:
            assert request.is_silent(QUIET_S)
        request.hang_up()


def test_resume_makes_a_sleeper_run_without_memory(tmp_path: Path) -> None:
    with fake(tmp_path) as server:
        server.client.must("/sleep?level=1")
        server.client.must("/resume")
        request = server.client.ask()

        assert server.exit_code() == 134
        request.hang_up()


# ----------------------------------------------------------------------------------------------------------------- memory


def test_what_it_holds_in_each_state(tmp_path: Path) -> None:
    """(device, host) MiB: awake, level 1, weights back, all back, level 2, weights back, all back."""
    with fake(tmp_path) as server:
        client, held = server.client, [(server.held_mib(), server.host_mib())]
        for target in ("/sleep?level=1", *(wakes := ("/wake_up?tags=weights", "/wake_up?tags=kv_cache")), "/sleep?level=2", *wakes):
            client.must(target)
            held.append((server.held_mib(), server.host_mib()))

    assert held == [(8000, 0), (1000, 5000), (6000, 0), (8000, 0), (800, 0), (5800, 0), (8000, 0)]


def test_older_ones_keep_their_copy(tmp_path: Path) -> None:
    """B30."""
    with fake(tmp_path, "host_kept=1") as server:
        server.client.must("/sleep?level=1")
        server.client.must("/wake_up")

        assert (server.held_mib(), server.host_mib()) == (8000, 5000)


def test_without_sleep_mode_it_says_yes_and_frees_nothing(tmp_path: Path) -> None:
    with fake(tmp_path, flags=()) as server:
        before = server.client.greedy()
        server.client.must("/sleep?level=2")
        assert server.client.is_sleeping()
        assert server.held_mib() == 8000
        server.client.must("/wake_up")

        assert server.client.greedy() == before


def test_a_full_device_has_no_room_for_a_wake_or_a_start(tmp_path: Path) -> None:
    """Two of 8,000 MiB on a device of 10,000: one wakes when the other is asleep, and a third does not start."""
    crowded = ("budget=10000", "enforce=1")
    with fake(tmp_path, *crowded) as one:
        one.client.must("/sleep?level=1")
        with fake(tmp_path, *crowded, model="other") as other:
            refused = one.client.post("/wake_up")
            assert refused.status == 500
            assert b"CUDA Error: out of memory at" in refused.body
            assert one.client.is_sleeping()
            with fake(tmp_path, *crowded, model="third") as third:
                assert third.exit_code() == 1
                assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in third.log.read_text()

            other.client.must("/sleep?level=2")
            one.client.must("/wake_up")
            assert one.client.greedy()


# ---------------------------------------------------------------------------------------------------------------- hazards


def test_sleep_that_frees_nothing(tmp_path: Path) -> None:
    with fake(tmp_path, "on_sleep=no_free") as server:
        server.client.must("/sleep?level=1")

        assert server.client.is_sleeping()
        assert server.held_mib() == 8000


def test_sleep_that_fails_leaves_it_paused_with_its_memory_and_a_wake_repairs_it(tmp_path: Path) -> None:
    with fake(tmp_path, "on_sleep=500*1") as server:
        client = server.client
        assert client.post("/sleep?level=1").status == 500
        assert client.is_sleeping()
        assert server.held_mib() == 8000
        client.must("/wake_up")
        assert client.greedy()

        client.must("/sleep?level=1")  # only once
        assert server.held_mib() == 1000


@pytest.mark.parametrize(("knob", "target"), [("on_sleep", "/sleep?level=1"), ("on_wake", "/wake_up"), ("on_reload", "/collective_rpc")])
@pytest.mark.parametrize(("how", "code"), [("die:3", 3), ("die:kill", -signal.SIGKILL)])
def test_it_dies_in_the_middle_of_an_order(tmp_path: Path, knob: str, target: str, how: str, code: int) -> None:
    with fake(tmp_path, f"{knob}={how}") as server:
        if knob != "on_sleep":
            server.client.must("/sleep?level=2")
        if knob == "on_reload":
            server.client.must("/wake_up?tags=weights")
        with pytest.raises((ConnectionError, OSError)):
            server.client.post(target, RELOAD)

        assert server.exit_code() == code


def test_it_dies_between_weights_and_cache(tmp_path: Path) -> None:
    with fake(tmp_path, "on_wake_kv=die:139") as server:
        server.client.must("/sleep?level=2")
        server.client.must("/wake_up?tags=weights")
        server.client.must("/collective_rpc", RELOAD)
        with pytest.raises((ConnectionError, OSError)):
            server.client.post("/wake_up?tags=kv_cache")

        assert server.exit_code() == 139


def test_it_dies_of_the_first_request_after_a_wake(tmp_path: Path) -> None:
    """B31."""
    with fake(tmp_path, "on_first=die:139") as server:
        server.client.greedy()
        server.client.must("/sleep?level=1")
        server.client.must("/wake_up")
        request = server.client.ask()

        assert server.exit_code() == 139
        request.hang_up()


@pytest.mark.parametrize("knob", ["on_sleep", "on_wake"])
def test_an_order_that_hangs_blocks_the_engine_but_not_its_health(tmp_path: Path, knob: str) -> None:
    with fake(tmp_path) as server:
        if knob == "on_wake":
            server.client.must("/sleep?level=1")
        server.steer(**{knob: "hang"})
        order = Asked(server.port, "/sleep?level=1" if knob == "on_sleep" else "/wake_up", None)
        server.wait_for(lambda: bool(server.journal("fault")), "it hangs")
        question = server.client.ask()

        assert order.is_silent(QUIET_S)
        assert question.is_silent(QUIET_S)
        assert server.client.get("/health").status == 200
        order.hang_up()
        question.hang_up()


@pytest.mark.parametrize(("how", "held_mib"), [("oom", 1000), ("oom_partly", 4500)])
def test_a_wake_without_room_may_be_tried_again(tmp_path: Path, how: str, held_mib: int) -> None:
    """Some versions keep what they had mapped until it failed."""
    with fake(tmp_path, f"on_wake={how}*2") as server:
        client = server.client
        before = client.greedy()
        client.must("/sleep?level=1")
        for _ in range(2):
            assert client.post("/wake_up").status == 500
            assert client.is_sleeping()
            assert server.held_mib() == held_mib
        client.must("/wake_up")

        assert server.held_mib() == 8000
        assert client.greedy() == before


def test_a_wake_fails_while_a_file_is_there(tmp_path: Path) -> None:
    crowd = tmp_path / "crowd"
    crowd.touch()
    with fake(tmp_path, f"on_wake=oom@{crowd}") as server:
        server.client.must("/sleep?level=1")
        assert server.client.post("/wake_up").status == 500
        crowd.unlink()

        server.client.must("/wake_up")


def test_a_wake_that_wakes_nothing(tmp_path: Path) -> None:
    with fake(tmp_path, "on_wake=stuck") as server:
        server.client.must("/sleep?level=1")
        server.client.must("/wake_up")

        assert server.client.is_sleeping()


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_that_spoils_the_answers(tmp_path: Path, level: int) -> None:
    """Whatever was done right, until the next wake."""
    with fake(tmp_path, "on_wake=garbage*1") as server:
        client = server.client
        before = client.greedy()
        answers = []
        for _ in range(2):
            client.must(f"/sleep?level={level}")
            wake_from_level_2(client)
            answers.append(client.greedy())

    assert [answer == before for answer in answers] == [False, True]


def test_weights_that_cannot_be_reloaded(tmp_path: Path) -> None:
    with fake(tmp_path, "on_reload=500*1,no_load*1") as server:
        client = server.client
        before = client.greedy()
        client.must("/sleep?level=2")
        client.must("/wake_up?tags=weights")
        assert b"NotImplementedError" in client.post("/collective_rpc", RELOAD).body
        client.must("/collective_rpc", RELOAD)
        client.must("/wake_up?tags=kv_cache")
        assert client.greedy() != before

        client.must("/collective_rpc", RELOAD)
        client.must("/reset_prefix_cache")
        assert client.greedy() == before


@pytest.mark.parametrize("runner", ["embed", "rank"])
def test_numbers_are_spoilt_as_texts_are(tmp_path: Path, runner: str) -> None:
    """And a model has only the routes of its kind."""
    asked = {
        "embed": ("/v1/embeddings", {"model": "m", "input": ["good", "evening"]}),
        "rank": ("/v1/rerank", {"model": "m", "query": "good", "documents": ["evening", "morning", "night"]}),
    }
    with fake(tmp_path, f"runner={runner}") as server:
        client = server.client

        def answer() -> Any:
            said = client.must(*asked[runner]).json
            return said["data"] if runner == "embed" else said["results"]

        before = answer()
        client.must("/sleep?level=2")
        client.must("/wake_up")
        spoilt = answer()
        client.must("/collective_rpc", RELOAD)
        client.must("/reset_prefix_cache")

        assert spoilt != before
        assert answer() == before
        assert client.post("/v1/completions", client.asked()).status == 404


@pytest.mark.parametrize("worker", ["1", "0"])
def test_a_worker_that_dies_in_its_sleep_takes_the_server_along(tmp_path: Path, worker: str) -> None:
    """/health says 503 for a while, then the server ends by itself."""
    with fake(tmp_path, "on_asleep=worker_dies:0", f"worker={worker}", "dying_s=0.2") as server:
        server.client.must("/sleep?level=1")
        server.wait_for(lambda: bool(server.journal("dead")), "the engine core is dead")

        assert server.client.get("/health").status == 503
        assert server.client.post("/wake_up").status == 500
        assert server.exit_code() == 1


def test_a_killed_worker_is_an_error_in_the_stream(tmp_path: Path) -> None:
    """As told under 200, with the end marker."""
    with fake(tmp_path, SLOW) as server:
        events = server.client.ask(200, stream=True).events()
        next(events)
        os.kill(server.journal("worker")[0]["pid"], signal.SIGKILL)
        *_, last, done = events

        assert last["error"]["code"] == 500
        assert done == "[DONE]"
        assert server.exit_code() == 1


# --------------------------------------------------------------------------------------------------------------- steering


def test_hazards_come_and_go_while_it_runs(tmp_path: Path) -> None:
    """A count begins anew whenever it is steered."""
    with fake(tmp_path) as server:
        client = server.client
        statuses = []
        for knobs in ({}, {"on_sleep": "500*1"}, {"on_sleep": "500*1", "seed": 2}, {}):
            server.steer(**knobs)
            for _ in range(2):
                statuses.append(client.post("/sleep?level=1").status)
                client.must("/wake_up")

    assert statuses == [200, 200, 500, 200, 500, 200, 200, 200]


def test_chances_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    def statuses(home: Path, seed: int) -> list[int]:
        with fake(home, "on_sleep=500%0.5", f"seed={seed}", "sleep_s=0", "wake_s=0") as server:
            said = []
            for _ in range(12):
                said.append(server.client.post("/sleep?level=1").status)
                server.client.must("/wake_up")
            return said

    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    first, second, other = statuses(tmp_path / "a", 1), statuses(tmp_path / "b", 1), statuses(tmp_path / "c", 2)

    assert set(first) == {200, 500}
    assert first == second
    assert first != other


def test_the_journal_tells_the_order(tmp_path: Path) -> None:
    """What a story compares: in flight at each sleep, nothing admitted until awake."""
    with fake(tmp_path, SLOW) as server, ThreadPoolExecutor(1) as pool:
        client = server.client
        running = client.ask()
        server.wait_for(lambda: bool(server.journal("admitted")), "the request runs")
        sleep = pool.submit(client.must, "/sleep?level=1&mode=wait")
        running.answer()
        sleep.result()
        client.must("/wake_up")
        client.greedy()
        names = ("sleep_begin", "sleep_end", "wake_begin", "wake_end", "admitted", "finished")
        lines = sorted((line for name in names for line in server.journal(name)), key=lambda line: line["at"])

    order = ["admitted", "sleep_begin", "finished", "sleep_end", "wake_begin", "wake_end", "admitted", "finished"]
    assert [line["event"] for line in lines] == order
    assert lines[1]["in_flight"] == 1


def test_it_may_be_slow_to_notice_that_a_client_left(tmp_path: Path) -> None:
    """Then it is put to sleep over a request, though nobody waits for one."""
    with fake(tmp_path, SLOW, "strict=1", "notice_s=5") as server:
        request = server.client.ask()
        server.wait_for(lambda: bool(server.journal("admitted")), "the request runs")
        request.hang_up()
        with pytest.raises((ConnectionError, OSError)):
            server.client.post("/sleep?level=1")

        assert server.exit_code() == 134
