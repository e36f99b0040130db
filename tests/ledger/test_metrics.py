"""What is exported: right, bounded, well-formed for a parser that is not ours, quick."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from greenroom.core.facts import Admit, Device, InstanceReported, Model, RequestArrived, RequestFinished, Setup, Start, State
from greenroom.core.views import DeviceView, ModelView, View
from greenroom.ledger import schema
from greenroom.ledger.metrics import (
    FIRST_BYTE_S,
    METRICS,
    MODEL,
    MODELS_MAX,
    OUTCOME,
    QUEUE_S,
    REASONS,
    START,
    STATUS,
    TOKENS_IN,
    TOKENS_OUT,
    WAKE_S,
    Metrics,
    covered,
    reason_of,
)
from greenroom.ledger.packs import Pack
from greenroom.ledger.rows import RequestRow, TransitionRow
from greenroom.ledger.store import Ledger
from greenroom.proxy.record import Record
from greenroom.serve import peers
from tests.control.fake import GPU, a_model, a_resident, a_sleeper

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_700_000_000.0
Labels = tuple[tuple[str, str], ...]


def a_view(*models: ModelView, devices: Sequence[DeviceView] = (GPU,), queue: tuple[int, float] = (0, 0.0)) -> View:
    return View(100.0, tuple(devices), tuple(models), *queue)


def a_request(**fields: Any) -> RequestRow:
    known: dict[str, Any] = {"request": 1, "at": NOW, "model": "chat", "generation": 1, "client": "k", "priority": "interactive"}
    return RequestRow(**{**known, "path": "/v1/chat/completions", "start": "hot", "status": 200, **fields})


def a_move(kind: str, **fields: Any) -> TransitionRow:
    known: dict[str, Any] = {"at": NOW - 20.0, "model": "chat", "generation": 1, "devices": ("gpu0",), "took_s": 4.0, "ok": True}
    return TransitionRow(**{**known, "kind": kind, **fields})


def all_moves(model: str = "chat") -> list[TransitionRow]:
    return [a_move(kind, cause="exited", model=model) for kind in ("start", "wake", "sleep", "stop")]


def metric_of(name: str) -> str:
    """Without what a histogram or a summary adds."""
    return name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)


def take(metrics: Metrics, *rows: RequestRow | TransitionRow) -> None:
    """As the ledger does."""
    for row in rows:
        if isinstance(row, TransitionRow):
            metrics.moved(row)
    metrics.ended([schema.request_values(row) for row in rows if isinstance(row, RequestRow)])


def exported(metrics: Metrics, view: View, requests: Mapping[str, Mapping[str, int]] | None = None) -> dict[tuple[str, Labels], float]:
    """As an independent parser reads it."""
    text = metrics.text(view, version="1.2.3", uptime_s=61.5, requests=lambda model: (requests or {}).get(model, {}), dropped=3)
    return parsed(text)


def parsed(text: str) -> dict[tuple[str, Labels], float]:
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = float(sample.value)
    return found


def labels(**values: str) -> Labels:
    return tuple(sorted(values.items()))


CHAT = labels(model="chat")


def test_gauges_are_those_of_the_view() -> None:
    """Models, devices, the queue; bytes, not MiB."""
    view = a_view(
        a_resident("chat", model={"queued": 2, "oldest_s": 1.5}, in_flight=3),
        a_sleeper("big"),
        a_model("bad", State.FAILED, quarantined=True),
        queue=(2, 1.5),
    )
    found = exported(Metrics(lambda: NOW), view)

    assert {state: found["greenroom_models", labels(state=state)] for state in ("ready", "asleep", "failed", "starting")} == {
        "ready": 1,
        "asleep": 1,
        "failed": 1,
        "starting": 0,
    }
    assert found["greenroom_model_state", labels(model="big", state="asleep")] == 1
    gauges = ("queue", "queue_oldest_seconds", "in_flight", "quarantined")
    assert [found[f"greenroom_model_{name}", CHAT] for name in gauges] == [2, 1.5, 3, 0]
    assert found["greenroom_model_quarantined", labels(model="bad")] == 1
    assert found["greenroom_model_reserved_bytes", labels(model="chat", device="gpu0")] == 4403 << 20
    assert found["greenroom_model_measured_bytes", labels(model="big", device="gpu0")] == 1200 << 20
    assert found["greenroom_sleepers_host_bytes", ()] == 15_360 << 20
    names = ("capacity", "headroom", "reserved", "used", "outside")
    assert [found[f"greenroom_device_{name}_bytes", labels(device="gpu0")] for name in names] == [
        mib << 20 for mib in (9728, 512, 4915, 5222, 307)
    ]
    assert ("greenroom_device_available_bytes", labels(device="gpu0")) not in found
    assert [found[name, ()] for name in ("greenroom_queue", "greenroom_queue_oldest_seconds")] == [2, 1.5]
    assert found["greenroom_build_info", labels(version="1.2.3")] == 1
    assert (found["greenroom_uptime_seconds", ()], found["greenroom_ledger_dropped_total", ()]) == (61.5, 3)


def test_requests_are_counted() -> None:
    """By outcome, as the accounts have them; tokens and waits from the rows; refused ones waited for nothing they got."""
    metrics = Metrics(lambda: NOW)
    for row in (
        a_request(tokens_in=28, tokens_out=3, queue_s=0.2, load_s=4.0, first_byte_s=0.03),
        a_request(tokens_in=10, tokens_out=None),
        a_request(),
        a_request(start="", outcome="refused", status=429, queue_s=30.0),
    ):
        take(metrics, row)
    found = exported(metrics, a_view(a_model("chat")), {"chat": {"ok": 3, "refused": 1}})

    assert [found["greenroom_requests_total", labels(model="chat", outcome=one)] for one in ("ok", "refused")] == [3, 1]
    assert [found["greenroom_tokens_total", labels(model="chat", direction=one)] for one in ("in", "out")] == [38, 3]
    assert found["greenroom_requests_without_tokens_total", CHAT] == 1
    for cause, total, quick in (("queue", 0.2, 3), ("gate", 0.0, 3), ("load", 4.0, 2), ("wake", 0.0, 3)):
        assert found["greenroom_wait_seconds_count", labels(cause=cause)] == 3
        assert found["greenroom_wait_seconds_sum", labels(cause=cause)] == total
        assert found["greenroom_wait_seconds_bucket", labels(cause=cause, le="0.25")] == quick
        assert found["greenroom_wait_seconds_bucket", labels(cause=cause, le="+Inf")] == 3
    assert found["greenroom_first_byte_seconds_count", ()] == 1


def test_how_engines_answered_is_counted_by_class_of_status() -> None:
    """Of those that ended ok; what they never sent is not among them, nor what greenroom said; packs hold 200 only."""
    metrics = Metrics(lambda: NOW)
    told = [(200, "ok"), (204, "ok"), (400, "ok"), (500, "ok"), (503, "ok"), (999, "ok"), (101, "ok"), (200, "engine_broke"), (0, "ok")]
    for status, outcome in told:
        take(metrics, a_request(status=status, outcome=outcome))
    take(metrics, a_request(start="", outcome="refused", status=429))
    metrics.packed(Pack.of("chat", [1, NOW, 0.5, 0.1, 7, 3, 1, "k", "interactive", "/v1/x", ""] * 40))
    take(metrics, a_request(model="calm"))
    found = exported(metrics, a_view(a_model("chat"), a_model("calm")))

    answers = {
        (dict(key)["model"], dict(key)["status"]): count for (name, key), count in found.items() if name == "greenroom_answers_total"
    }
    assert answers == {
        **{("chat", "1xx"): 1, ("chat", "2xx"): 42, ("chat", "4xx"): 1, ("chat", "5xx"): 3},
        **{("calm", "2xx"): 1, ("calm", "4xx"): 0, ("calm", "5xx"): 0},
    }


def test_transitions_are_counted_by_what_they_were_made_for() -> None:
    """And failures by their causes."""
    metrics = Metrics(lambda: NOW)
    for row in (
        a_move("start", waiters=1),
        a_move("start", took_s=2.0),
        a_move("start", ok=False, cause="startup-memory", why="no room"),
        a_move("start", ok=False, why="it was overtaken"),
        a_move("wake", waiters=2, level=1),
        a_move("wake", ok=False, cause="wake-failed"),
        a_move("wake", ok=False, cause="out-of-memory"),
        a_move("sleep", reason="big needed 4 GiB", evicted_for="big"),
        a_move("sleep", reason="its first sleep, made while nobody waits for it"),
        a_move("stop", reason="idle for 3 s"),
        a_move("stop", ok=False, cause="exited", reason="it ended by itself"),
    ):
        take(metrics, row)
    found = exported(metrics, a_view(a_model("chat")))

    assert {key: value for key, value in found.items() if re.fullmatch(r"greenroom_(starts|wakes|sleeps|stops)_total", key[0])} == {
        ("greenroom_starts_total", labels(model="chat", reason="request")): 1,
        ("greenroom_starts_total", labels(model="chat", reason="ahead")): 1,
        ("greenroom_wakes_total", labels(model="chat", reason="request")): 1,
        ("greenroom_sleeps_total", labels(model="chat", reason="evicted")): 1,
        ("greenroom_sleeps_total", labels(model="chat", reason="rehearsal")): 1,
        ("greenroom_stops_total", labels(model="chat", reason="idle")): 1,
        ("greenroom_stops_total", labels(model="chat", reason="ended")): 1,
    }
    assert found["greenroom_failures_total", labels(model="chat", cause="startup-memory")] == 1
    counts = ("evictions", "out_of_memory", "crashes", "wake_failures")
    assert [found[f"greenroom_{name}_total", CHAT] for name in counts] == [1, 2, 1, 2]
    assert (found["greenroom_start_seconds_count", CHAT], found["greenroom_start_seconds_sum", CHAT]) == (2, 6.0)
    assert found["greenroom_wake_seconds_count", CHAT] == 1


def test_reasons_are_those_of_the_core() -> None:
    """A sentence that the core does not say any more would put its class to sleep unseen."""
    said = "\n".join(path.read_text() for path in (ROOT / "src/greenroom").glob("*/*.py") if path.name != "metrics.py")

    assert [words for words, _ in REASONS if f'"{words}' not in said] == []
    assert reason_of(a_move("stop", reason="the configuration has changed")) == "other"


def test_values_stand_where_they_are_looked_for() -> None:
    """By the names of a row's fields."""
    names = list(RequestRow.__dataclass_fields__)
    wanted = (names[i] for i in (MODEL, QUEUE_S, WAKE_S, FIRST_BYTE_S, TOKENS_IN, TOKENS_OUT, START, OUTCOME, STATUS))

    assert list(wanted) == ["model", "queue_s", "wake_s", "first_byte_s", "tokens_in", "tokens_out", "start", "outcome", "status"]
    assert [getattr(a_request(), name) for name in names] == list(schema.request_values(a_request()))


