"""What those who look at a running server are told beyond its state: requests, the timeline, advice, a model's history.

Looking touches nothing: no model is started, woken or kept by it, and what the ledger has is read in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from greenroom.config import secrets
from greenroom.control.facade import Result
from greenroom.core.facts import State
from greenroom.core.views import QueueView
from greenroom.ledger.reads import Page, Unreadable
from greenroom.ledger.rows import RequestRow, TransitionRow
from greenroom.ledger.schema import RUN_SHIFT
from greenroom.ledger.store import Ledger
from greenroom.proxy.peer_door import PeerVisit
from greenroom.proxy.record import Record
from greenroom.shell.crew import HostCrew
from greenroom.shell.heart import Shell

from .accounts import Accounts
from .advisor import Advisor
from .door import CANCELLED, CANCELLED_STATUS, Visit
from .peers import PeersShown
from .ribbon import Ribbon, day_of
from .wiring import Plan

log = logging.getLogger("greenroom")

T = TypeVar("T")

RATE_S = 10.0
RATE_LEAST_S = 1.0
UNWRITTEN_S = 15.0  # who ended longer ago is in the ledger
DAY_S = 86400.0
STARTS_TOLD = 20
DAY_ROWS_MAX = 2000
DAY_SPANS_TOLD = 600  # the newest; a picture of a day shows no more
OPEN = ("waiting", "running")
ENDED = ("ok", "client_gone", "engine_broke", "cut", "refused")
FAILED = ("engine_broke", "cut", "refused")
OUTCOMES = (*ENDED, *OPEN, "open", "failed")
CANCELLED_TEXT = "an operator cancelled this request"

Row = dict[str, Any]


class Lookout:
    """The part of the Desk that only looks."""

    plan: Plan
    _shell: Shell
    _crew: HostCrew
    _accounts: Accounts
    _ledger: Ledger | None
    peers: PeersShown | None

    def look_out(self, ledger_path: Path | None = None) -> None:
        self.boot_id = uuid.uuid4().hex
        shell = self._shell
        self._ribbon = Ribbon(lambda: shell.scheduler, shell.clock, self._capacities)
        self._advisor = Advisor(ledger_path, self._commands, self._spawn, contexts=self._contexts, secrets=self._secrets)
        self._is_earlier_read = False

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        self._shell.spawn(job)

    @property
    def told(self) -> Any:
        """A teller for the shell."""
        return self._ribbon.told

    def _capacities(self) -> dict[str, int]:
        return {device.id: device.capacity_mib for device in self.plan.setup.devices}

    def _commands(self) -> dict[str, Sequence[str]]:
        return {model.id: model.argv for model in self.plan.config.models}

    def _secrets(self) -> list[str]:
        config = self.plan.config
        words = (word for model in config.models for word in secrets.in_arguments(model.argv))
        return [*config.secrets, *(part for word in words for part in secrets.parts(word))]

    def _contexts(self) -> dict[str, Sequence[tuple[int, int]]]:
        """What smaller contexts would free, where a model's files tell."""
        plan = self.plan
        homes = {
            model.id: [plan.stage.devices[name] for name in model.devices[:1] if name in plan.stage.devices] for model in plan.setup.models
        }
        return {id: found for id, engine in plan.stage.engines.items() if id in homes and (found := engine.contexts(homes[id]))}

    # ------------------------------------------------------------------ now

    def now(self) -> float:
        return time.time()

    def stamp(self) -> object:
        """Changes whenever something happened."""
        shell = self._shell
        return shell.latest_at, id(shell.scheduler), id(self.plan)

    def queue(self) -> Sequence[QueueView]:
        return self._shell.scheduler.queue(self._shell.clock())

    def present(self, model: str) -> tuple[str, Sequence[str]]:
        return self._shell.scheduler.present(model, self._shell.clock())

    def client_of(self, request: int) -> str:
        party = self._shell.parties.get(request)
        return party.wish.client if isinstance(party, Visit) and party.wish is not None else ""

    def outside_by(self, holder: str) -> list[dict[str, Any]]:
        """`pid 4711 (300 MiB)`, as the core knows it, with the name of that process."""
        words = holder.split()
        if len(words) < 2 or words[0] != "pid" or not words[1].isdigit():
            return []
        return [{"pid": int(words[1]), "name": process_name(int(words[1])), "text": holder}]

    def rates(self) -> dict[str, dict[str, Any]]:
        """Model -> what it did a second, lately: tokens where its engine counts them, else requests."""
        return rates_of(self._accounts.latest, time.monotonic())

    def headline(self) -> dict[str, Any] | None:
        return self._advisor.headline(len(self._accounts.latest))

    def advice_count(self) -> int:
        return self._advisor.count()

    def advice(self) -> dict[str, Any]:
        return self._advisor.plain()

    # ------------------------------------------------------------------ requests

    def cancel(self, request: int) -> Result:
        party: object = self._shell.parties.get(request) or self._at_peers().get(request)
        if not isinstance(party, (Visit, PeerVisit)):
            return Result(404, f"there is no waiting or running request {request}; it may have ended just now", "request_not_found")
        was = "running" if isinstance(party, PeerVisit) or party.is_admitted else "waiting"
        if not party.dismiss(f"{CANCELLED_TEXT} while it was {was}"):
            return Result(409, f"request {request} has ended just now", "request_ended")
        return Result(200, f"the {was} request {request} to {party.model} is cancelled; its client is told so")

    async def requests(
        self,
        *,
        since: float | None,
        model: str | None,
        outcome: str | None,
        waited_over_s: float | None,
        cursor: str,
        limit: int,
    ) -> dict[str, Any]:
        """Raises ValueError for a cursor that no page gave."""
        open_rows = [] if cursor else self._open(outcome)
        mine = [] if cursor else self._just_ended(outcome)
        page: Page[RequestRow] = Page(())
        if outcome is None or outcome not in (*OPEN, "open"):
            outcomes: Sequence[str | None] = FAILED if outcome == "failed" else (outcome,)
            page = await self._pages(since, model, outcomes, waited_over_s, cursor, limit)
        run = self._ledger.run if self._ledger is not None else 0
        past = [ended_row(row, id, run) for row, id in zip(page.rows, page.ids, strict=True)]
        known = {one["id"] for one in past}
        oldest = past[-1]["at"] if page.next and past else 0.0
        fresh = [one for one in mine if one["id"] not in known and one["at"] >= oldest]
        rows = [one for one in [*open_rows, *fresh] if wanted(one, since, model, waited_over_s)]
        rows.sort(key=lambda one: (one["outcome"] in OPEN, one["at"]), reverse=True)
        ended = sorted([*(one for one in rows if one["outcome"] not in OPEN), *past], key=lambda one: one["at"], reverse=True)
        return {"now": time.time(), "requests": [*(one for one in rows if one["outcome"] in OPEN), *ended], "cursor": page.next or None}

    async def _pages(
        self, since: float | None, model: str | None, outcomes: Sequence[str | None], waited_over_s: float | None, cursor: str, limit: int
    ) -> Page[RequestRow]:
        ledger = self._ledger
        if ledger is None:
            return Page(())

        def read() -> Page[RequestRow]:
            pages = [
                ledger.find.requests(since, model=model, outcome=one, waited_over_s=waited_over_s, cursor=cursor, limit=limit)
                for one in outcomes
            ]
            if len(pages) == 1:
                return pages[0]
            both = [pair for page in pages for pair in zip(page.rows, page.ids, strict=True)]
            both.sort(key=lambda pair: (pair[0].at, pair[1]), reverse=True)
            is_more = len(both) > limit or any(page.next for page in pages)
            kept = both[:limit]
            return Page(
                tuple(row for row, _ in kept),
                tuple(id for _, id in kept),
                f"{kept[-1][0].at!r}~{kept[-1][1]}" if is_more and kept else "",
            )

        return await self._read(read, Page(()))

    def _open(self, outcome: str | None) -> list[Row]:
        if outcome not in (None, "open", *OPEN):
            return []
        visits = [party for party in self._shell.parties.values() if isinstance(party, Visit)]
        rows = [self._open_row(visit) for visit in visits]
        rows += [self._far_row(request, visit) for request, visit in self._at_peers().items()]
        return [one for one in rows if outcome in (None, "open", one["outcome"])]

    def _open_row(self, visit: Visit) -> Row:
        shell, wish = self._shell, visit.wish
        now, turn = shell.clock(), self._ribbon.turn(visit.model)
        times = shell.scheduler.admission(visit.request) if visit.is_admitted else None
        until = times[1] if times is not None else now
        queue, gate, load = turn.split(visit.asked_at, until) if turn is not None else (max(0.0, until - visit.asked_at), 0.0, 0.0)
        first = visit.first_byte_s if times is not None else None
        generation = max(0.0, now - until - first) if first is not None else None
        return row(
            id=visit.request,
            at=time.time() - (now - visit.asked_at),
            model=visit.model,
            key_name=wish.client if wish is not None else "",
            batch=wish is not None and wish.batch,
            wait=(queue, gate, load),
            first_token_s=first,
            generation_s=generation,
            outcome="running" if times is not None else "waiting",
            path=wish.path if wish is not None else "",
            start="" if times is None else ("hot" if turn is None or load < 0.001 else turn.kind),
        )

    def _at_peers(self) -> Mapping[int, PeerVisit]:
        return self.peers.door.open if self.peers is not None else {}

    def _far_row(self, request: int, visit: PeerVisit) -> Row:
        ran_s, first, wish = self._shell.clock() - visit.asked_at, visit.first_byte_s, visit.wish
        return row(
            id=request,
            at=time.time() - ran_s,
            model=visit.model,
            key_name=wish.client,
            batch=wish.batch,
            wait=(0.0, 0.0, 0.0),
            first_token_s=first,
            generation_s=max(0.0, ran_s - first) if first is not None else None,
            outcome="running",
            path=wish.path,
            start="hot",
            code=f"peer:{visit.peer}",
        )

    def _just_ended(self, outcome: str | None) -> list[Row]:
        """Those that the ledger may not have written yet; all that is known where there is no ledger."""
        if outcome in (*OPEN, "open"):
            return []
        clock, found = time.monotonic(), []
        oldest = clock - UNWRITTEN_S if self._ledger is not None else 0.0
        for at, record in reversed(self._accounts.latest):
            if at < oldest:
                break
            if record.request and (outcome in (None, record.outcome) or (outcome == "failed" and record.outcome in FAILED)):
                found.append(self._record_row(at, record, clock))
        return found

    def _record_row(self, at: float, record: Record, clock: float) -> Row:
        waited_s, turn = record.waited_ms / 1000, self._ribbon.turns.get(record.model)
        began = at - record.took_s
        if turn is not None and record.start in ("cold", "wake"):
            wait = turn.split(began, began + waited_s)
        else:
            wait = (waited_s, 0.0, 0.0)
        first = record.first_byte_s
        return row(
            id=record.request,
            at=time.time() - (clock - began),
            model=record.model,
            key_name=record.client,
            batch=False,
            wait=wait,
            first_token_s=first,
            generation_s=max(0.0, record.took_s - waited_s - first) if first is not None else None,
            tokens=(record.tokens_in, record.tokens_out),
            outcome=outcome_of(record.outcome, record.status),
            path=record.path,
            start=record.start,
            status=record.status,
            code=f"peer:{record.peer}" if record.peer else code_of(record.outcome, record.status, ""),
        )

    # ------------------------------------------------------------------ the past

    async def timeline(self, minutes: float) -> dict[str, Any]:
        now = time.time()
        since, ledger = now - minutes * 60, self._ledger
        if not self._is_earlier_read and since < self._ribbon.began_at and ledger is not None:
            self._is_earlier_read = True
            until = self._ribbon.began_at
            rows = await self._read(lambda: ledger.find.transitions(until - DAY_S, until, limit=DAY_ROWS_MAX).rows, ())
            self._ribbon.earlier(reversed(rows), until)
        return self._ribbon.plain(since, now)

    async def history(self, model: str) -> dict[str, Any]:
        """starts, footprint and day of one model."""
        ledger, now = self._ledger, time.time()
        found: tuple[TransitionRow, ...] = ()
        if ledger is not None:

            def read() -> tuple[TransitionRow, ...]:
                return ledger.find.transitions(now - 30 * DAY_S, model=model, limit=DAY_ROWS_MAX).rows

            found = await self._read(read, ())
        rises = [row for row in found if row.kind in ("start", "wake") and row.ok][:STARTS_TOLD]
        day = [row for row in reversed(found) if row.at + row.took_s > now - DAY_S]
        state = self._shell.scheduler.state_of(model)
        return {
            "starts": [start_of(one) for one in rises],
            "footprint": self._footprint(model),
            "day": day_of(day, now - DAY_S, now, state, self._ribbon.began_at)[-DAY_SPANS_TOLD:],
        }

    def _footprint(self, model: str) -> dict[str, Any]:
        """What is known of its size, in MiB per device, and which of the figures the next start books."""
        config = next((one for one in self.plan.config.models if one.id == model), None)
        estimate = self.plan.estimates.get(model)
        scheduler = self._shell.scheduler
        learned = scheduler.learned(model)
        view = next((one for one in scheduler.view(self._shell.clock()).models if one.id == model), None)
        measured = None
        if view is not None and view.instances and view.state in (State.READY, State.DRAINING):
            held = [
                view.instances[0].measured_mib[device] for device in view.instances[0].devices if device in view.instances[0].measured_mib
            ]
            measured = max(held, default=None)
        source = view.need_source if view is not None else "unknown"
        used = {"declared": "declared", "flags": "estimated", "estimated": "estimated", "measured": "learned"}.get(source)
        return {
            "declared": config.memory_mib if config is not None else None,
            "estimated": estimate.device_mib if estimate is not None else None,
            "measured": measured,
            "learned": learned[0] if learned is not None else None,
            "used": used,
            "n": (view.starts if view is not None else 0) if used == "learned" else 0,
        }

    async def _read(self, read: Any, otherwise: T) -> T:
        """In a thread; a ledger that cannot be read tells nothing, and says so in the log."""
        try:
            found: T = await asyncio.to_thread(read)
        except Unreadable as fault:
            log.warning("%s", fault)
            return otherwise
        return found


