"""A Facade that says what a test gave it, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from greenroom.control.facade import InstanceExtra, Result
from greenroom.core.facts import Operation, SleepTier, State
from greenroom.core.thrash import Circle
from greenroom.core.views import DeviceView, InstanceView, ModelView, QueueView, View

GPU = DeviceView("gpu0", "gpu", "H100", 9728, 512, 4915, 5222, 307, "pid 4711 (python)", "")


def a_model(id: str, state: State = State.STOPPED, **fields: Any) -> ModelView:
    known: dict[str, Any] = {
        "id": id,
        "state": state,
        "pinned": False,
        "queued": 0,
        "oldest_s": 0.0,
        "eta_s": None,
        "starts": 0,
        "wakes": 0,
        "evictions": 0,
        "failures": 0,
        "backoff_s": 0.0,
        "quarantined": False,
        "need_mib": 4403,
        "need_source": "measured",
        "up_s": 12.0,
        "sleeps": 0,
        "wake_failures": 0,
        "sleep_levels": (),
        "sleep_off": "",
        "sleep_costs": (),
        "last_error": "",
        "blocked": "",
        "instances": (),
    }
    return ModelView(**{**known, **fields})


LEVELS = (SleepTier(1, 1229, 15_360, 0.41, 0.83), SleepTier(2, 1229, 3072, 0.2, 6.5))


def a_sleeper(id: str, level: int = 1, *, model: dict[str, Any] | None = None, **instance: Any) -> ModelView:
    """Asleep on gpu0, with a residue there and its copy in host RAM."""
    tier = LEVELS[level - 1]
    held = {"gpu0": tier.residue_mib, "ram": tier.host_mib}
    known: dict[str, Any] = {"sleep_levels": (1, 2), "sleep_costs": LEVELS, "sleeps": 1, "eta_s": tier.wake_s, **(model or {})}
    told: dict[str, Any] = {"level": level, "idle_s": None, "reserved_mib": held, "measured_mib": {"gpu0": 1200}, "host_mib": tier.host_mib}
    return a_resident(id, State.ASLEEP, model=known, **{**told, **instance})


def an_instance(model: str, state: State, **fields: Any) -> InstanceView:
    known: dict[str, Any] = {
        "model": model,
        "state": state,
        "generation": 1,
        "devices": ("gpu0",),
        "reserved_mib": {"gpu0": 4403},
        "measured_mib": {"gpu0": 4198},
        "host_mib": 0,
        "in_flight": 0,
        "since_s": 60.0,
        "idle_s": 30.0,
        "level": 0,
        "expected_s": None,
    }
    return InstanceView(**{**known, **fields})


def a_resident(id: str, state: State = State.READY, *, model: dict[str, Any] | None = None, **instance: Any) -> ModelView:
    return a_model(id, state, instances=(an_instance(id, state, **instance),), **(model or {}))


class FakeFacade:
    version = "1.2.3"
    boot_id = "b00t"

    def __init__(self, *models: ModelView, devices: Sequence[DeviceView] = (GPU,)) -> None:
        self.models = {one.id: one for one in models}
        self.devices = tuple(devices)
        self.queued = (0, 0.0)
        self.waiting: list[QueueView] = []
        self.clients: dict[int, str] = {}
        self.told_now: dict[str, tuple[str, list[str]]] = {}
        self.rate: dict[str, dict[str, Any]] = {}
        self.worst: dict[str, Any] | None = None
        self.to_change = 0
        self.circles: tuple[Circle, ...] = ()
        self.peers: list[dict[str, Any]] = []
        self.phases: dict[str, str] = {}
        self.cancels: dict[int, Result] = {}
        self.searches: list[dict[str, Any]] = []
        self.ticks = 0
        self.statics: dict[str, dict[str, Any]] = {}
        self.stories: dict[str, list[tuple[float, str]]] = {}
        self.logs: dict[str, list[str]] = {}
        self.past: list[dict[str, Any]] = []
        self.asked: list[tuple[str, Operation, bool, int | None, float]] = []
        self.results: dict[tuple[str, Operation], list[Result]] = {}
        self.on_operate: Callable[[str, Operation], None] = lambda model, operation: None
        self.subscribers: set[asyncio.Queue[Any]] = set()
        self.subscribed = asyncio.Event()
        self.deserted = asyncio.Event()
        self.looks = 0
        self.looked = asyncio.Event()

    def uptime_s(self) -> float:
        return 61.5

    def view(self) -> View:
        self.looks += 1
        self.looked.set()
        return View(100.0, self.devices, tuple(self.models.values()), *self.queued, thrash=self.circles)

    def extra(self, model: str) -> InstanceExtra:
        return InstanceExtra(4242, 5801, self.phases.get(model, "")) if self.models[model].instances else InstanceExtra(None, None)

    def static(self, model: str) -> dict[str, Any]:
        return {"aliases": [], "engine": "llama_server", **self.statics.get(model, {})}

    def resolve(self, name: str) -> str | None:
        if name in self.models:
            return name
        return next((id for id, static in self.statics.items() if name in static.get("aliases", ())), None)

    def near(self, name: str) -> Sequence[str]:
        return [id for id in self.models if id[:3] == name[:3]]

    async def operate(self, model: str, operation: Operation, *, force: bool, level: int | None, wait_s: float) -> Result:
        self.asked.append((model, operation, force, level, wait_s))
        self.on_operate(model, operation)
        results = self.results.get((model, operation), [Result(200, "done")])
        return results.pop(0) if len(results) > 1 else results[0]

    def why(self, model: str) -> Sequence[tuple[float, str]]:
        return self.stories.get(model, [])

    def now(self) -> float:
        return 1_700_000_000.0

    def stamp(self) -> object:
        self.ticks += 1
        return self.ticks

    def story(self, model: str) -> Sequence[dict[str, Any]]:
        return [{"at": at, "text": text, "cause": "told", "refs": []} for at, text in self.stories.get(model, [])]

    def peers_status(self) -> list[dict[str, Any]]:
        return [dict(one) for one in self.peers]

    def present(self, model: str) -> tuple[str, Sequence[str]]:
        return self.told_now.get(model, ("", []))

    def queue(self) -> Sequence[QueueView]:
        return self.waiting

    def client_of(self, request: int) -> str:
        return self.clients.get(request, "")

    def outside_by(self, holder: str) -> Sequence[dict[str, Any]]:
        return [{"pid": 4711, "name": holder}]

    def rates(self) -> Mapping[str, dict[str, Any]]:
        return self.rate

    def headline(self) -> dict[str, Any] | None:
        return self.worst

    def advice_count(self) -> int:
        return self.to_change

    def advice(self) -> dict[str, Any]:
        return {"headline": self.worst, "thrash": [], "ttl": [], "outgrown": None, "seen": None}

    def cancel(self, request: int) -> Result:
        return self.cancels.get(request, Result(404, f"there is no waiting or running request {request}", "request_not_found"))

    async def requests(self, **wanted: Any) -> dict[str, Any]:
        self.searches.append(wanted)
        if wanted["cursor"] == "bad":
            raise ValueError("bad")
        return {"now": self.now(), "requests": [], "cursor": None}

    async def timeline(self, minutes: float) -> dict[str, Any]:
        return {"now": self.now(), "from": self.now() - 60 * minutes, "spans": [], "waits": [], "swaps": []}

    async def history(self, model: str) -> dict[str, Any]:
        return {"starts": [], "footprint": {}, "day": []}

    def log_tail(self, model: str, lines: int) -> Sequence[str]:
        return self.logs.get(model, [])[-lines:]

    async def log_follow(self, model: str) -> AsyncIterator[str]:
        async for line in self._subscribe():
            yield line

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        async for event in self._subscribe():
            yield event

    async def metrics(self, *, engines: bool) -> str:
        return f"greenroom_engines {int(engines)}\n"

    def recent(self, limit: int) -> Sequence[dict[str, Any]]:
        return self.past[-limit:]

    async def _subscribe(self) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.subscribers.add(queue)
        self.subscribed.set()
        self.deserted.clear()
        try:
            while (message := await queue.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            self.subscribers.discard(queue)
            if not self.subscribers:
                self.deserted.set()

    def publish(self, message: Any) -> None:
        """None ends every subscription."""
        for queue in self.subscribers:
            queue.put_nowait(message)

    def change(self, id: str, **fields: Any) -> None:
        self.models[id] = replace(self.models[id], **fields)


def an_event(number: int, text: str = "ready", **fields: Any) -> dict[str, Any]:
    return {"id": number, "at": 1_700_000_000.0 + number, "kind": "ready", "model": "chat", "level": "info", "text": text, **fields}