def test_the_ledger_tells_of_what_it_writes() -> None:
    """Requests, with what the data plane knew of them, and transitions."""
    ledger, metrics = Ledger(None, gather_s=0.0), Metrics(lambda: NOW)
    ledger.listeners.append(metrics)
    setup = Setup((Device("gpu0", "gpu", 8000),), (Model("chat", ("gpu0",), need_mib=100),))
    ledger.boot(setup)
    ledger.saw(RequestArrived(1.0, 7, "chat"), (Start("chat", 1, ("gpu0",), {"gpu0": 100}),))
    ledger.saw(InstanceReported(3.0, "chat", 1, State.READY, took_s=2.0), (Admit(7, "chat", 1, "cold"),))
    ledger.saw(RequestFinished(4.0, 7), ())
    told = {"request": 7, "tokens_in": 28, "tokens_out": 3}
    ledger.ended(Record("chat", "inference", "POST", "/v1/chat/completions", "k", 200, "ok", "cold", 1, 2, 3, 0.1, 3.0, **told))
    ledger.saw(RequestArrived(5.0, 8, "chat"), (Admit(8, "chat", 1, "hot"),))
    ledger.saw(RequestFinished(5.5, 8), ())
    ledger.ended(Record("chat", "inference", "POST", "/v1/chat/completions", "k", 500, "ok", "hot", 1, 2, 0, 0.1, 0.5, request=8))
    try:
        assert ledger.flush(30.0)
    finally:
        ledger.close()
    found = exported(metrics, a_view(a_model("chat")))

    assert found["greenroom_starts_total", labels(model="chat", reason="request")] == 1
    assert found["greenroom_tokens_total", labels(model="chat", direction="in")] == 28
    assert found["greenroom_wait_seconds_sum", labels(cause="load")] == pytest.approx(2.0)
    assert [found["greenroom_answers_total", labels(model="chat", status=one)] for one in ("2xx", "5xx")] == [1, 1]


