"""Three fake vLLMs on one measured card with room for about one and a half of them awake, and all that sleep can do wrong goes wrong.

    python -m bench.sleep_soak [--minutes 30] [--seed 1] [--keep FOLDER]

Every few seconds other hazards of the fake are switched on: sleeps, wakes and reloads that are slow, hang, fail, lie, run out
of memory or kill; first inferences that do; workers that die in their sleep; starts that fail.  Meanwhile clients ask,
some hang up, operators sleep, wake, load, unload and pin, the configuration is read again, and another program takes memory
of the card and gives it back.  All chances come from the seed; the order of events is the machine's.

What must hold all the time:

* an answer is whole and exactly what the engine says greedily, or it is an explicit error; it comes within WAIT_S_MAX;
* the book covers what each engine really holds, host copies too, and never exceeds capacity - headroom; what is measured is
  what is held, once that has been the same for SETTLED_S;
* no engine is put to sleep over a request, or asked while it sleeps; the card is never asked for more than it has;
* afterwards, with the hazards off, every model answers and sleeps; nothing is left; memory and descriptors are as before.

Prints the figures; exit 1 on a violation, told with the model's story and the last lines of the engines' journals.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.stories.card import Card, Driver, Slot, is_alive
from tests.stories.rig import CONTROL, Exchange, Fake, Reply, Rig, is_open, vllm

from bench.harness import percentile, print_table, rss_mib, workplace

WAIT_S_MAX = 60.0  # for any answer, whatever happens to its model meanwhile
STEP_S_MAX = 3.0  # sleep_timeout and wake_timeout: what a hang costs
SILENT_S_MAX = 5.0  # busy_timeout
CARD_MIB, CARD_HEADROOM_MIB = 3600, 64
HOST_MIB = 3072  # greenroom books so much host RAM for the processes of any vLLM
RAM_MIB = 3 * HOST_MIB + 2884  # all three up, and the two largest copies
LAG_S = 0.1  # the card forgets the memory of an ended process late
TICK_S = 0.01
SAMPLE_S = 0.05
SAMPLE_S_WORST = 0.15  # a sample that took longer says nothing: much may have happened meanwhile
SETTLED_S = 2.5  # greenroom looks at the card once a second
JOURNAL_S = 0.25
RSS_MIB_MAX, FDS_MAX = 20.0, 5
TOLD_MAX = 6  # violations told in full
TAIL_LINES = 100
CARD_SLOT = Slot(0, "GPU-soak", CARD_MIB)


@dataclass(frozen=True, slots=True)
class Player:
    """One of the models."""

    name: str
    version: str
    vram: int
    asleep: str  # MiB it keeps, of level 1 and 2
    weights: int
    sleep: str
    canary: str
    compared: bool  # every wake of it is: only then may it come back talking nonsense

    def fake(self, journal: Path, seed: int, **live: str) -> Fake:
        keys = {
            "sleep_timeout": f"{STEP_S_MAX}s",
            "wake_timeout": f"{STEP_S_MAX}s",
            "busy_timeout": f"{SILENT_S_MAX}s",
            "canary": self.canary,
        }
        knobs = {"version": self.version, "journal": str(journal), "seed": seed, "enforce": 1, "stream": "16x0.01", "ready_after": 0.2}
        config = {"device": "gpu0", "healthCheckTimeout": "20s", "unloadTimeout": "3s", **keys, **live}
        return vllm(self.vram, self.asleep, sleep=self.sleep, weights=self.weights, config=config, **knobs)


PLAYERS = (
    Player("big", "0.16.0", 2400, "270", 1600, "1", "auto", False),  # of the versions that die of a sleep over a request
    Player("mid", "0.22.0", 1800, "210", 1200, "2", "auto", True),
    Player("small", "0.32.0", 1200, "150,120", 800, "auto", "always", True),
)
NAMES = tuple(player.name for player in PLAYERS)
COMPARED = frozenset(player.name for player in PLAYERS if player.compared)

DEATHS = ("die:1", "die:139", "die:kill")
HAZARDS = {
    "on_sleep": ("slow:0.5", "slow:6", "hang", "500", "no_free", *DEATHS),
    "on_wake": ("slow:0.5", "slow:6", "hang", "500", "oom", "oom_partly", "stuck", "garbage", *DEATHS),
    "on_wake_kv": ("slow:0.5", "hang", "500", "oom", "oom_partly", "stuck", "garbage", *DEATHS),
    "on_reload": ("slow:0.5", "hang", "500", "no_load", *DEATHS),
    "on_first": ("die:139", "500", "hang", "slow:0.5", "garbage"),
    "on_asleep": ("worker_dies:0", "worker_dies:0.1", "worker_dies:1"),
}
AT_START = ("exit_at_start:1", "oom", "share")
CONFIG = {
    "devices": {"gpu0": {"headroom": f"{CARD_HEADROOM_MIB}MiB"}, "ram": {"memory": f"{RAM_MIB}MiB", "probe": "none"}},
    "scheduling": {"room_wait_s": 5, "backoff_max_s": 3, "early_sleep_s": 2},
}


# ----------------------------------------------------------------------------------------------------------- what was seen


@dataclass(slots=True)
class Violation:
    text: str
    evidence: str
    count: int = 1


@dataclass
class Findings:
    """Figures, and what must not be."""

    answers: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    orders: Counter[str] = field(default_factory=Counter)
    reloads: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    hazards: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    spare_mib_least: int = CARD_MIB  # the book over what is really held
    measured_off_mib: int = 0  # the worst difference of measured and held
    outside_mib_most: int = 0
    status_s: list[float] = field(default_factory=list)
    before: tuple[float, int] = (0.0, 0)  # resident MiB, descriptors of the server
    after: tuple[float, int] = (0.0, 0)
    violations: dict[str, Violation] = field(default_factory=dict)
    witness: Callable[[str], str] = field(default=lambda _: "")  # what to tell with a violation of a model

    def violate(self, text: str, model: str = "") -> None:
        """Note what must not be; the same again is only counted."""
        key = re.sub(r"\d+(\.\d+)?|'[^']*'", "N", text)
        if key in self.violations:
            self.violations[key].count += 1
        else:
            evidence = self.witness(model) if len(self.violations) < TOLD_MAX else ""
            self.violations[key] = Violation(text, evidence)

    def told(self) -> str:
        return "\n\n".join(f"VIOLATION ({each.count} x): {each.text}\n{each.evidence}" for each in self.violations.values())

    def print(self) -> None:
        for heading, counts in (("answers", self.answers), ("moves", self.moves), ("hazards that struck", self.hazards)):
            print_table([(heading, "count"), *((what, str(count)) for what, count in sorted(counts.items()))])
            print()
        waits, most_s = self.waits_s, max(self.waits_s, default=0.0)
        print(f"waits: p50 {percentile(waits, 0.5):.2f} s, p99 {percentile(waits, 0.99):.2f} s, {most_s:.1f} s at most")
        print(f"orders: {dict(sorted(self.orders.items()))}")
        print(f"reloads: {dict(sorted(self.reloads.items()))}")
        print(f"status: {self.samples} samples, p99 {percentile(self.status_s, 0.99) * 1000:.0f} ms")
        print(f"compared: {dict(sorted(self.compared.items()))}")
        print(
            f"least spare of the book over what is held: {self.spare_mib_least} MiB; worst |measured - held|: {self.measured_off_mib} MiB"
        )
        print(f"most held by another program: {self.outside_mib_most} MiB")
        print(f"server: {self.before[0]:.1f} -> {self.after[0]:.1f} MiB resident, {self.before[1]} -> {self.after[1]} descriptors")


# ------------------------------------------------------------------------------------------------------------------ truth


class Truth(Driver):
    """The card's driver; also clears away what dead engines claimed, and sees whether more is held than there is."""

    def __init__(self, card: Card, rig: Rig, findings: Findings) -> None:
        super().__init__(card, rig)
        self._findings = findings
        self._written: object = None
        self.grown_at = 0.0  # when another program last took memory

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            try:
                self._tick()
            except Exception as exc:
                self._findings.violate(f"the card's driver failed: {exc!r}")

    def _tick(self) -> None:
        self.look()
        if self._used_mib() > CARD_MIB and time.monotonic() - self.grown_at > SETTLED_S:
            self.look()  # the claims are not read at one moment
            if (used := self._used_mib()) > CARD_MIB:
                self._findings.violate(f"{used} MiB are held on a card of {CARD_MIB}: {held_by_model(self.rig.claims)}")
        lagging = any(each.ended_at is not None for each in self.card.held.values())
        state = [(pid, each.mib) for pid, each in self.card.held.items()], self.card.foreign
        if lagging or state != self._written:
            self._written = state
            self.card.write()
            self.card.over.clear()
            self._clear()

    def _used_mib(self) -> int:
        living = sum(each.mib for each in self.card.held.values() if each.ended_at is None)
        return living + outside_mib(self.card)

    def _clear(self) -> None:
        for path in self.rig.claims.glob("*.claim") if self.rig.claims.is_dir() else ():
            pid = int(path.stem)
            if not is_alive(pid) and pid not in self.card.held:
                path.unlink(missing_ok=True)


