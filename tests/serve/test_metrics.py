"""Figures of a running server and of its engines; asking for them wakes nobody."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from greenroom.config.model import ModelConfig
from greenroom.core.facts import Device, Model, Setup, Start, State, Stop
from greenroom.core.scheduler import Scheduler
from greenroom.core.views import View
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.host.gpus import Gpus
from greenroom.ledger.metrics import Metrics
from greenroom.serve import engine_metrics
from greenroom.serve.engine_metrics import SAMPLES_MAX, gather, relabelled
from greenroom.shell.crew import HostCrew, Stage
from tests.control.fake import a_resident
from tests.engines.builders import a_model

VLLM = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.1",model="m"} 1.0
vllm:ttft_seconds_bucket{le="+Inf",model="m"} 2.0
vllm:ttft_seconds_count{model="m"} 2.0
vllm:ttft_seconds_sum{model="m"} 0.4
# TYPE llamacpp:tokens_total counter
llamacpp:tokens_total 28
"""


def told(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_engines_figures_carry_the_name_of_their_model() -> None:
    """Grouped by metric, a label `model` of theirs kept under another name."""
    text = relabelled([("a", VLLM), ('b"\n', VLLM)])
    found = told(text)

    assert found["vllm:num_requests_running", (("engine", "0"), ("model", "a"), ("model_name", "m"))] == 2
    assert found["vllm:ttft_seconds_sum", (("exported_model", "m"), ("model", 'b"\n'))] == 0.4
    assert found["llamacpp:tokens_total", (("model", "a"),)] == 28
    assert len(found) == 12
    assert text.count("# TYPE vllm:ttft_seconds histogram") == 1


@pytest.mark.parametrize(
    "line",
    [
        "greenroom_queue 9",
        'greenroom_models{state="ready"} 9',
        'x{a="1"} 1 # {trace="2"} 3',
        "x{a=1} 1",
        'x{a="1} 1',
        "x one",
        "x 1_0",
        "1x 1",
        "x",
        "",
        'x{a="1"} 1 2 3',
        "é 1",
    ],
)
def test_what_is_no_sample_does_not_pass(line: str) -> None:
    """Least of all one that would be taken for ours."""
    assert relabelled([("m", line + "\n")]) == ""


def test_engines_that_mean_different_things_by_a_name_do_not_spoil_the_page() -> None:
    """The first one counts."""
    found = relabelled([("a", "# TYPE x counter\nx 1\n"), ("b", "# TYPE x gauge\nx 2\n"), ("c", "# TYPE x counter\nx 3\n")])

    assert found == '# TYPE x counter\nx{model="a"} 1\nx{model="c"} 3\n'


def test_an_engine_that_tells_too_much_is_cut() -> None:
    """In samples."""
    assert relabelled([("m", "".join(f"x{i} {i}\n" for i in range(3 * SAMPLES_MAX)))]).count("TYPE") == SAMPLES_MAX


@given(st.text(alphabet='ab{}=",\\ \t\n#1.x', max_size=80))
def test_no_text_of_an_engine_makes_the_page_unreadable(text: str) -> None:
    """An independent parser reads what is left."""
    assert all(name and values for (name, values) in told(relabelled([("m", text)])))


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("vllm serve m", True),
        ("docker run --rm vllm/vllm-openai:latest --model m", True),
        ("text-embeddings-router --model-id m", True),
        ("python -m sglang.launch_server --model-path m", False),
        ("python -m sglang.launch_server --model-path m --enable-metrics", True),
        ("llama-server -m x", False),
        ("llama-server -m x --metrics", True),
        ("llama-server -m x --metrics --sleep-idle-seconds 5", False),
        ("./serve.sh", False),
    ],
)
def test_only_engines_that_are_not_woken_by_it_are_asked(command: str, asked: bool) -> None:
    """By what their command says."""
    assert asked is (describe(a_model(command)).metrics_call() is not None)


