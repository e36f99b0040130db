"""What the control plane says, as plain JSON values: pure functions of a View and of what the host knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from greenroom.control.facade import Facade, Result
from greenroom.core.facts import Operation, SleepTier, State
from greenroom.core.views import DeviceView, InstanceView, ModelView, View

# Static facts of a model worth showing in every status; the rest is in GET /api/models/{id} only.
STATIC_IN_STATUS = ("name", "description", "ttl_s", "sleep_after_s")

# llama-swap knows five states; its clients look for `ready` and treat unknown words as an error.
RUNNING_STATES: Mapping[State, str] = {
    State.STARTING: "starting",
    State.READY: "ready",
    State.DRAINING: "ready",
    State.GOING_TO_SLEEP: "stopping",
    State.WAKING: "starting",
    State.STOPPING: "stopping",
}


def status(facade: Facade) -> dict[str, Any]:
    """The whole of GET /api/status."""
    view = facade.view()
    return {
        "version": facade.version,
        "uptime_s": seconds(facade.uptime_s()),
        "devices": [device(one) for one in view.devices],
        "models": [model(one, facade) for one in view.models],
        "queue": {"length": view.queue_length, "oldest_s": seconds(view.queue_oldest_s)},
    }


def device(view: DeviceView) -> dict[str, Any]:
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
    }


def model(view: ModelView, facade: Facade) -> dict[str, Any]:
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
        "eta_s": seconds(view.eta_s),
        "starts": view.starts,
        "sleeps": view.sleeps,
        "wakes": view.wakes,
        "wake_failures": view.wake_failures,
        "evictions": view.evictions,
        "failures": view.failures,
        "backoff_s": seconds(view.backoff_s),
        "quarantined": view.quarantined,
        "need_mib": view.need_mib,
        "need_source": view.need_source,
        "up_s": seconds(view.up_s),
        "sleep": sleep(view),
        "last_error": view.last_error,
        "blocked": view.blocked,
        **shown,
    }


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
    }


def measured_total(view: InstanceView) -> int | None:
    """None: nobody measured it yet, which is not the same as 0 MiB."""
    known = [view.measured_mib[id] for id in view.devices if id in view.measured_mib]
    return sum(known) if known else None


def one_model(view: View, id: str, facade: Facade) -> dict[str, Any] | None:
    """GET /api/models/{id}: the status entry and everything static; None when a reload has just taken it away."""
    for one in view.models:
        if one.id == id:
            return {**facade.static(id), **model(one, facade)}
    return None


def why(id: str, view: ModelView | None, story: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """None: a reload has just taken it away."""
    return {
        "model": id,
        "state": view.state.value if view is not None else State.STOPPED.value,
        "level": next((one.level for one in view.instances), 0) if view is not None else 0,
        "sleep_off": view.sleep_off if view is not None and view.sleep_costs else "",
        "story": [{"at": round(at, 3), "text": text} for at, text in story],
    }


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