def outside_mib(card: Card) -> int:
    return sum(mib for _, mib in card.foreign.values())


def held_by_model(claims: Path) -> dict[str, tuple[int, int]]:
    """model -> MiB of the card and of host RAM that its living engines hold."""
    held: dict[str, tuple[int, int]] = {}
    for path in claims.glob("*.claim"):
        with contextlib.suppress(OSError, ValueError):
            claim = json.loads(path.read_text())
            if is_alive(claim["pid"]):
                mib, host = held.get(claim["model"], (0, 0))
                held[claim["model"]] = (mib + claim["mib"], host + claim["host"])
    return held


# ---------------------------------------------------------------------------------------------------------------- the book


@dataclass(slots=True)
class Seen:
    """A model as the last sample showed it."""

    state: str = ""
    held: tuple[int, int] = (0, 0)
    since: float = 0.0  # all that is the same since


class Observer(threading.Thread):
    """Compares the book with what is held, many times a second."""

    def __init__(self, rig: Rig, card: Card, findings: Findings) -> None:
        super().__init__(daemon=True)
        self._rig, self._card, self._findings = rig, card, findings
        self._end = threading.Event()
        self._seen: dict[str, Seen] = {}
        self._outside: tuple[int, float] = (0, 0.0)  # MiB, since when
        self._rising: set[str] = set()
        self._outside_told: dict[str, int] = {}  # device -> MiB in the last sample
        self.latest: dict[str, Any] = {"models": [], "devices": []}

    def finish(self) -> None:
        self._end.set()
        self.join(30)

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._rig.port, timeout=WAIT_S_MAX)
        while not self._end.wait(SAMPLE_S):
            try:
                self._sample(connection)
            except Exception as exc:
                self._findings.violate(f"/api/status could not be read: {exc!r}")
                connection.close()
        connection.close()

    def _sample(self, connection: http.client.HTTPConnection) -> None:
        held, outside = held_by_model(self._rig.claims), outside_mib(self._card)
        began_at = time.monotonic()
        connection.request("GET", "/api/status")
        status = json.loads(connection.getresponse().read())
        took_s = time.monotonic() - began_at
        steady = held_by_model(self._rig.claims) == held and outside_mib(self._card) == outside and took_s < SAMPLE_S_WORST
        self._findings.samples += 1
        self._findings.status_s.append(took_s)
        self.latest = status
        self._look(status, held, outside, began_at, steady)

    def _look(self, status: Mapping[str, Any], held: Mapping[str, tuple[int, int]], outside: int, now: float, steady: bool) -> None:
        if outside != self._outside[0]:
            self._outside = (outside, now)
        for model in status["models"]:
            name, state = model["id"], model["state"]
            mine = held.get(name, (0, 0))
            seen = self._seen.get(name)
            if seen is None or not steady or (seen.state, seen.held) != (state, mine):
                seen = self._seen[name] = Seen(state, mine, now)
            if steady:
                self._compare(model, mine, now - seen.since >= SETTLED_S)
        for device in status["devices"]:
            self._look_at(device, {model["id"] for model in status["models"] if model["state"] in ("starting", "waking")})
        gpu = next(device for device in status["devices"] if device["id"] == "gpu0")
        if all(now - since >= SETTLED_S for since in (self._outside[1], *(seen.since for seen in self._seen.values()))):
            self._differ("the card's use", gpu["used_mib"] or 0, sum(mib for mib, _ in held.values()) + outside, "")
        self._rising = {model["id"] for model in status["models"] if model["state"] in ("starting", "waking")}

    def _compare(self, model: Mapping[str, Any], held: tuple[int, int], settled: bool) -> None:
        """One model: is what it holds booked, and measured?"""
        name, state, findings = model["id"], model["state"], self._findings
        instance = next(iter(model["instances"]), {"reserved_by_device_mib": {}, "measured_by_device_mib": {}, "level": 0})
        booked, ram = instance["reserved_by_device_mib"].get("gpu0", 0), instance["reserved_by_device_mib"].get("ram", 0)
        findings.compared[state] += 1
        if state != "asleep" or settled:
            findings.spare_mib_least = min(findings.spare_mib_least, booked - held[0])
            if held[0] > booked:
                findings.violate(f"{name} is {state} and holds {held[0]} MiB of the card, {booked} are booked", name)
        if held[1] and held[1] + HOST_MIB > ram:
            findings.violate(f"{name} is {state} with a copy of {held[1]} MiB in host RAM, {ram} are booked with its processes", name)
        if state == "asleep" and held[0] and ram != held[1] + HOST_MIB:
            findings.violate(f"{name} sleeps at level {instance['level']} with a copy of {held[1]} MiB, {ram} of host RAM are booked", name)
        if settled and state == "asleep" and held[0]:
            self._differ(f"the booking of {name} asleep", booked, held[0], name)
        if settled and state in ("ready", "asleep") and held[0]:  # of a sleeper the booking follows each look at the card
            self._differ(f"{name} ({state})", instance["measured_by_device_mib"].get("gpu0", 0), held[0], name)

    def _differ(self, what: str, measured: int, held: int, model: str) -> None:
        self._findings.compared["measured"] += 1
        self._findings.measured_off_mib = max(self._findings.measured_off_mib, abs(measured - held))
        if measured != held:
            self._findings.violate(f"{what} is measured as {measured} MiB, {held} are held", model)

    def _look_at(self, device: Mapping[str, Any], rising: set[str]) -> None:
        room = device["capacity_mib"] - device["headroom_mib"]
        if device["reserved_mib"] > room:
            self._findings.violate(f"{device['reserved_mib']} MiB are booked on {device['id']}, which has {room}", min(rising, default=""))
        risen = rising - self._rising
        known = self._outside_told.get(device["id"]) == device["outside_mib"]  # before it was decided, as well as now
        self._outside_told[device["id"]] = device["outside_mib"]
        if risen and known and device["reserved_mib"] + device["outside_mib"] > room:
            booked = f"{device['reserved_mib']} MiB booked and {device['outside_mib']} outside"
            self._findings.violate(f"{', '.join(sorted(risen))} rose with {booked} on {device['id']}, which has {room}", min(risen))


