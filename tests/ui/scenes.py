# ruff: noqa: E501 - tables of invented data read best in rows
"""What an invented server says: whole pictures for the dashboard, every field that it knows of.

MiB and unix seconds throughout; `now` is the moment of the picture.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
G = 1024

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "registry.example/team/very-long-repository-name/with-many-segments/agent-32b-instruct-fp8-dynamic-ctx131072-rev-8c1f20e7aa",
    "\u202egnitfihs-thgir\u202c",
    "Robert'); DROP TABLE models;--",
    "../../etc/passwd",
    "模型-七十亿-指令",
    "🎭🎭🎭",
    "a b\tc\u200b\u200bd",
    '"><script>x</script>',
    "javascript:alert(1)",
    "https://elsewhere.example/#/model/x?y=%00",
    "{{7*7}}${7*7}",
)


def mib(gib: float) -> int:
    return round(gib * G)


def tier(level: int, residue: float, host: float, wake_s: float) -> Json:
    return {"level": level, "residue_mib": mib(residue), "host_mib": mib(host), "sleep_s": 3.1, "wake_s": wake_s}


def model(id: str, state: str = "stopped", need: float = 8.0, cold_s: float = 20.0, **more: Any) -> Json:
    return {
        "id": id, "aliases": [], "engine": "vllm", "pinned": False, "state": state, "instances": [], "queued": 0, "oldest_s": 0.0,
        "eta_s": cold_s, "starts": 3, "sleeps": 0, "wakes": 0, "wake_failures": 0, "evictions": 0, "failures": 0, "backoff_s": 0.0,
        "quarantined": False, "need_mib": mib(need), "need_source": "measured", "up_s": cold_s, "last_error": "", "blocked": "",
        "sleep": {"levels": [], "off": "", "costs": []}, "name": "", "description": "", "ttl_s": None, "sleep_after_s": None, **more,
    }  # fmt: skip


def resident(
    id: str, device: str, size: float, measured: float | None, state: str = "ready", *, ram: float = 0.0, in_flight: int = 0,
    level: int = 0, idle_s: float | None = None, expected_s: float | None = None, instance: Json | None = None, devices: list[str] | None = None,
    **more: Any,
) -> Json:  # fmt: skip
    devices = devices or [device]
    by = {one: mib(size) for one in devices} | ({"ram": mib(ram)} if ram and device != "ram" else {})
    one = {
        "devices": devices, "state": state, "generation": 1, "reserved_mib": mib(size) * len(devices),
        "measured_mib": None if measured is None else mib(measured) * len(devices), "reserved_by_device_mib": by,
        "measured_by_device_mib": {} if measured is None else {each: mib(measured) for each in devices}, "ram_mib": by.get("ram", 0),
        "host_mib": mib(ram), "in_flight": in_flight, "pid": 31_000 + len(id), "port": 10_400 + len(id), "since_s": 26.0, "idle_s": idle_s,
        "level": level, "expected_s": expected_s, **(instance or {}),
    }  # fmt: skip
    return model(id, state, **{"need": size, **more}, instances=[one])


SLEEPY = {"sleep": {"levels": [1, 2], "off": "", "costs": [tier(1, 1.4, 33.2, 4.9), tier(2, 1.4, 3, 38.0)]}}


def device(
    id: str, name: str, capacity: float, headroom: float, outside: float, reserved: float, used: float | None, kind: str = "gpu"
) -> Json:
    return {
        "id": id, "kind": kind, "name": name, "capacity_mib": mib(capacity), "headroom_mib": mib(headroom), "reserved_mib": mib(reserved),
        "used_mib": None if used is None else mib(used), "outside_mib": mib(outside), "holder": "", "lane": "", "available_mib": None,
        "outside_by": [{"pid": 2114, "name": "desktop session"}] if outside else [],
    }  # fmt: skip


DEVICES = [
    device("gpu0", "H100 80 GB", 79.6, 2, 0.9, 60.0, 57.8),
    device("gpu1", "L40S 48 GB", 44.7, 1.5, 0.4, 41.6, 27.1),
    device("ram", "ram", 96, 6, 0, 39.9, 39.9, kind="ram"),
]
HOME = [
    ("speech-l", 9, 6.0, "llama_server"), ("translate-3b", 7, 5.2, "llama_server"), ("ocr-2b", 6, 4.4, "vllm"), ("guard-1b", 4, 2.6, "tei"),
    ("math-14b", 49, 23.5, "vllm"), ("embed-code", 5, 3.1, "tei"), ("story-24b", 66, 39.0, "vllm"), ("chat-8b-old", 41, 14.8, "vllm"),
]  # fmt: skip


def status(models: list[Json], *, now: float, devices: list[Json] | None = None, queue: list[Json] | None = None, **more: Any) -> Json:
    waiting = sum(one["queued"] for one in models)
    return {
        "version": "0.1.0", "uptime_s": 86_400.0, "now": now, "boot_id": "b-1", "devices": DEVICES if devices is None else devices,
        "models": models, "queue": {"length": waiting, "oldest_s": 9.8, **({"models": queue} if queue is not None else {})}, **more,
    }  # fmt: skip


def request(id: str, age_s: float, key: str, cls: str = "interactive") -> Json:
    return {"id": id, "age_s": age_s, "key": key, "class": cls}


def turns(now: float) -> Json:
    """coder-14b waits for agent-32b to drain, vision-11b loads beside the others, legacy-13b backs off."""
    models = [
        resident("chat-8b", "gpu0", 14.8, 13.9, in_flight=2, pinned=True, cold_s=41, parallel=16, rate={"value": 139, "unit": "tok/s"}),
        resident("agent-32b", "gpu0", 44.0, 41.8, "draining", in_flight=4, cold_s=74, parallel=8, rate={"value": 212, "unit": "tok/s"},
                 instance={"gated_for": "coder-14b"}, **SLEEPY),
        resident("coder-14b", "gpu0", 1.2, 1.2, "asleep", ram=21.4, level=1, idle_s=11, need=24.0, cold_s=52, queued=3, oldest_s=7.0, eta_s=12.0,
                 estimates={"wake_s": 2.9, "cold_s": 52.0, "n": 31}, **SLEEPY),
        resident("rerank-m3", "gpu1", 2.1, 1.8, in_flight=1, pinned=True, cold_s=3.4, parallel=4, engine="llama_server", rate={"value": 38, "unit": "req/s"}),
        resident("embed-l", "gpu1", 3.4, 3.3, idle_s=0.4, cold_s=6.1, parallel=32, engine="tei", rate={"value": 212, "unit": "req/s"}, note="stays: nobody wants the memory"),
        resident("sql-7b", "gpu1", 9.2, 9.4, idle_s=184, cold_s=12, parallel=4, engine="llama_server", next={"state": "stops", "in_s": 72}),
        resident("vision-11b", "gpu1", 26.0, 11.3, "starting", cold_s=18, parallel=8, queued=1, oldest_s=9.8, eta_s=8.0, expected_s=8.0,
                 instance={"progress": {"phase": "weights", "fraction": 0.43}}),
        resident("summary-7b", "gpu1", 0.9, 0.9, "asleep", ram=14.9, level=1, idle_s=540, need=15.2, cold_s=38,
                 estimates={"wake_s": 1.4, "cold_s": 38.0, "n": 9}, next={"state": "stops", "in_s": 2460}, **SLEEPY),
        resident("judge-70b", "gpu0", 0.0, 0.0, "asleep", ram=0.7, level=2, idle_s=5160, need=71.5, cold_s=131,
                 estimates={"wake_s": 38.0, "cold_s": 131.0, "n": 4}, **SLEEPY),
        resident("draft-3b", "ram", 2.9, 2.9, idle_s=66, cold_s=2.2, parallel=2, engine="llama_server", next={"state": "stops", "in_s": 180}),
        *(model(id, need=need, cold_s=cold, engine=engine) for id, cold, need, engine in HOME),
        model("legacy-13b", "failed", 31.0, 57, failures=2, backoff_s=32.0,
              last_error="out of memory while loading (twice): needed 31.0 GiB, 27.4 were free. Nothing was evicted for it."),
    ]  # fmt: skip
    queue = [
        {"model": "vision-11b", "device": "gpu1", "need_mib": mib(26), "held_mib": 0, "free_mib": mib(28.1), "short_mib": 0, "victims": [], "eta_s": 8.0,
         "reason": "It fits beside the others and is loading its weights. Nothing had to leave.",
         "stages": [{"name": "spawn", "expected_s": 3, "fraction": 1}, {"name": "weights", "expected_s": 10, "fraction": 0.43}, {"name": "graphs", "expected_s": 5, "fraction": 0}],
         "requests": [request("r-9f1c", 9.8, "web")]},
        {"model": "coder-14b", "device": "gpu0", "need_mib": mib(24), "held_mib": mib(1.2), "free_mib": mib(16.7), "short_mib": mib(6.1), "victims": ["agent-32b"], "eta_s": 12.0,
         "reason": "6.1 GiB short, agent-32b has 4 requests running. New ones for it wait; these finish first.",
         "stages": [{"name": "gate", "expected_s": 5, "fraction": 1}, {"name": "agent-32b drains", "expected_s": 8, "fraction": 0.25}, {"name": "sleeps", "expected_s": 3.1, "fraction": 0},
                    {"name": "wake", "expected_s": 2.9, "fraction": 0}],
         "requests": [request("r-9f21", 7.0, "ci"), request("r-9f24", 4.9, "ci"), request("r-9f26", 2.6, "ide")]},
    ]  # fmt: skip
    headline = {"text": "gpu0 loses 38 % of its time to swaps", "link": "#/advice", "severity": "warn"}
    return status(models, now=now, queue=queue, advice={"headline": headline, "count": 2})


def fetch(reference: str, stage: str = "fetching", done: float = 0.0, total: float | None = None, **more: Any) -> Json:
    """GiB of files on their way."""
    known: Json = {"bytes_per_s": None, "eta_s": None, "waiting": 0, "since_s": 6.2, **more}
    return {
        "reference": reference, "stage": stage, "done_bytes": round(done * G**3), "total_bytes": None if total is None else round(total * G**3), **known,
    }  # fmt: skip


def absent(id: str, reference: str, coming: Json | None = None, **more: Any) -> Json:
    """A model whose files are not on this host yet."""
    total = coming and coming["total_bytes"]
    progress = coming and {"phase": "fetching", "fraction": coming["done_bytes"] / total if total else None}
    known: Json = {
        "need": 0.0,
        "engine": "llama_server",
        "reference": reference,
        "absent": True,
        "fetch": coming,
        "progress": progress,
        "starts": 0,
    }
    return {**model(id, **{**known, **more}), "need_mib": None, "up_s": None, "eta_s": None}


def peer(id: str, proxy: str, models: list[str], **more: Any) -> Json:
    return {
        "id": id, "proxy": proxy, "healthy": True, "circuit": "closed", "since_s": 10_800.0, "last_error": "", "last_error_s": None, "models": models,
        "models_unwell": [], "priority": 0, "weight": 1, "overflow": False, "prefer": False, "in_flight": 0, "requests": 0, "failures": 0, "outcomes": {}, **more,
    }  # fmt: skip


PEERS = [
    peer("big-box", "https://10.0.0.5:8443", ["llama-70b", "org/model-a"], in_flight=2, requests=1412, failures=3, last_error="it answered 503", last_error_s=4100.0),
    peer("hosted", "https://gateway.example.org", ["llama-70b", "qwen3-235b", "mistral-l", "glm-4.6", "kimi-k2", "gpt-oss-120b"], requests=88),
    peer("attic", "http://10.0.0.9:8080", ["whisper-l"], healthy=False, circuit="open", since_s=95.0, requests=7, failures=5, last_error="no connection within 5 s", last_error_s=3.0),
]  # fmt: skip


def far(now: float) -> Json:
    """As `turns`; three models are not on this host yet, and three other servers are asked too."""
    told = turns(now)
    told["models"][-1:] = [
        absent("gemma-12b", "oci://models.example/team/gemma:12b-q4", fetch("oci://models.example/team/gemma:12b-q4", "fetching", 2.45, 7.2, bytes_per_s=412_000_000, eta_s=12.4, waiting=3)),
        absent("phi-4", "hf://microsoft/phi-4-gguf:Q4_K_M", fetch("hf://microsoft/phi-4-gguf:Q4_K_M", "queued", since_s=1.0)),
        absent("olmo-7b", "hf://allenai/OLMo-2-7B-GGUF:Q4_K_M"),
        told["models"][-1],
    ]  # fmt: skip
    told["models"][0]["reference"] = "hf://org/chat-8b-gguf:Q8_0"
    return {**told, "peers": [dict(one) for one in PEERS]}


def crowd(now: float, count: int = 200, resident_count: int = 0) -> Json:
    """Many models; with `resident_count` so many of them up, on two devices."""
    families = ("atlas", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "isle", "juniper", "kite", "larch")
    models = []
    for i in range(count):
        id = f"{families[i % len(families)]}-{1 + i // len(families)}b-{'code' if i % 3 else 'chat'}"
        if i < resident_count:
            up = {
                "in_flight": i % 5,
                "idle_s": None if i % 5 else 3.0 + i,
                "queued": 1 if i % 7 == 0 else 0,
                "parallel": 8,
                "oldest_s": 1.0,
            }
            models.append(resident(id, f"gpu{i % 2}", 2.0, 1.8, ["ready", "ready", "draining", "waking"][i % 4], cold_s=9, **up))
        else:
            models.append(model(id, need=1.5 + i % 40, cold_s=2 + i % 70, engine="vllm" if i % 2 else "llama_server"))
    return status(models, now=now)


def hostile(now: float) -> Json:
    """The same as `turns`, under names that want to be something else."""
    told = turns(now)
    names = {one["id"]: HOSTILE[i // 2 % len(HOSTILE)] for i, one in enumerate(told["models"]) if i % 2 == 1 and i // 2 < len(HOSTILE)}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [renamed(one) for one in value]
        return names.get(value, value) if isinstance(value, str) else value

    told["models"][-1]["last_error"] = "<script>alert(2)</script>\u202e" + "x" * 300
    told["models"][5]["note"] = "<b onclick=alert(3)>note</b>"
    reference = f"hf://{HOSTILE[0]}/{'y' * 200}:Q4"
    told["models"].append(absent("<i>late</i>" + "z" * 90, reference, fetch(reference, "<b>stage</b>", 1, 3, waiting=1, eta_s=1.0)))
    told["peers"] = [
        peer(HOSTILE[1], f"https://{'h' * 200}.example", list(HOSTILE), healthy=False, last_error="<script>alert(4)</script>" + "e" * 300)
    ]
    return dict(renamed(told))


def bare(now: float) -> Json:
    """What the API said before it knew of queues, rates and advice."""
    told = turns(now)
    for name in ("now", "boot_id", "advice"):
        del told[name]
    del told["queue"]["models"]
    for one in told["devices"]:
        one.pop("outside_by", None)
    for one in told["models"]:
        for name in ("parallel", "rate", "note", "next", "estimates"):
            one.pop(name, None)
        for each in one["instances"]:
            each.pop("gated_for", None)
            each.pop("progress", None)
    return told


# ------------------------------------------------------------------------------------------------------- other routes


def timeline(now: float) -> Json:
    """Two models that take turns since seven minutes, a third that came back."""
    spans: list[Json] = []
    waits: list[Json] = []
    swaps: list[Json] = []

    def put(device: str, model: str, begin: float, end: float | None, state: str, size: float, offset: float) -> None:
        if end is None or end > begin:
            spans.append({"instance": f"{model}/1", "model": model, "device": device, "from": begin, "to": end, "state": state, "mib": mib(size), "offset_mib": mib(offset)})  # fmt: skip

    first = now - 25 - 72 * 6
    put("gpu0", "chat-8b", now - 900, None, "ready", 14.8, 0)
    put("gpu0", "agent-32b", now - 900, first, "ready", 44, 14.8)
    put("gpu0", "coder-14b", now - 800, first, "asleep", 1.2, 60.5)
    for turn in range(7):
        at = first + 72 * turn
        for model_, begin, end, state, size, offset in (
            ("agent-32b", 0, 23, "ready", 44, 14.8), ("agent-32b", 23, 31, "draining", 44, 14.8), ("agent-32b", 31, 34.1, "going_to_sleep", 44, 14.8),
            ("agent-32b", 34.1, 65.8, "asleep", 1.4, 62.5), ("agent-32b", 65.8, 72, "waking", 44, 14.8), ("coder-14b", 0, 34.1, "asleep", 1.2, 60.5),
            ("coder-14b", 34.1, 37, "waking", 24, 14.8), ("coder-14b", 37, 57, "ready", 24, 14.8), ("coder-14b", 57, 64, "draining", 24, 14.8),
            ("coder-14b", 64, 65.8, "going_to_sleep", 24, 14.8), ("coder-14b", 65.8, 72, "asleep", 1.2, 60.5),
        ):  # fmt: skip
            if at + begin < now:
                put("gpu0", model_, at + begin, None if at + end >= now else at + end, state, size, offset)
        for model_, gate, end, come in (("coder-14b", 31, 37, (18, 20.1, 22.4, 29)), ("agent-32b", 64, 71, (50, 53, 55.5, 60, 66))):
            waits += [
                {"model": model_, "from": at + one, "gate_until": min(now, at + gate), "to": None if at + end > now else at + end}
                for one in come
                if at + one < now
            ]
        swaps += [{"at": at + s, "in": into, "out": [out]} for s, into, out in ((34.1, "coder-14b", "agent-32b"), (65.8, "agent-32b", "coder-14b")) if at + s < now]  # fmt: skip
    put("gpu1", "rerank-m3", now - 900, None, "ready", 2.1, 0)
    put("gpu1", "embed-l", now - 900, None, "ready", 3.4, 2.1)
    put("gpu1", "summary-7b", now - 900, None, "asleep", 0.9, 41.3)
    put("gpu1", "vision-11b", now - 900, now - 550, "ready", 26, 14.7)
    put("gpu1", "sql-7b", now - 351, now - 339, "starting", 9.2, 5.5)
    put("gpu1", "sql-7b", now - 339, None, "ready", 9.2, 5.5)
    put("gpu1", "vision-11b", now - 10, None, "starting", 26, 14.7)
    return {"now": now, "spans": spans, "waits": waits, "swaps": swaps}


def many_requests(now: float, count: int) -> list[Json]:
    """Three that are open and `count` that have ended, newest first."""
    names = ("agent-32b", "coder-14b", "chat-8b", "embed-l", "sql-7b")
    ended = [
        {
            "id": f"1-{count - i}", "at": now - 20 - i, "model": names[i % 5], "key_name": f"team-{i % 7}", "class": "interactive",
            "wait": {"queue": (i % 11) / 2, "gate": (i % 3) * 1.5, "load": (i % 4) * 2.0}, "first_token_s": 0.2, "generation_s": (i % 13) / 3,
            "tokens_in": 100 + i, "tokens_out": i % 400, "start": "hot" if i % 4 else "wake", "before": names[i % 3], "outcome": "ok" if i % 9 else "refused",
        }
        for i in range(count)
    ]  # fmt: skip
    return [*(one for one in requests(now) if one["outcome"] in ("waiting", "running"))][:3] + ended


def requests(now: float) -> list[Json]:
    def one(id: str, ago: float, model: str, key: str, cls: str, parts: tuple[float, ...], tokens: tuple[int, int], start: str, before: str, outcome: str = "ok") -> Json:  # fmt: skip
        return {
            "id": id, "at": now - ago, "model": model, "key_name": key, "class": cls, "wait": dict(zip(("queue", "gate", "load"), parts, strict=False)),
            "first_token_s": parts[3], "generation_s": parts[4], "tokens_in": tokens[0], "tokens_out": tokens[1], "start": start, "before": before, "outcome": outcome,
        }  # fmt: skip

    live, quick = "interactive", "batch"
    return [
        one("r-9f21", 7, "coder-14b", "ci", live, (5, 2, 0, 0, 0), (1830, 0), "wake", "agent-32b", "waiting"),
        one("r-9f24", 4.9, "coder-14b", "ci", live, (2.9, 2, 0, 0, 0), (2210, 0), "wake", "agent-32b", "waiting"),
        one("r-9f26", 2.6, "coder-14b", "ide", live, (0.6, 2, 0, 0, 0), (940, 0), "wake", "agent-32b", "waiting"),
        one("r-9f1c", 9.8, "vision-11b", "web", live, (0, 0, 9.8, 0, 0), (1405, 0), "cold", "", "waiting"),
        one("r-9f0e", 11, "agent-32b", "planner", live, (0, 0, 0, 0.5, 10.5), (8120, 512), "hot", "", "running"),
        one("r-9f11", 10, "agent-32b", "planner", live, (0, 0, 0, 0.4, 9.6), (6011, 470), "hot", "", "running"),
        one("r-9f15", 8.6, "agent-32b", "night", quick, (0, 0, 0, 0.6, 8), (3902, 388), "hot", "", "running"),
        one("r-9f1f", 5, "chat-8b", "web", live, (0, 0, 0, 0.1, 4.9), (322, 361), "hot", "", "running"),
        one("r-9eff", 31, "agent-32b", "planner", live, (5, 7.1, 6.7, 0.6, 5.2), (7110, 281), "wake", "coder-14b"),
        one("r-9efd", 34, "agent-32b", "planner", live, (2, 7.1, 6.7, 0.6, 6.8), (6644, 366), "wake", "coder-14b"),
        one("r-9ef8", 38, "agent-32b", "night", quick, (0, 5.8, 6.7, 0.6, 3.1), (1200, 160), "wake", "coder-14b"),
        one("r-9ef2", 44, "embed-l", "rag", quick, (0, 0, 0, 0.02, 0), (4096, 0), "hot", ""),
        one("r-9ef1", 44, "rerank-m3", "rag", live, (0, 0, 0, 0.06, 0), (2900, 0), "hot", ""),
        one("r-9ee7", 58, "coder-14b", "ci", live, (5, 8.2, 6, 0.3, 4.4), (1770, 312), "wake", "agent-32b"),
        one("r-9ee1", 66, "chat-8b", "web", live, (0, 0, 0, 0.1, 6.2), (611, 455), "hot", ""),
        one("r-9ed9", 73, "legacy-13b", "archive", quick, (0, 0, 9.6, 0, 0), (800, 0), "cold", "", "503 out of memory"),
        one("r-9ed0", 85, "coder-14b", "ci", live, (5, 7.4, 6, 0.3, 9.9), (2304, 702), "wake", "agent-32b"),
        one("r-9ecd", 90, "agent-32b", "planner", live, (1.2, 6.9, 6.7, 0.7, 1.1), (9022, 57), "wake", "coder-14b", "client left"),
        one("r-9eb8", 118, "sql-7b", "bi", live, (0, 0, 12, 0.3, 2.2), (498, 122), "cold", ""),
    ]


OUTGROWN = (
    "gpu0 has outgrown one card: for 74 min agent-32b, coder-14b, chat-8b were wanted at once and 41% of the time went into changing them"
)
NOT_OUTGROWN = "gpu0 is not outgrown: agent-32b and coder-14b were all wanted at once only 43% of the time"


def advice(now: float, outgrown: bool = False) -> Json:
    diff = [
        " models:", "   agent-32b:", "-    cmd: vllm serve … --max-model-len 32768 --gpu-memory-utilization 0.55",
        "+    cmd: vllm serve … --max-model-len 16384 --gpu-memory-utilization 0.47",
    ]  # fmt: skip
    fixes = [
        {
            "text": "Cut agent-32b context to 16k",
            "effect": "frees 6.4 GiB, both stay",
            "swaps_h": 0,
            "diff": diff,
            "changes": ["models.agent-32b.memory=38438MiB"],
            "suggested": True,
        },
        {"text": "Pin coder-14b", "effect": "agent-32b would not fit: refused 210/h", "swaps_h": 0},
        {"text": "Longer turns (k 2 → 5)", "effect": "worst wait 20 s → 48 s", "swaps_h": 46},
        {"text": "Second GPU for coder-14b", "effect": "24 GiB card is enough", "swaps_h": 0},
    ]
    counts = (2, 5, 9, 14, 22, 31, 26, 12, 6, 4, 3, 5, 9, 8, 4, 2)
    bins = [{"from_s": round(1.8**i, 1), "n": n} for i, n in enumerate(counts)]
    return {
        "headline": {"text": "gpu0 loses 38 % of its time to swaps", "link": "#/advice", "severity": "warn"},
        "thrash": [{"pair": ["agent-32b", "coder-14b"], "device": "gpu0", "since": now - 511, "swaps_h": 100, "switching_s_h": 660, "draining_s_h": 720, "slow": 31, "slow_total": 34, "short_mib": mib(6.1), "fixes": fixes}],
        "ttl": [{"model": "sql-7b", "bins": bins, "now_s": 300, "suggested_s": 240, "enough": True, "why": "Its callers come back within 2 min or not for half an hour: 5 min keeps memory through gaps that end in a cold start anyway.", "table": [
            {"ttl_s": 300, "cold_starts_day": 31, "gib_hours_day": 44}, {"ttl_s": 240, "cold_starts_day": 32, "gib_hours_day": 38, "remark": "suggested"},
            {"ttl_s": 2700, "cold_starts_day": 9, "gib_hours_day": 131}]},
            {"model": "ocr-2b", "bins": [{"from_s": 1, "n": 2}, {"from_s": 60, "n": 1}], "now_s": 300, "suggested_s": None, "enough": False, "why": "", "table": []}],
        "seen": {"from": now - 3600, "to": now, "hours": 1.0, "requests": 1412}, "replayed": True,
        "outgrown": {"verdict": "outgrown" if outgrown else "tune", "device": "gpu0", "text": OUTGROWN if outgrown else NOT_OUTGROWN, "next_step": "a replica on another GPU (`greenroom generate compose`)" if outgrown else "", "measures": [
            {"name": "time spent changing models, drains aside", "value": 0.41 if outgrown else 0.18, "limit": 0.25},
            {"name": "every model wanted at once", "value": 0.88 if outgrown else 0.43, "limit": 0.75},
            {"name": "best replay still changing", "value": 0.37 if outgrown else 0.0, "limit": 0.25}]},
    }  # fmt: skip


def details(now: float, entry: Json) -> Json:
    """GET /api/models/{id}."""
    if entry.get("absent"):
        return {
            **entry,
            "priority": "interactive",
            "estimate": "",
            "missing": "",
            "requests": {},
            "starts": [],
            "footprint": {"n": 0},
            "day": [],
        }
    names = ("spawn", "listen", "weights", "compile", "graphs", "first_answer")
    phases = [
        (100, "wake", (0, 0.1, 2.4, 0, 0, 0.4)),
        (170, "wake", (0, 0.1, 2.6, 0, 0, 0.3)),
        (3900, "cold", (2.1, 3.8, 21, 14, 9.4, 1.2)),
        (11_000, "cold", (2.0, 3.7, 34, 14.4, 9.1, 1.3)),
    ]
    need = entry["need_mib"]
    hours = [
        (-24, -23, "ready"),
        (-23, -21, "asleep"),
        (-18, -17, "asleep"),
        (-16, -13.6, "ready"),
        (-13.6, -12, "asleep"),
        (-9, -4, "ready"),
        (-2, -0.1, "ready"),
        (-0.1, 0, entry["state"]),
    ]
    return {
        **entry, "parallel": entry.get("parallel"), "priority": "interactive", "estimate": "weights 39.8 GiB", "missing": "", "requests": {"ok": 402, "client_gone": 10},
        "starts": [{"at": now - ago, "kind": kind, "phases": dict(zip(names, parts, strict=True))} for ago, kind, parts in phases],
        "footprint": {"declared": need, "estimated": round(need * 0.905), "measured": round(need * 0.952), "learned": round(need * 0.981), "used": "learned", "n": 14},
        "day": [{"from": now + a * 3600, "to": None if b == 0 else now + b * 3600, "state": state} for a, b, state in hours],
    }  # fmt: skip


def why(now: float, id: str) -> list[Json]:
    told = [
        (7, f"A request came from key ci while {id} slept at level 1."),
        (7, "It needs 24.0 GiB on gpu0: it holds 1.2 asleep, 16.7 were free, 6.1 short. chat-8b is pinned, so only agent-32b can move."),
        (7, "agent-32b was busy and had 15 s of the 22 s it is owed."),
        (2, "Waited 5 s (patience) and agent-32b had its time: gate closed. Its 4 running requests finish."),
    ]
    lines: list[Json] = [{"at": now - ago, "text": text, "cause": "", "refs": []} for ago, text in told]
    return [*lines, {"at": now, "text": "Waiting for agent-32b to drain, then 3.1 s to sleep and 2.9 s to wake.", "now": True}]


def why_absent(now: float, entry: Json) -> list[Json]:
    """What is told of a model whose files are not here."""
    if not entry["fetch"]:
        return []
    return [{"at": now - entry["fetch"]["since_s"], "text": f"fetching {entry['reference']}", "cause": "fetching", "refs": []}]


def events(now: float) -> list[Json]:
    told = [
        (63, "agent-32b", "asleep", "asleep, level 1 in 3.1 s"), (60, "coder-14b", "ready", "ready, woken in 2.9 s"), (40, "coder-14b", "gated", "gated, agent-32b waited 5 s"),
        (32, "coder-14b", "asleep", "asleep, level 1 in 1.8 s"), (27, "agent-32b", "ready", "ready, woken in 4.9 s"), (10, "vision-11b", "starting", "started on gpu1 beside the others"),
        (2, "agent-32b", "gated", "gated, coder-14b waited 5 s"),
    ]  # fmt: skip
    return [
        {"id": i + 1, "at": now - ago, "kind": kind, "model": model, "level": "info", "text": text}
        for i, (ago, model, kind, text) in enumerate(told)
    ]