def test_swap_time_is_the_share_in_which_anything_moved() -> None:
    """Overlaps count once, the present transition counts, what is older than five minutes does not."""
    metrics = Metrics(lambda: NOW)
    for at, took_s in ((NOW - 1000, 100.0), (NOW - 310, 20.0), (NOW - 200, 30.0), (NOW - 190, 30.0)):
        take(metrics, a_move("start", at=at, took_s=took_s))
    moving = a_resident("chat", State.STARTING, since_s=40.0)
    found = exported(metrics, a_view(moving, devices=(GPU, DeviceView("gpu1", "gpu", "H100", 9728, 512, 0, 0, 0, "", "chat"))))

    assert found["greenroom_device_swap_ratio", labels(device="gpu0")] == pytest.approx((10 + 40 + 40) / 300, abs=1e-5)
    assert [found[name, labels(device="gpu1")] for name in ("greenroom_device_swap_ratio", "greenroom_device_lane_busy")] == [0, 1]


@given(st.lists(st.tuples(st.integers(-50, 150), st.integers(0, 60)), max_size=12))
def test_covered_time_is_what_a_ruler_would_measure(spans: list[tuple[int, int]]) -> None:
    """Second by second."""
    intervals = [(float(since), float(since + length)) for since, length in spans]
    ruler = sum(any(since <= second < until for since, until in intervals) for second in range(100))

    assert covered(intervals, 0.0, 100.0) == ruler


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=4, unique=True))
def test_any_name_stays_one_label_on_one_line(names: list[str]) -> None:
    """Quotes, line ends, braces, other scripts: a parser finds the models that there are, and no other series."""
    metrics = Metrics(lambda: NOW)
    for name in names:
        take(metrics, a_request(model=name))
    text = metrics.text(a_view(*map(a_model, names)), version="1", uptime_s=1.0, requests=lambda model: {"ok": 1})

    assert len({line.partition("{")[0] for line in text.split("\n") if line and line[0] != "#"}) <= 2 * len(METRICS)
    if not any(set(name) & set("\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\\") for name in names):  # the parser's own troubles
        told = [dict(key[1])["model"] for key in parsed(text) if key[0] == "greenroom_model_queue"]
        assert told == names