# ------------------------------------------------------------------ rows


def row(
    *,
    id: int,
    at: float,
    model: str,
    key_name: str,
    batch: bool,
    wait: tuple[float, float, float],
    first_token_s: float | None,
    generation_s: float | None,
    outcome: str,
    path: str,
    start: str,
    tokens: tuple[int | None, int | None] = (None, None),
    before: str = "",
    status: int = 0,
    code: str = "",
) -> Row:
    return {
        "id": id,
        "at": round(at, 3),
        "model": model,
        "key_name": key_name,
        "class": "batch" if batch else "interactive",
        "wait": dict(zip(("queue", "gate", "load"), (round(one, 3) for one in wait), strict=True)),
        "first_token_s": rounded(first_token_s),
        "generation_s": rounded(generation_s),
        "tokens_in": tokens[0],
        "tokens_out": tokens[1],
        "start": start,
        "before": before,
        "outcome": outcome,
        "path": path,
        "status": status,
        "code": code,
    }


def ended_row(found: RequestRow, id: int, run: int) -> Row:
    first = found.first_byte_s
    rest = found.duration_s - found.waited_s - (first or 0.0)
    return row(
        id=found.request if id >> RUN_SHIFT == run else id,
        at=found.at,
        model=found.model,
        key_name=found.client,
        batch=found.priority == "batch",
        wait=(found.queue_s, found.gate_s, found.load_s + found.wake_s),
        first_token_s=first,
        generation_s=max(0.0, rest) if first is not None else None,
        outcome=outcome_of(found.outcome, found.status),
        path=found.path,
        start=found.start,
        tokens=(found.tokens_in, found.tokens_out),
        before=found.before,
        status=found.status,
        code=code_of(found.outcome, found.status, found.code),
    )


