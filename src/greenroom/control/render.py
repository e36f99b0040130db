"""What the control plane says, as plain JSON values: pure functions of a View and of what the host knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.control.facade import Facade, Result
from greenroom.core.facts import Operation, SleepTier, State
from greenroom.core.thrash import Circle, turns_words
from greenroom.core.views import DeviceView, InstanceView, ModelView, QueueView, View

# Static facts of a model worth showing in every status; the rest is in GET /api/models/{id} only.
STATIC_IN_STATUS = (
    "name",
    "description",
    "ttl_s",
    "ttl_auto",
    "ttl_auto_s",
    "sleep_after_s",
    "reference",
    "absent",
    "fetch",
    "fetch_error",
)

# llama-swap knows five states; its clients look for `ready` and treat unknown words as an error.
RUNNING_STATES: Mapping[State, str] = {
    State.STARTING: "starting",
    State.READY: "ready",
    State.DRAINING: "ready",
    State.GOING_TO_SLEEP: "stopping",
    State.WAKING: "starting",
    State.STOPPING: "stopping",
}


LEAVING: Mapping[State, str] = {State.GOING_TO_SLEEP: "going to sleep", State.STOPPING: "stopping"}
SCOPES = ("inference", "view", "admin")


def status(facade: Facade) -> dict[str, Any]:
    """The whole of GET /api/status."""
    view, rates = facade.view(), facade.rates()
    return {
        "version": facade.version,
        "boot_id": facade.boot_id,
        "now": seconds(facade.now()),
        "uptime_s": seconds(facade.uptime_s()),
        "devices": [device(one, facade) for one in view.devices],
        "models": [model(one, facade, rates) for one in view.models],
        "queue": {
            "length": view.queue_length,
            "oldest_s": seconds(view.queue_oldest_s),
            "models": [waiting(one, facade) for one in facade.queue()],
        },
        "thrash": [circle(one, view.at) for one in view.thrash],
        "peers": facade.peers_status(),
        "advice": {"headline": facade.headline() or thrashing(view), "count": max(facade.advice_count(), len(view.thrash))},
    }


def circle(found: Circle, at: float) -> dict[str, Any]:
    """Models that take turns on a device now, and what that costs."""
    return {
        "models": list(found.models),
        "device": found.device,
        "since_s": seconds(at - found.since),
        "swaps": found.swaps,
        "moving_s": seconds(found.moving_s),
        "share": round(found.share, 3),
    }


def thrashing(view: View) -> dict[str, Any] | None:
    """The headline while the advice is not made yet."""
    if not view.thrash:
        return None
    worst = max(view.thrash, key=lambda one: one.share)
    text = f"{turns_words(worst.models, worst.device)}: {worst.swaps} swaps cost {worst.moving_s:.0f} s"
    return {"text": text, "link": "#/advice", "severity": "warn"}


def waiting(view: QueueView, facade: Facade) -> dict[str, Any]:
    """One model of the queue.  need = held + free + short, where something is short."""
    return {
        "model": view.model,
        "device": view.device,
        "need_mib": view.need_mib,
        "held_mib": view.held_mib,
        "free_mib": view.free_mib,
        "short_mib": view.short_mib,
        "victims": list(view.victims),
        "eta_s": seconds(view.eta_s),
        "reason": view.reason,
        "waiting": view.waiting,
        "stages": [{"name": one.name, "expected_s": seconds(one.expected_s), "fraction": seconds(one.fraction)} for one in view.stages],
        "requests": [
            {
                "id": one.request,
                "age_s": seconds(one.age_s),
                "key": facade.client_of(one.request),
                "class": "batch" if one.is_batch else "interactive",
            }
            for one in view.waiters
        ],
    }


def device(view: DeviceView, facade: Facade) -> dict[str, Any]:
    return {
        "id": view.id,
        "kind": view.kind,
        "name": view.name,
        "capacity_mib": view.capacity_mib,
        "headroom_mib": view.headroom_mib,
        "reserved_mib": view.reserved_mib,
        "used_mib": view.used_mib,
        "outside_mib": view.outside_mib,
        "holder": view.holder,
        "lane": view.lane,
        "available_mib": view.available_mib,
        "outside_by": list(facade.outside_by(view.holder)) if view.outside_mib and view.holder else [],
    }


def model(view: ModelView, facade: Facade, rates: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    static = facade.static(view.id)
    shown = {key: static[key] for key in STATIC_IN_STATUS if key in static}
    return {
        "id": view.id,
        "aliases": list(static.get("aliases", ())),
        "engine": static.get("engine", ""),
        "pinned": view.pinned,
        "state": view.state.value,
        "instances": [instance(one, facade) for one in view.instances],
        "queued": view.queued,
        "oldest_s": seconds(view.oldest_s),
        "eta_s": None if static.get("absent") or view.blocked else seconds(view.eta_s),  # how long its files take to come nobody knows
        "starts": view.starts,
        "sleeps": view.sleeps,
        "wakes": view.wakes,
        "wake_failures": view.wake_failures,
        "evictions": view.evictions,
        "failures": view.failures,
        "failing": view.failing,
        "backoff_s": seconds(view.backoff_s),
        "quarantined": view.quarantined,
        "need_mib": view.need_mib,
        "need_source": view.need_source,
        "up_s": seconds(view.up_s),
        "sleep": sleep(view),
        "last_error": view.last_error,
        "blocked": "" if static.get("absent") else view.blocked,
        "parallel": view.parallel,
        "estimates": {"wake_s": seconds(view.wake_s), "cold_s": seconds(view.up_s), "n": view.measured},
        "footprint_mib": view.need_mib,
        "retry_in_s": seconds(view.backoff_s) if view.backoff_s else None,
        "next": {"state": view.next_state, "in_s": seconds(view.next_s)} if view.next_state else None,
        "quantum": {"served_s": seconds(view.served_s), "owed_s": seconds(view.owed_s)} if view.owed_s is not None else None,
        "gated_for": view.gated_for or None,
        "note": view.note,
        "rate": rates.get(view.id),
        "progress": progress(view.instances[0], facade) if view.instances else fetched(static.get("fetch")),
        **shown,
    }


def fetched(fetch: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of files that are being fetched, in the shape of a transition's progress."""
    if fetch is None:
        return None
    total = fetch["total_bytes"]
    return {"phase": "fetching", "fraction": round(fetch["done_bytes"] / total, 4) if total else None}