@pytest.mark.parametrize("name", ['a"} 1\ngreenroom_queue 9', "a\\", 'a\\"b', "a\rb", "x" * 3000, "org/name:tag"])
def test_a_hostile_name_adds_no_series(name: str) -> None:
    """What cannot be told from its own escape is told otherwise."""
    metrics = Metrics(lambda: NOW)
    plain, hostile = (len(exported(metrics, a_view(a_model(one)))) for one in ("a", name))

    assert plain == hostile


def test_series_are_bounded_by_the_models_that_are_configured() -> None:
    """Removed ones are forgotten, those beyond the limit are only counted."""
    metrics = Metrics(lambda: NOW)
    for number in range(3000):
        take(metrics, a_request(model=f"gone{number}"))
        take(metrics, a_move("stop", reason=f"because of {number}"))
    view = a_view(*(a_model(f"m{number:05}") for number in range(MODELS_MAX + 7)))
    found = exported(metrics, view)

    assert found["greenroom_models_left_out", ()] == 7
    assert len({dict(key[1])["model"] for key in found if "model" in dict(key[1])}) == MODELS_MAX
    assert not metrics._tallies


def test_what_is_exported_is_what_is_documented() -> None:
    """Every name, with the labels it is said to have, and no other; and each is used somewhere below or above."""
    metrics = Metrics(lambda: NOW)
    for row in (a_request(tokens_in=1, tokens_out=1, first_byte_s=0.1), *all_moves()):
        take(metrics, row)
    ram = DeviceView("ram", "ram", "", 9728, 512, 0, 10, 0, "", "", available_mib=1000)
    found = exported(metrics, a_view(a_resident("chat"), devices=(GPU, ram)), {"chat": {"ok": 1}})
    bare = {(metric_of(name), tuple(key for key, _ in values if key != "le")) for name, values in found}

    assert bare == {(name, tuple(sorted(metric.labels))) for name, metric in METRICS.items()}
    page = (ROOT / "docs/metrics.md").read_text()
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |" in page


def test_a_scrape_of_500_models_takes_less_than_50_ms() -> None:
    """Of CPU, with everything counted of every one."""
    metrics = Metrics(lambda: NOW)
    for number in range(500):
        for row in (a_request(tokens_in=1, model=f"m{number}"), *all_moves(f"m{number}")):
            take(metrics, row)
    view = a_view(*(a_resident(f"m{number}") for number in range(500)))
    took = []
    for _ in range(5):
        began = time.thread_time()
        metrics.text(view, version="1", uptime_s=1.0, requests=lambda model: {"ok": 1, "refused": 2})
        took.append(time.thread_time() - began)

    assert min(took) < 0.05, took


# ------------------------------------------------------------------------------------------------- what is shipped with it

NAME = re.compile(r"\bgreenroom_[a-z0-9_]+")


def names_in(text: str) -> set[str]:
    return {metric_of(name) for name in NAME.findall(text)}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """And is JSON of the shape that Grafana imports."""
    text = (ROOT / "deploy/grafana/greenroom.json").read_text()
    board = json.loads(text)
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]

    assert names_in("\n".join(asked)) <= METRICS.keys() | peers.METRICS.keys()
    assert len(names_in("\n".join(asked))) > 20
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["title"] and panel["datasource"] == {"type": "prometheus", "uid": "${source}"} for panel in panels)
    assert all(expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}") for expr in asked)


def test_alerts_ask_for_metrics_that_there_are() -> None:
    """Each has a name, a condition, a severity and a sentence."""
    from ruamel.yaml import YAML

    text = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    rules = [rule for group in YAML(typ="safe").load(text)["groups"] for rule in group["rules"]]

    assert names_in(text) <= METRICS.keys() | peers.METRICS.keys()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert names_in(rule["expr"]), rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