def outcome_of(outcome: str, status: int) -> str:
    """One that an operator cancelled while it waited has left for the core, and was refused for the data plane."""
    return "cut" if status == CANCELLED_STATUS and outcome in ("client_gone", "refused") else outcome


def code_of(outcome: str, status: int, code: str) -> str:
    return CANCELLED if status == CANCELLED_STATUS and outcome in ("client_gone", "refused", "cut") else code


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def wanted(one: Row, since: float | None, model: str | None, waited_over_s: float | None) -> bool:
    waited = sum(one["wait"].values())
    return (
        (since is None or one["at"] >= since)
        and (model is None or one["model"] == model)
        and (waited_over_s is None or waited > waited_over_s)
    )


def start_of(row: TransitionRow) -> dict[str, Any]:
    """`phases` are lengths in seconds; the ledger keeps when each ended."""
    kind = "cold" if row.kind == "start" else "wake"
    return {
        "at": round(row.at, 3),
        "kind": kind,
        "took_s": round(row.took_s, 3),
        "phases": phases_of(row.phases, row.took_s),
        "level": row.level,
    }


def phases_of(ended_s: Mapping[str, float], took_s: float) -> dict[str, float]:
    found, before = {}, 0.0
    for name, end in sorted(ended_s.items(), key=lambda item: item[1]):
        found[name] = round(max(0.0, end - before), 3)
        before = max(before, end)
    if "first_answer" not in found:  # from the last phase that was told to the first good answer
        found["first_answer"] = round(found.pop("ready", max(0.0, took_s - before)), 3)
    return found


def rates_of(latest: Sequence[tuple[float, Record]] | Any, now: float) -> dict[str, dict[str, Any]]:
    """An answer's tokens are spread over the time that they took."""
    tokens: dict[str, float] = {}
    requests: dict[str, int] = {}
    since = now - RATE_S
    for at, record in reversed(latest):
        if at < since:
            break
        if record.outcome != "ok":
            continue
        requests[record.model] = requests.get(record.model, 0) + 1
        if record.tokens_out:
            took_s = max(0.001, record.took_s - record.waited_ms / 1000)
            share = min(1.0, (at - since) / took_s)
            tokens[record.model] = tokens.get(record.model, 0.0) + record.tokens_out * share
    full = len(latest) > 0 and latest[0][0] >= since and len(latest) == getattr(latest, "maxlen", None)
    span_s = max(RATE_LEAST_S, now - latest[0][0]) if full else RATE_S
    return {
        model: {"value": round(tokens[model] / span_s, 1), "unit": "tok/s"}
        if model in tokens
        else {"value": round(count / span_s, 2), "unit": "req/s"}
        for model, count in requests.items()
    }


def process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