def progress(view: InstanceView, facade: Facade) -> dict[str, Any] | None:
    """Of a transition under way; the fraction is of the time that it usually takes."""
    if view.state in (State.STARTING, State.WAKING):
        phase = "waking" if view.state is State.WAKING else facade.extra(view.model).phase or "starting"
        whole = view.since_s + (view.expected_s or 0.0)
        return {"phase": phase, "fraction": seconds(min(0.99, view.since_s / whole)) if whole > 0 else None}
    if view.state is State.DRAINING:
        return {"phase": "draining", "fraction": None}
    return {"phase": LEAVING[view.state], "fraction": None} if view.state in LEAVING else None


def sleep(view: ModelView) -> dict[str, Any]:
    """`levels` it may be put to now; `costs` of all that its engine has, a level that it only falls to by itself as well."""
    return {"levels": list(view.sleep_levels), "off": view.sleep_off, "costs": [tier(one) for one in view.sleep_costs]}


def tier(cost: SleepTier) -> dict[str, Any]:
    return {
        "level": cost.level,
        "residue_mib": cost.residue_mib,
        "host_mib": cost.host_mib,
        "sleep_s": seconds(cost.sleep_s),
        "wake_s": seconds(cost.wake_s),
    }


def instance(view: InstanceView, facade: Facade) -> dict[str, Any]:
    """`reserved_mib` and `measured_mib` are totals over its own devices; `*_by_device_mib` tells them apart (and host RAM)."""
    extra = facade.extra(view.model)
    return {
        "devices": list(view.devices),
        "state": view.state.value,
        "generation": view.generation,
        "reserved_mib": sum(view.reserved_mib.get(id, 0) for id in view.devices),
        "measured_mib": measured_total(view),
        "reserved_by_device_mib": dict(view.reserved_mib),
        "measured_by_device_mib": dict(view.measured_mib),
        "ram_mib": view.reserved_mib.get("ram", 0),
        "host_mib": view.host_mib,
        "in_flight": view.in_flight,
        "pid": extra.pid,
        "port": extra.port,
        "since_s": seconds(view.since_s),
        "idle_s": seconds(view.idle_s),
        "level": view.level,
        "expected_s": seconds(view.expected_s),
        "progress": progress(view, facade),
    }


def measured_total(view: InstanceView) -> int | None:
    """None: nobody measured it yet, which is not the same as 0 MiB."""
    known = [view.measured_mib[id] for id in view.devices if id in view.measured_mib]
    return sum(known) if known else None


def one_model(view: View, id: str, facade: Facade) -> dict[str, Any] | None:
    """GET /api/models/{id}: the status entry and everything static; None when a reload has just taken it away."""
    for one in view.models:
        if one.id == id:
            return {**facade.static(id), **model(one, facade, facade.rates())}
    return None


def why(id: str, view: ModelView | None, facade: Facade) -> dict[str, Any]:
    """The story, and last what is true now.  None: a reload has just taken it away."""
    text, refs = facade.present(id)
    now = {"at": seconds(facade.now()), "text": text, "cause": "now", "refs": list(refs), "now": True}
    story = [*facade.story(id), *([now] if text else [])]
    return {
        "model": id,
        "state": view.state.value if view is not None else State.STOPPED.value,
        "level": next((one.level for one in view.instances), 0) if view is not None else 0,
        "sleep_off": view.sleep_off if view is not None and view.sleep_costs else "",
        "story": story,
    }


def me(key_name: str, scopes: str | None) -> dict[str, Any]:
    """Who asks, as the data plane says; without keys everybody may do everything."""
    return {"key_name": key_name, "scopes": list(SCOPES) if scopes is None else [one for one in SCOPES if one in scopes.split(",")]}


def running(facade: Facade) -> dict[str, Any]:
    """llama-swap's GET /running; the command line stays private, it may hold keys."""
    return {"running": [running_one(one, facade) for one in facade.view().models if one.state in RUNNING_STATES]}


def running_one(view: ModelView, facade: Facade) -> dict[str, Any]:
    static = facade.static(view.id)
    port = facade.extra(view.id).port
    return {
        "model": view.id,
        "state": RUNNING_STATES[view.state],
        "cmd": "",
        "proxy": f"http://127.0.0.1:{port}" if port else "",
        "ttl": static.get("ttl_s") or 0,
        "name": static.get("name", ""),
        "description": static.get("description", ""),
    }


def operated(id: str, operation: Operation, result: Result, state: str) -> dict[str, Any]:
    """The answer to an operation that was not refused."""
    return {
        "model": id,
        "operation": operation.value,
        "done": result.status != 202,
        "state": state,
        "message": result.message,
        "status_url": model_path(id),
    }


def error(status: int, message: str, code: str = "", param: str | None = None) -> dict[str, Any]:
    """OpenAI's shape, which every client library can show."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code or None}}


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def model_path(id: str) -> str:
    """The address of a model; slashes of the name are encoded, so that no name can look like another route."""
    return "/api/models/" + "".join(chr(b) if chr(b) in UNRESERVED else f"%{b:02X}" for b in id.encode("utf-8", "surrogateescape"))


UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