# ------------------------------------------------------------------------------------------------------------- the journals


@dataclass(slots=True)
class Engine:
    """What is known of one engine process by its journal."""

    began_at: float = 0.0
    claimed: bool = False
    stuck: bool = False  # said that it woke, and did not
    struck: bool = False  # by a hazard, in the call under way
    dead: bool = False  # its server still answers, with errors
    wake: tuple[int, float] | None = None  # number of the call that wakes it, and when


class Journals:
    """Follows what the engines write; see the fakes for the words."""

    def __init__(self, rig: Rig, truth: Truth, findings: Findings) -> None:
        self._rig, self._truth, self._findings = rig, truth, findings
        self._offsets: dict[Path, int] = {}
        self._engines: dict[int, Engine] = {}
        self.ports: set[int] = set()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def read(self) -> None:
        lines = []
        for path in self._rig.home.glob(f"{self._rig.journal_path.name}.*"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            lines += [json.loads(line) for line in whole.splitlines()]
        for line in sorted(lines, key=lambda line: line["at"]):
            self._keep(line)
            self._take(line)

    def _keep(self, line: Mapping[str, Any]) -> None:
        """For who reads of a violation: all but the requests' own lines."""
        if line["event"] != "begin" or line["target"].partition("?")[0] in CONTROL:
            dull = ("event", "model", "headers", "argv", "env", "sha256", "at", "budget_mib")
            brief = " ".join(f"{key}={value}" for key, value in line.items() if key not in dull)
            self.tail.append(f"{line['at']:.3f} {line['model']} {line['event']} {brief}")

    def _take(self, line: Mapping[str, Any]) -> None:
        event, name, findings = line["event"], line["model"], self._findings
        engine = self._engines.setdefault(line["pid"], Engine())
        if event == "start":
            findings.moves["cold start"] += 1
            self.ports.add(line["port"])
            engine = self._engines[line["pid"]] = Engine(line["at"])
        elif event == "claim":
            engine.claimed = True
            if line["twins"]:
                findings.violate(f"two engines of {name} live at once", name)
        elif event == "fault":
            findings.hazards[f"{line['knob']}={line['text'].partition('*')[0].partition('%')[0]}"] += 1
            engine.struck, engine.stuck = True, engine.stuck or line["kind"] == "stuck"
        elif event == "exit" and line["why"] in ("oom", "share", "told to at start"):
            if line["why"] == "oom" and not engine.claimed:
                self._no_room(name, "start", engine.began_at)
            else:
                findings.hazards[f"fail={line['why']}"] += 1
        else:
            self._follow(engine, line)

    def _follow(self, engine: Engine, line: Mapping[str, Any]) -> None:
        """Sleep, wake, and what comes between."""
        event, name, findings = line["event"], line["model"], self._findings
        if event == "begin" and line["target"].startswith("/wake_up"):
            engine.wake, engine.struck = (line["number"], line["at"]), False
        elif event == "wake_end":
            engine.wake = None
            findings.moves["wake"] += not line["asleep"]
        elif event == "end" and engine.wake is not None and engine.wake[0] == line["number"]:  # it was answered, and did not wake
            if not (engine.struck or engine.dead):
                self._no_room(name, "wake", engine.wake[1])
        elif event == "sleep_begin" and line["in_flight"]:
            findings.violate(f"{name} was put to sleep over {line['in_flight']} requests", name)
        elif event == "sleep_end":
            findings.moves[f"sleep {line['level']}"] += 1
        elif event == "dead":
            engine.dead = True
        elif event == "asleep_request":
            findings.violate(f"a request came to {name} while it slept", name)
        elif event == "crash" and not engine.stuck:
            findings.violate(f"{name} was made to work on memory that was not there", name)

    def _no_room(self, name: str, what: str, at: float) -> None:
        """The card refused it: only where another program has just taken memory."""
        if at - self._truth.grown_at > SETTLED_S:
            self._findings.violate(f"there was no room on the card for the {what} of {name}", name)
        self._findings.hazards[f"another program took the room of a {what}"] += 1


# -------------------------------------------------------------------------------------------------------------------- chaos


@dataclass
class Soak:
    """Everything that goes on during one run."""

    rig: Rig
    card: Card
    truth: Truth
    findings: Findings
    observer: Observer
    journals: Journals
    seed: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    journal_of: dict[str, Path] = field(default_factory=dict)
    live: dict[str, dict[str, str]] = field(default_factory=dict)
    redefined: int = 0

    def dice(self, role: str) -> random.Random:
        return random.Random(f"{self.seed} {role}")

    async def pause(self, seconds: float) -> bool:
        """False once the end was called."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)
        return not self.stop.is_set()

    # ---------------------------------------------------------------- the configuration

    def configure(self, without: str = "") -> None:
        models = {
            each.name: each.fake(self.journal_of[each.name], self.seed, **self.live.get(each.name, {}))
            for each in PLAYERS
            if each.name != without
        }
        self.rig.write_config(models, **CONFIG)

    def new_journal(self, name: str) -> None:
        """Another journal in its command is another definition: its engine is started anew, and reads a short one."""
        self.redefined += 1
        self.journal_of[name] = self.rig.journal_path.with_name(f"{self.rig.journal_path.name}.{self.redefined}.{name}")

    async def reload(self) -> None:
        dice = self.dice("reload")
        while await self.pause(dice.uniform(6, 16)):
            name, what = dice.choice(NAMES), dice.choice(("same", "times", "times", "definition", "definition", "gone"))
            self.findings.reloads[what] += 1
            if what == "times":
                self.live[name] = dice.choice(({}, {"sleep_after": "1s"}, {"sleep_after": "2s", "ttl": "4s"}, {"ttl": "2s"}))
            elif what == "definition":
                self.new_journal(name)
            self.configure(without=name if what == "gone" else "")
            self.rig.reload()
            if what == "gone":
                await self.pause(dice.uniform(0.5, 3))
                self.configure()
                self.rig.reload()

    # ---------------------------------------------------------------- hazards

    async def hazards(self, name: str) -> None:
        dice = self.dice(f"hazards of {name}")
        self.rig.steer(name, **self.chosen(name, dice))
        while await self.pause(dice.uniform(2, 5)):
            self.rig.steer(name, **self.chosen(name, dice))

    def chosen(self, name: str, dice: random.Random) -> dict[str, Any]:
        knobs: dict[str, Any] = dict.fromkeys((*HAZARDS, "fail", "crash", "wake_s", "sleep_s"))
        if dice.random() < 0.3:
            return knobs
        for knob in dice.sample(sorted(HAZARDS), dice.choice((1, 2, 3, 4))):
            kinds = [kind for kind in HAZARDS[knob] if kind != "garbage" or name in COMPARED]
            chance, times = dice.choice(("", "%0.5", "%0.3")), dice.choice(("", "*1", "*2"))
            knobs[knob] = f"{dice.choice(kinds)}{times}{chance}"
        if dice.random() < 0.05:
            knobs["fail"] = dice.choice(AT_START)
        knobs["crash"] = dice.choice(("exit", "core"))
        knobs["wake_s"], knobs["sleep_s"] = dice.choice((0.02, 0.2)), dice.choice((0.02, 0.2))
        return knobs

    async def outside(self) -> None:
        """Another program takes memory of the card and gives it back."""
        dice = self.dice("outside")
        while await self.pause(dice.uniform(1, 6)):
            await self.take_outside(int(dice.triangular(50, 1500, 300)))
            await self.pause(dice.uniform(0.5, 6))
            self.give_outside()

    async def take_outside(self, mib: int) -> None:
        """As on a card: engines are refused first what it will have, and it is refused what they hold."""
        self.truth.grown_at = time.monotonic()
        self.limit(CARD_MIB - mib)
        await asyncio.sleep(0.1)
        if sum(each.mib for each in self.card.held.values()) + mib > CARD_MIB:
            self.give_outside()
            return
        self.truth.grown_at = time.monotonic()
        self.card.foreign = {os.getpid(): (0, mib)}
        self.findings.outside_mib_most = max(self.findings.outside_mib_most, mib)

    def give_outside(self) -> None:
        self.card.foreign = {}
        self.limit(CARD_MIB)

    def limit(self, mib: int) -> None:
        for name in NAMES:
            self.rig.steer(name, budget=mib)

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self.give_outside()
        for name in NAMES:
            self.rig.steer(name, **dict.fromkeys((*HAZARDS, "fail", "crash", "wake_s", "sleep_s")))

    # ---------------------------------------------------------------- operators

    async def operators(self) -> None:
        dice = self.dice("operators")
        while await self.pause(dice.expovariate(1 / 0.7)):
            name = dice.choice(NAMES)
            what = dice.choice((*("sleep", "wake", "load", "unload") * 3, "pin"))
            query = {
                "sleep": dice.choice(("wait=0", "wait=5", "wait=2&level=1", "wait=2&level=2")),
                "unload": dice.choice(("wait=0", "wait=5", "wait=5&force=1")),
            }.get(what, dice.choice(("wait=0", "wait=2")))
            await self.order(name, what, query)
            if what == "pin":
                await self.pause(dice.uniform(0.2, 2))
                await self.order(name, "unpin", "")

    async def encourage(self) -> None:
        """What was given up after two faults is tried again when somebody says so: here that is soon."""
        dice = self.dice("encouragement")
        while await self.pause(dice.uniform(0.3, 2)):
            for model in self.observer.latest["models"]:
                if model["sleep"]["off"]:
                    await self.order(model["id"], "sleep", "wait=0")
                if model["quarantined"]:
                    await self.order(model["id"], "load", "wait=0")

    async def order(self, name: str, what: str, query: str) -> Reply:
        wait_s = 5 + float(dict(part.split("=") for part in query.split("&") if part).get("wait", 5))
        reply = await self.told(
            self.rig.api("POST", f"/api/models/{name}/{what}?{query}"), wait_s + WAIT_S_MAX / 2, f"{what} of {name}", name
        )
        self.findings.orders[f"{what} {reply.status}"] += 1
        if reply.status not in (200, 202) and (fault := fault_of(reply, None)):
            self.findings.violate(f"{what} of {name}: {fault}", name)
        return reply

    async def told(self, asked: Awaitable[Reply], within_s: float, what: str, model: str) -> Reply:
        try:
            return await asyncio.wait_for(asked, within_s)
        except TimeoutError:
            self.findings.violate(f"{what} was not answered in {within_s:g} s", model)
        except (OSError, asyncio.IncompleteReadError) as exc:
            self.findings.violate(f"{what} was not answered: {exc!r}", model)
        return Reply(0, {})

    # ---------------------------------------------------------------- clients

    async def client(self, number: int) -> None:
        dice = self.dice(f"client {number}")
        while await self.pause(dice.expovariate(1 / 0.4)):
            favourite = NAMES[int(time.monotonic() / 4) % len(NAMES)]  # what people ask for changes
            name = favourite if dice.random() < 0.5 else dice.choice(NAMES)
            question = Question.drawn(name, dice)
            hang_up_s = dice.choice((0.0, 0.02, 0.1, 0.5, 2.0)) if dice.random() < 0.15 else None
            await self.ask(question, hang_up_s)

    async def ask(self, question: Question, hang_up_s: float | None = None) -> None:
        body = {"model": question.model, "stream": question.stream, **question.body}
        exchange = await self.rig.send("POST", question.path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if hang_up_s is not None:
            await self.hang_up(exchange, hang_up_s)
            return
        reply = await self.told(exchange.rest(), WAIT_S_MAX, f"{question.kind} of {question.model}", question.model)
        exchange.close()
        self.rig.replies.clear()
        self.findings.waits_s.append(reply.took_s)
        self.findings.answers[outcome_of(reply)] += 1
        if fault := fault_of(reply, question):
            self.findings.violate(f"{question.kind} of {question.model}: {fault}", question.model)

    async def hang_up(self, exchange: Exchange, after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(exchange.rest(), after_s)
        exchange.close()
        self.rig.replies.clear()
        self.findings.answers["the client hung up"] += 1

    # ---------------------------------------------------------------- the end

    async def tour(self) -> None:
        """Nothing goes wrong: each model loads, answers, sleeps, is woken by who asks, and ends."""
        for name in NAMES:
            dice = self.dice(f"tour of {name}")
            for what, query in (("load", "wait=60"), ("unpin", ""), ("sleep", "wait=30")):
                reply = await self.order(name, what, query)
                if reply.status != 200:
                    self.findings.violate(f"with nothing wrong, {what} of {name} is answered {reply.status} {reply.body[:200]!r}", name)
                reply = await self.rig.chat(name, **Question.of(name, "chat", dice).body)
                if reply.status != 200:
                    self.findings.violate(f"with nothing wrong, a chat of {name} is answered {reply.status} {reply.body[:200]!r}", name)
            await self.order(name, "unload", "wait=30")

    async def rest(self) -> tuple[float, int]:
        """All engines unloaded: MiB and descriptors of the server."""
        for name in NAMES:
            await self.order(name, "unload", "wait=30&force=1")
        await asyncio.sleep(1.0)
        return rss_mib(self.rig.pid), len(os.listdir(f"/proc/{self.rig.pid}/fd"))

    async def watch_journals(self) -> None:
        while await self.pause(JOURNAL_S):
            self.journals.read()

    def witness(self, model: str) -> str:
        """The model's story and the last lines of the engines' journals."""
        self_told = [line.rstrip() for line in self.rig.output[-TAIL_LINES:]]
        story = []
        for name in (model,) if model in NAMES else NAMES:
            connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=5)
            with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
                connection.request("GET", f"/api/models/{name}/why")
                why = json.loads(connection.getresponse().read())
                story += [f"  {name} is {why['state']}", *(f"  {each['at']:.3f} {each['text']}" for each in why["story"][-25:])]
            connection.close()
        moment = f"now {time.monotonic():.3f} (journal), {time.time():.3f} (story)"
        return "\n".join([moment, "story:", *story, "journal:", *self.journals.tail, "server:", *self_told])


# ------------------------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the one right answer."""

    kind: str
    model: str
    path: str
    body: Mapping[str, Any]
    right: Any
    stream: bool = False

    @classmethod
    def drawn(cls, model: str, dice: random.Random) -> Question:
        return cls.of(model, dice.choice(("chat", "chat", "stream", "stream", "stream", "text", "embedding", "rerank")), dice)

    @classmethod
    def of(cls, model: str, kind: str, dice: random.Random) -> Question:
        words = " ".join(dice.choice(("stage", "door", "lamp", "rope", "song")) for _ in range(dice.randint(1, 30)))
        if kind == "embedding":
            vector = [share_of(f"{model} {words} {part}") for part in range(4)]
            return cls(kind, model, "/v1/embeddings", {"input": words}, vector)
        if kind == "rerank":
            documents = [f"{words} {number}" for number in range(3)]
            scores = {index: share_of(f"{model} lamp {text}") for index, text in enumerate(documents)}
            return cls(kind, model, "/v1/rerank", {"query": "lamp", "documents": documents}, scores)
        count = dice.choice((1, 4, 4, 12, 12, 40))
        asked = words if kind == "text" else [{"role": "user", "content": words}]
        how = {"temperature": 0} if dice.random() < 0.7 else {"seed": dice.randint(1, 9)}
        body = {"prompt" if kind == "text" else "messages": asked, "max_tokens": count, **how}
        path = "/v1/completions" if kind == "text" else "/v1/chat/completions"
        right = said(model, json.dumps(asked), how.get("seed", ""), count)
        return cls(kind, model, path, body, right, stream=kind == "stream" or (kind == "text" and dice.random() < 0.5))


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def share_of(text: str) -> float:
    return int.from_bytes(digest(text)[:4], "big") / (1 << 32)


def said(model: str, key: str, salt: object, count: int) -> str:
    """What the fake says; its own words and its own way to draw them."""
    return "".join(" " + WORDS[digest(f"{model} {key} {salt} {index}")[0] % len(WORDS)] for index in range(count))


WORDS = ("stage", "dark", "lamp", "low", "voice", "hums", "rain", "far", "blue", "hills", "dawn", "bell", "rope", "mask", "coat", "door")
INNER = frozenset({"inner_fault", "recovering", "internal_error"})


def outcome_of(reply: Reply) -> str:
    if reply.status == 0:
        return "none"
    how = "stream" if reply.is_stream else "body"
    if reply.error:
        return f"error {reply.status if reply.status >= 400 else 'in a stream'} {reply.error.get('code')}"
    return f"whole {how}" if reply.done else f"cut {how}"


def fault_of(reply: Reply, question: Question | None) -> str:
    """What is wrong with an answer; "" for the right one, and for an explicit error."""
    if reply.error.get("code") in INNER:
        return f"an inner fault: {reply.error}"
    if fault := reply.fault():
        return fault
    if question is None or reply.error or not reply.done:
        return ""
    answer, ended = answer_of(reply, question)
    if answer != question.right:
        return f"a wrong answer: {str(answer)[:200]!r} instead of {str(question.right)[:200]!r}"
    return "" if ended in ("length", None) else f"it ended with {ended!r}, and was sent as if it were whole"


def answer_of(reply: Reply, question: Question) -> tuple[Any, str | None]:
    """The answer, and how the engine says that it ended."""
    try:
        if question.kind == "embedding":
            return reply.json["data"][0]["embedding"], None
        if question.kind == "rerank":
            return {row["index"]: row["relevance_score"] for row in reply.json["results"]}, None
        parts = [json.loads(payload) for payload in reply.tokens] if reply.is_stream else [reply.json]
        return reply.text, parts[-1]["choices"][0]["finish_reason"]
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        return f"{exc!r} of {reply.body[-300:]!r}", None


# ---------------------------------------------------------------------------------------------------------------- the whole


async def run(home: Path, seconds: float, seed: int, clients: int = 8) -> Findings:
    """One soak with its own server in `home`."""
    findings = Findings()
    card = Card(home, (CARD_SLOT,), lag_s=LAG_S)
    rig = Rig(home, {}, env=card.env, budget_mib=CARD_MIB)
    with Truth(card, rig, findings) as truth:
        soak = Soak(rig, card, truth, findings, Observer(rig, card, findings), Journals(rig, truth, findings), seed)
        findings.witness = soak.witness
        for name in NAMES:
            soak.new_journal(name)
        soak.configure()
        try:
            await play(soak, seconds, clients)
        finally:
            await rig.force_down()
    return findings


async def play(soak: Soak, seconds: float, clients: int) -> None:
    rig, findings = soak.rig, soak.findings
    await rig.start_server()
    rig._polls.end()  # the observer looks instead, and does not keep all that it sees
    rig._polls.took_s.clear()
    soak.observer.start()
    await soak.tour()
    findings.before = await soak.rest()
    jobs = [*(soak.client(number) for number in range(clients)), *map(soak.hazards, NAMES)]
    jobs += [soak.operators(), soak.encourage(), soak.reload(), soak.outside(), soak.watch_journals()]
    tasks = [asyncio.create_task(job) for job in jobs]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    soak.stop.set()
    for fault in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(fault, BaseException):
            findings.violate(f"the soak itself failed: {fault!r}")
    await end(soak)


async def end(soak: Soak) -> None:
    """The hazards are over: all is well again, and nothing is left."""
    rig, findings = soak.rig, soak.findings
    soak.calm()
    soak.live.clear()
    soak.configure()
    rig.reload()
    await asyncio.sleep(1.0)
    await soak.tour()
    findings.after = await soak.rest()
    soak.observer.finish()
    soak.journals.read()
    grown, opened = findings.after[0] - findings.before[0], findings.after[1] - findings.before[1]
    if grown > RSS_MIB_MAX:
        findings.violate(f"the server holds {grown:.1f} MiB more than before")
    if opened > FDS_MAX:
        findings.violate(f"the server holds {opened} descriptors more than before")
    try:
        await rig.end_well()
        open_ports = [port for port in soak.journals.ports if is_open(port)]
        assert open_ports == [], f"ports {open_ports} are still open"
    except AssertionError as exc:
        findings.violate(f"at the end: {exc}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--keep", default="", help="a folder for the files of the run; default: a temporary one")
    options = parser.parse_args()
    with workplace(options.keep) as work:
        findings = asyncio.run(run(work, options.minutes * 60, options.seed, options.clients))
    findings.print()
    print(f"\n{findings.told()}" if findings.violations else "\nall as it must be")
    return 1 if findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())