@contextlib.asynccontextmanager
async def an_engine(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        if answer:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        else:
            await reader.read()  # until it is hung up on
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


def running(port: int, **state: Any) -> Any:
    engine = describe(a_model("vllm serve m"))
    return SimpleNamespace(**{"engine": engine, "host": "127.0.0.1", "port": port, "ready": True, "stopping": False, "asleep": 0, **state})


@pytest.mark.parametrize("state", [one for one in State if one is not State.READY])
async def test_an_engine_that_does_not_serve_is_never_asked(state: State) -> None:
    """Whatever it is doing instead."""
    async with an_engine(b"x 1\n") as (port, seen):
        text = await gather(View(0.0, (), (a_resident("m", state),), 0, 0.0), {"m": running(port)}.get)

    assert (text, seen) == ("", [])


@pytest.mark.parametrize("state", [{"ready": False}, {"stopping": True}, {"asleep": 1}])
async def test_nor_one_that_the_crew_knows_to_be_elsewhere(state: dict[str, Any]) -> None:
    """Its state may be a moment older in the book."""
    async with an_engine(b"x 1\n") as (port, seen):
        text = await gather(View(0.0, (), (a_resident("m"),), 0, 0.0), {"m": running(port, **state)}.get)

    assert (text, seen) == ("", [])


async def test_engines_that_serve_are_asked_together_and_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs costs its own figures only, one that floods is cut at a line."""
    monkeypatch.setattr(engine_metrics, "ASK_S_MAX", 0.5)
    monkeypatch.setattr(engine_metrics, "TEXT_BYTES_MAX", 20)
    view = View(0.0, (), tuple(map(a_resident, "abc")), 0, 0.0)
    async with an_engine(b"x 1\n") as (good, seen), an_engine(b"") as (hangs, _), an_engine(b"y 1234\n" * 99) as (floods, _):
        at = {"a": running(good), "b": running(hangs), "c": running(floods)}
        text = await gather(view, at.get)

    assert text == '# TYPE x untyped\nx{model="a"} 1\n# TYPE y untyped\ny{model="c"} 1234\ny{model="c"} 1234\n'
    assert seen == [b"GET /metrics HTTP/1.1"]


@pytest.mark.engine
async def test_figures_of_a_real_llama_server(llama_server: Path, tiny_chat: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """It tells them with --metrics."""
    command = (str(llama_server), "-m", str(tiny_chat), "--metrics", "--port", "${PORT}")
    stage = Stage({"a": describe(ModelConfig("a", command))}, {"bench0": DeviceRef("bench0", "declared", total_mib=1000)}, free_port())
    crew = HostCrew(stage, gpus=Gpus(), supervisor=None, log_dir=tmp_path, release_s_max=0.1)
    await crew.start(Start("a", 1, ("bench0",), {"bench0": 1000}))
    text = await gather(View(0.0, (), (a_resident("a"),), 0, 0.0), crew.running.get)
    await crew.stop(Stop("a", 1, "unloaded by an operator"))

    assert ("llamacpp:prompt_tokens_total", (("model", "a"),)) in told(text)


async def test_a_scrape_of_a_server_with_500_models_is_quick_and_changes_nothing() -> None:
    """Of CPU, the look at the scheduler included; nothing is decided by it."""
    models = tuple(Model(f"m{number}", ("gpu0",), need_mib=100) for number in range(500))
    scheduler = Scheduler(Setup((Device("gpu0", "gpu", 80_000),), models), 0.0)
    metrics, took = Metrics(), []
    before = [scheduler.state_of(model.id) for model in models]
    for at in range(1, 6):
        began = time.thread_time()
        metrics.text(scheduler.view(float(at)), version="1", uptime_s=1.0, requests=lambda model: {"ok": 1})
        took.append(time.thread_time() - began)

    assert min(took) < 0.05, took
    assert before == [scheduler.state_of(model.id) for model in models]
