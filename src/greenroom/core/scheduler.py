"""The scheduler: takes one event, returns the actions it calls for.

`handle` applies the event (facts change), then settles: what should happen is derived again from the
facts until nothing changes, so no wake-up can be missed.  No clock, no chance, no waiting in here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from .costs import blend
from .entry import Entry
from .explain import extras, present, queue_views, wanting
from .facts import (
    Action,
    Admit,
    Event,
    InstanceReported,
    MemoryMeasured,
    Model,
    OperatorAsked,
    Outcome,
    Priority,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    RequestLost,
    RequestQuiet,
    Setup,
    SetupChanged,
    ShutdownAsked,
    SleepTier,
    State,
    Ticked,
    Verify,
)
from .failures import MEMORY, count_sleep_fault, ended, raise_need, recover, woke_out_of_memory
from .moves import advance, became_ready, dispatch, fell_asleep, learn_down, note_measured, send_off
from .orders import admit_model, asked, ladder, may_rehearse, pursue, reload
from .placement import is_idle
from .queue import BATCH_WEIGHT, Waiting
from .residency import FALLING, HOME, RISING, SERVING
from .rules import blocked_by, decide, expected_wait_s, explain_wait, hopeless, relieve, worth_a_look
from .stage import EPSILON_S, NEVER, Admission, Phase, Stage, conflicts_of, pools_for
from .thrash import Circle
from .views import DeviceView, InstanceView, ModelView, PlaceView, QueueView, TurnView, View
from .words import requests_wait, span, times

CROWDED_S = 5.0  # after this a client may try again where too many wait for all models together


class Scheduler:
    """All decisions of greenroom, as one synchronous object.

    >>> scheduler = Scheduler(Setup(devices=(...), models=(...)), at=0.0)
    >>> scheduler.start()          # actions for pinned and preloaded models
    >>> scheduler.handle(event)    # actions, in the order they must be carried out
    """

    def __init__(self, setup: Setup, at: float = 0.0) -> None:
        stage = Stage(policy=setup.policy, book=pools_for(setup.devices), groups=setup.groups, now=at)
        stage.conflicts = conflicts_of(setup.groups, [model.id for model in setup.models])
        self._stage = stage
        self._began = False
        self._appliers: dict[type[Any], Callable[[Any], bool]] = {
            RequestArrived: self._arrived,
            RequestFinished: self._finished,
            RequestCancelled: self._cancelled,
            RequestLost: self._lost,
            RequestQuiet: self._quiet,
            InstanceReported: self._reported,
            MemoryMeasured: self._measured,
            OperatorAsked: self._operator,
            Ticked: self._ticked,
            SetupChanged: self._setup_changed,
            ShutdownAsked: self._shutdown,
        }
        for model in setup.models:
            admit_model(stage, Entry.of(model, stage.policy))
        stage.count_pins()

    # ------------------------------------------------------------------ the two verbs

    def start(self) -> list[Action]:
        """What to do before the first event: bring in pinned and preloaded models."""
        return self.handle(Ticked(self._stage.now))

    def handle(self, event: Event) -> list[Action]:
        stage = self._stage
        assert event.at >= stage.now - EPSILON_S, f"time runs backwards: {event.at} after {stage.now}"
        stage.now = max(stage.now, event.at)
        if isinstance(event, RequestArrived):
            if (admit := self._hot_arrival(event)) is not None:
                return [admit]
        elif isinstance(event, RequestFinished) and (actions := self._hot_end(event)) is not None:
            return actions
        stage.out = []
        if not isinstance(event, RequestArrived):
            stage.look_anew()
        if self._appliers[type(event)](event):
            self._settle()
        if stage.touched:
            self._check()
        stage.set_timer()
        return stage.out

    # ------------------------------------------------------------------ the two events of nearly every request
    # Nothing but the request's own model is touched here, so nothing has to be settled or checked.

    def _hot_arrival(self, event: RequestArrived) -> Admit | None:
        """Admit at once where the model is ready, nobody of it waits and a slot is free; None = not so simple."""
        stage = self._stage
        entry = stage.entries.get(event.model)
        if entry is None:
            return None
        instance, queue = entry.instance, entry.queue
        in_flight = instance.in_flight
        if instance.state is not State.READY or queue.weight or instance.suspect or entry.order or entry.retire:
            return None
        if len(in_flight) - len(instance.quiet) >= entry.model.parallel:
            return None
        now, request, generation, costs = stage.now, event.request, instance.generation, entry.costs
        costs.hit(now, len(in_flight) + 1, stage.policy)
        if instance.unused and not in_flight:
            self._learn_gap(entry)
        costs.base = stage.aging
        in_flight.add(request)
        stage.admitted[request] = Admission(entry, generation, now, now)
        if stage.outlook is not None:
            stage.look_anew()
        return Admit(request, event.model, generation, "hot")

    def _hot_end(self, event: RequestFinished) -> list[Action] | None:
        """The end of a request while nobody waits anywhere and nothing is under way; None = not so simple."""
        stage, request = self._stage, event.request
        admission = stage.admitted.get(request)
        if admission is None or stage.requests or stage.moves or stage.ordered:
            return None
        entry = admission.entry
        instance = entry.instance
        if instance.state is not State.READY or admission.generation != instance.generation or instance.quiet or instance.cut:
            return None
        del stage.admitted[request]
        instance.in_flight.discard(request)
        instance.proven = instance.proven or event.outcome is Outcome.OK
        costs, took_s = entry.costs, stage.now - admission.at
        costs.serve_s = took_s if costs.serve_s is None else 0.9 * costs.serve_s + 0.1 * took_s
        entry.served += 1
        if stage.outlook is not None:
            stage.look_anew()
        stage.out = []
        if not instance.in_flight:
            self._fell_idle(entry)
            if entry.ladder_due < stage.timer_at:
                stage.set_timer()
        return stage.out

    # ------------------------------------------------------------------ requests (True = settle is needed)

    def _arrived(self, event: RequestArrived) -> bool:
        stage = self._stage
        entry = stage.entries.get(event.model)
        if entry is None or (entry.retire and entry.successor is None):
            stage.say(Refuse(event.request, 404, "unknown_model", f"there is no model {event.model!r}"))
            return False
        refusal = self._refusal(entry, event)
        if refusal is not None:
            stage.say(refusal)
            return False
        self._learn_arrival(entry)
        batch = (event.priority or entry.model.priority) is Priority.BATCH
        stage.enqueue(entry, Waiting(event.request, stage.now, BATCH_WEIGHT if batch else 1.0))
        return self._look_at(entry)

    def _look_at(self, entry: Entry) -> bool:
        """After one more request for `entry`: decide for it alone where nothing else can have changed."""
        stage = self._stage
        if any(move.phase is Phase.STARTING and move.target is not None and not move.target.queue for move in stage.moves):
            return True
        if entry.state not in (State.STOPPED, State.ASLEEP) or entry.order or entry.retire:
            return False
        count = len(entry.queue)
        if (count > 8 and count & (count - 1)) or not worth_a_look(stage, entry):
            return False  # one more of many changes nothing that a timer does not see
        if not any(stage.lane_open(device) for device in entry.model.devices) and stage.policy.lanes == 1:
            return False
        return decide(stage, entry)

    def _refusal(self, entry: Entry, event: RequestArrived) -> Refuse | None:
        stage, now, request = self._stage, self._stage.now, event.request
        if stage.shutting_down:
            return Refuse(request, 503, "shutting_down", "greenroom is shutting down; ask again in a moment", 5.0)
        if entry.barred:
            return Refuse(request, 503, "misconfigured", entry.barred)
        if entry.quarantined:
            return Refuse(
                request,
                503,
                "quarantined",
                f"{entry.id} ran out of memory too often and is not started again until an operator loads it: {entry.last_error}",
                60.0,
            )
        if entry.unkillable:
            return Refuse(request, 503, "unkillable", f"{entry.id} cannot be started: {entry.last_error}", 60.0)
        if entry.state is State.FAILED:
            left_s = max(0.1, entry.backoff_until - now)
            what = f"{entry.id} failed {times(entry.failures)} ({entry.last_error})"
            text = f"{what} and is tried again in {span(left_s)}; `greenroom load` tries at once"
            return Refuse(request, 503, "backing_off", text, left_s)
        # A cold model takes what a warm one would: its slots are free as soon as it is ready.
        slots = max(0, entry.model.parallel - (len(entry.instance.in_flight) - len(entry.instance.quiet)))
        if entry.queue.clients >= entry.model.queue_limit + slots:
            again_s = max(1.0, expected_wait_s(stage, entry) or 1.0)
            return Refuse(request, 429, "queue_full", f"{_crowd(entry, slots)}; ask again in {span(again_s)}", again_s)
        if stage.clients >= stage.policy.queue_limit:
            text = f"{requests_wait(stage.clients)} here, and no more may (scheduling.queue_limit)"
            return Refuse(request, 429, "queue_full", f"{text}; ask again in {span(CROWDED_S)}", CROWDED_S)
        if entry.state in HOME and not entry.queue:
            verdict = hopeless(stage, entry)
            if verdict is not None and not verdict[2]:
                stage.tell(entry, "refused", verdict[1], "warning")
                return Refuse(request, 503, verdict[0], verdict[1], 30.0)
        if event.deadline_s is not None:
            wait_s = expected_wait_s(stage, entry)
            if wait_s is not None and wait_s > event.deadline_s:
                text = f"{entry.id} can serve in about {span(wait_s)}, later than the deadline of {span(event.deadline_s)}"
                return Refuse(request, 503, "deadline", text, wait_s)
        return None

    def _learn_arrival(self, entry: Entry) -> None:
        stage, instance, costs = self._stage, entry.instance, entry.costs
        costs.hit(stage.now, len(instance.in_flight) + len(entry.queue) + 1, stage.policy)
        if instance.unused and not instance.in_flight and not entry.queue and instance.state not in RISING:
            self._learn_gap(entry)
        costs.base = stage.aging

    def _learn_gap(self, entry: Entry) -> None:
        """It is used again, which ends an idle time once, however often those who ask give up before it is ready."""
        now, instance, costs = self._stage.now, entry.instance, entry.costs
        instance.unused = False
        costs.gaps.append(now - instance.idle_at)
        if entry.model.ttl_auto:
            costs.idle.add(now - instance.idle_at, now)

    def _finished(self, event: RequestFinished) -> bool:
        stage = self._stage
        admission = stage.admitted.pop(event.request, None)
        if admission is None:
            return self._cancelled(RequestCancelled(event.at, event.request))
        entry = admission.entry
        entry.costs.serve_s = blend(entry.costs.serve_s, stage.now - admission.at, 0.1)
        self._left(entry, admission.generation, event.request)
        entry.served += 1
        if event.outcome is Outcome.OK and admission.generation == entry.instance.generation:
            entry.instance.proven = True
        dispatch(stage, entry)
        if entry.instance.busy and entry.state in (State.READY, State.DRAINING):
            return False  # others of it are still in flight: nobody can take its room yet
        return bool(stage.waiting or stage.moves or stage.ordered)

    def _left(self, entry: Entry, generation: int, request: RequestId) -> None:
        """A request is no longer in flight on its instance."""
        instance = entry.instance
        if generation != instance.generation or request not in instance.in_flight:
            return
        was_busy = instance.busy
        instance.in_flight.discard(request)
        instance.quiet.discard(request)
        instance.cut.discard(request)
        if was_busy and not instance.busy:
            self._fell_idle(entry)

    def _fell_idle(self, entry: Entry) -> None:
        stage, model = self._stage, entry.model
        entry.instance.idle_at, entry.instance.unused = stage.now, True
        if entry.pinned or (entry.ladder_due < NEVER and not model.ttl_auto):
            return  # nothing to look at, or it is looked at anyway
        if model.ttl_s is not None:
            stage.wake_at(stage.now + model.ttl_s, entry)
        elif model.ttl_auto:
            stage.wake_at(stage.now + entry.costs.stay_s(model, stage.policy), entry)
        if entry.tiers:
            if model.sleep_after_s is not None:
                stage.wake_at(stage.now + model.sleep_after_s, entry)
            if (early_s := stage.policy.early_sleep_s) is not None and may_rehearse(entry):
                stage.wake_at(stage.now + early_s, entry)

    def _cancelled(self, event: RequestCancelled) -> bool:
        stage = self._stage
        entry = stage.requests.get(event.request)
        if entry is None:
            return False
        item = entry.queue.remove(event.request)
        assert item is not None
        stage.leave_queue(entry, item)
        if entry.id in stage.waiting:
            stage.waiting.add(entry)  # its oldest may have been the one who left
        if entry.state is State.READY and is_idle(entry):
            self._fell_idle(entry)
        return True

    def _lost(self, event: RequestLost) -> bool:
        stage = self._stage
        admission = stage.admitted.pop(event.request, None)
        if admission is None:
            return False
        entry = admission.entry
        self._left(entry, admission.generation, event.request)
        if admission.retried or stage.shutting_down:
            stage.say(
                Refuse(event.request, 502, "engine_died", f"the engine of {entry.id} ended twice before it answered: {event.why}", 1.0)
            )
        elif entry.state is State.FAILED or entry.quarantined or stage.entries.get(entry.id) is not entry:
            left_s = max(1.0, entry.backoff_until - stage.now)
            stage.say(
                Refuse(
                    event.request,
                    503,
                    "backing_off",
                    f"the engine of {entry.id} ended before it answered: {entry.last_error or event.why}",
                    left_s,
                )
            )
        else:
            stage.enqueue(entry, Waiting(event.request, admission.arrived_at, admission.weight, retried=True), front=True)
        if (
            entry.state in (State.READY, State.DRAINING)
            and admission.generation == entry.instance.generation
            and not entry.instance.suspect
        ):
            entry.instance.suspect = True
            stage.say(Verify(entry.id, entry.instance.generation))
        dispatch(stage, entry)  # a fresh instance may be there already
        return True

    def _quiet(self, event: RequestQuiet) -> bool:
        stage = self._stage
        admission = stage.admitted.get(event.request)
        if admission is None or event.request not in admission.entry.instance.in_flight:
            return False
        entry, instance = admission.entry, admission.entry.instance
        was_busy = instance.busy
        if event.quiet:
            instance.quiet.add(event.request)
            if was_busy and not instance.busy:
                self._fell_idle(entry)
            if entry.state is State.DRAINING:
                stage.cut_quiet(entry, f"{entry.id} is leaving, and this connection was silent")
            dispatch(stage, entry)
        else:
            instance.quiet.discard(event.request)
        return len(stage.waiting) > 0

    # ------------------------------------------------------------------ instances and memory

    def _reported(self, event: InstanceReported) -> bool:
        stage = self._stage
        entry = stage.entries.get(event.model)
        if entry is None or event.generation != entry.instance.generation or entry.state in HOME:
            return False  # word of an engine that is gone already
        if event.state is State.STOPPED:
            woken = stage.required(entry, entry.instance.devices) if entry.state is State.WAKING and event.cause in MEMORY else None
            ended(stage, entry, event)
            for sample in event.samples:  # whoever takes the room must know what others took of it meanwhile
                self._measured(sample)
            if woken is not None:
                woke_out_of_memory(stage, entry, had_room=stage.book.fits(woken, entry.id))
        elif event.state is State.READY:
            if entry.state is State.STOPPING or (entry.state is State.WAKING and event.took_s is None):
                return False  # it got ready just as it was stopped: STOPPED follows; or only a look at it, while it is woken
            became_ready(stage, entry, event)
        elif event.state is State.ASLEEP and (entry.state in (State.GOING_TO_SLEEP, State.WAKING) or self._may_doze(entry)):
            self._asleep(entry, event)
        return True

    def _may_doze(self, entry: Entry) -> bool:
        """Whether word that it fell asleep by itself is still true: whoever was admitted meanwhile has woken it."""
        if entry.state is not State.READY or entry.model.doze is None or entry.pinned:  # the room of a pinned one stays its own
            return False
        if entry.instance.suspect:  # whether it lives at all is being looked at
            return False
        return not (entry.instance.in_flight or entry.queue or entry.order or entry.retire) and self._stage.move_of(entry) is None

    def _asleep(self, entry: Entry, event: InstanceReported) -> None:
        stage, move = self._stage, self._stage.move_of(entry)
        woken_in_vain = entry.state is State.WAKING
        fell_asleep(stage, entry, event)
        for sample in event.samples:
            self._measured(sample)
        if woken_in_vain:
            had_room = stage.book.fits(stage.required(entry, entry.instance.devices), entry.id)  # nobody else has it
            if entry.wake_ooms > 1:
                if had_room:
                    count_sleep_fault(stage, entry)
                send_off(stage, entry, 0, "there was no room to wake it twice in a row")  # in its move's lane; a cold start follows
            else:
                if move is not None and move.target is entry:
                    stage.release_lanes(move)
                if had_room:
                    raise_need(stage, entry, event)  # it needs more than is booked for it
        if entry.queue:
            stage.waiting.add(entry)

    def _measured(self, event: MemoryMeasured) -> bool:
        stage = self._stage
        pool = stage.book.pools.get(event.device)
        if pool is None:
            return False
        pool.used_mib, pool.holder = event.used_mib, event.holder
        own = held_mib = 0
        for name, mib in event.own_mib.items():
            entry = stage.entries.get(name)
            if entry is None:
                own += mib
                continue
            booked = pool.holders.get(name, 0)
            held_mib += min(mib, booked)
            if entry.state is State.ASLEEP and event.device in entry.instance.devices and mib != booked:
                self._residue(entry, event.device, mib)
            if entry.state in FALLING:
                own += max(mib, booked)  # it may already be gone from the process and still be held by the driver
            elif event.device in entry.instance.devices:
                own += mib
            else:
                own += min(mib, booked)  # host RAM beyond what is booked for it counts like anybody else's
            note_measured(stage, entry, {event.device: mib}, None)
            learn_down(stage, entry)
        for name, mib in pool.holders.items():
            if name not in event.own_mib and stage.entries[name].state in FALLING:
                own += mib
        pool.available_mib, pool.held_then_mib = event.available_mib, held_mib
        outside = pool.outside_counted_mib(max(0, event.used_mib - own))
        falling = any(stage.entries[name].state in FALLING for name in pool.holders)
        pool.outside_mib = max(pool.outside_mib, outside) if falling else outside
        pool.high_samples = pool.high_samples + 1 if pool.free_mib < 0 else 0
        return bool(stage.waiting or stage.moves or stage.ordered or pool.high_samples)

    def _residue(self, entry: Entry, device: str, mib: int) -> None:
        """A sleeper is booked as what it is seen to hold, and expected to hold that the next time: less only by its own word of
        a sleep, as one that has died without anybody knowing yet holds nothing."""
        held = dict(self._stage.book.of(entry.id))
        held[device] = entry.measured_mib[device] = mib
        if not entry.wake_ooms:  # what a wake in vain has mapped is no measure of the next sleep
            residues, level = entry.costs.residue_mib, entry.instance.level
            residues[level] = max(residues.get(level, 0), *(held.get(each, 0) for each in entry.instance.devices))
        self._stage.book.set(entry.id, held)
        self._stage.touched.add(entry.id)

    # ------------------------------------------------------------------ operators, time, configuration

    def _operator(self, event: OperatorAsked) -> bool:
        asked(self._stage, event)
        return True

    def _ticked(self, event: Ticked) -> bool:
        if not self._began:
            self._begin()
        self._stage.timer_at = NEVER
        self._stage.decide_at = NEVER  # derived again while settling
        return True

    def _begin(self) -> None:
        """What is wanted from the start is wanted from the first tick on: a replay does not know when this object was made."""
        self._began = True
        for entry in list(self._stage.waiting):
            if entry.queue.ghostly and not entry.queue.clients:
                entry.queue.arrive_anew(self._stage.now)
                self._stage.waiting.add(entry)

    def _setup_changed(self, event: SetupChanged) -> bool:
        reload(self._stage, event)
        return True

    def _shutdown(self, event: ShutdownAsked) -> bool:
        stage = self._stage
        stage.shutting_down = True
        for entry in list(stage.entries.values()):
            stage.refuse_all(entry, 503, "shutting_down", "greenroom is shutting down", 5.0)
            stage.deny_all_but(entry, "unload", 503, "shutting_down", "greenroom is shutting down")
            if entry.state not in HOME:
                entry.order = "unload"
                stage.ordered[entry.id] = entry
                if event.force:
                    stage.cut(entry, entry.instance.in_flight, "shutdown", "greenroom is shutting down")
        return True

    # ------------------------------------------------------------------ settling

    def _settle(self) -> None:
        stage = self._stage
        for _ in range(stage.policy.settle_rounds_max):
            if not self._settle_once():
                return
        raise AssertionError(f"did not settle in {stage.policy.settle_rounds_max} rounds; moves: {stage.moves}")

    def _settle_once(self) -> bool:
        stage = self._stage
        changed = False
        stage.look_anew()
        while stage.due and stage.due[0][0] <= stage.now + EPSILON_S:
            at, name = heapq.heappop(stage.due)
            entry = stage.entries.get(name)
            if entry is not None and entry.ladder_due == at:  # else an earlier look replaced it
                entry.ladder_due = NEVER
                self._ladder(entry)
                changed = True
        for entry in list(stage.ordered.values()):
            changed |= self._pursue(entry)
        for move in list(stage.moves):
            if move in stage.moves:
                changed |= advance(stage, move)
        for device, pool in stage.book.pools.items():
            if pool.high_samples >= stage.policy.outside_samples and relieve(stage, device):
                pool.high_samples = 0
                changed = True
        if not stage.waiting:
            stage.claims.clear()
        elif not changed:
            changed = decide(stage)
        return changed

    def _pursue(self, entry: Entry) -> bool:
        stage = self._stage
        if stage.shutting_down and entry.state in (State.STARTING, State.WAKING):
            send_off(stage, entry, 0, "greenroom is shutting down")
            return True
        return pursue(stage, entry)

    def _ladder(self, entry: Entry) -> None:
        if entry.state is State.FAILED:
            if self._stage.now >= entry.backoff_until - EPSILON_S:
                recover(self._stage, entry)
            else:
                self._stage.wake_at(entry.backoff_until, entry)
        else:
            ladder(self._stage, entry)

    def _check(self) -> None:
        """Invariants of everything this event touched; a broken one is a bug, told with its story."""
        stage = self._stage
        stage.book.check()
        for name in stage.touched:
            entry = stage.entries.get(name)
            if entry is None:
                continue
            state, instance, held = entry.state, entry.instance, stage.book.of(name)
            told = f"{name} is {state}, holds {dict(held)}, {len(instance.in_flight)} in flight. Story:"
            if state in HOME:
                assert not held, (told, list(entry.story))
                assert not instance.devices, (told, list(entry.story))
            elif not held:  # a sleeper may hold nothing, and a model may need nothing
                assert entry.need_mib == 0 or state in (State.ASLEEP, State.STOPPING), (told, list(entry.story))
            assert not instance.in_flight or state in SERVING, (told, list(entry.story))
            assert instance.quiet <= instance.in_flight, (told, list(entry.story))
        stage.touched.clear()

    # ------------------------------------------------------------------ looking (never used to decide)

    @property
    def shutting_down(self) -> bool:
        return self._stage.shutting_down

    def is_down(self) -> bool:
        """Whether every instance is stopped (after a shutdown)."""
        return all(entry.state in HOME or entry.unkillable for entry in self._stage.entries.values())

    def state_of(self, model: str) -> State:
        entry = self._stage.entries.get(model)
        return entry.state if entry is not None else State.STOPPED

    @property
    def pinned(self) -> frozenset[str]:
        """By the configuration or by an operator."""
        return frozenset(entry.id for entry in self._stage.pinned())

    @property
    def overruled_pins(self) -> dict[str, bool]:
        """What operators said of pins, where the configuration says otherwise: model -> pinned."""
        return {entry.id: entry.pinned for entry in self._stage.entries.values() if entry.pinned != entry.configured.pinned}

    def thrashing(self, at: float) -> list[Circle]:
        """Models that take turns on a device at the moment."""
        return self._stage.turns.now(at)

    def progress(self, request: RequestId, at: float) -> str:
        """What a waiting request waits for, one clause for people."""
        stage = self._stage
        entry = stage.requests.get(request)
        if entry is None:
            return ""
        with stage.looking(at):
            return explain_wait(stage, entry)

    def story(self, model: str) -> list[tuple[float, str]]:
        entry = self._stage.entries.get(model)
        return list(entry.story) if entry is not None else []

    def learned(self, model: str) -> tuple[int | None, float | None, float | None] | None:
        """(measured need in MiB, start in s, stop in s) of a model, each None until measured."""
        entry = self._stage.entries.get(model)
        if entry is None or entry.retire:  # what was learned of the old definition says nothing about the new one
            return None
        need = entry.need_mib if entry.need_source == "measured" else None
        return need, entry.costs.up_s, entry.costs.down_s

    def stay_s(self, model: str) -> float | None:
        """How long it stays idle as things are; None unless `ttl` is found from its own gaps."""
        entry = self._stage.entries.get(model)
        return entry.costs.stay_s(entry.model, self._stage.policy) if entry is not None and entry.model.ttl_auto else None

    def learned_tiers(self, model: str) -> tuple[SleepTier, ...]:
        """The sleep levels of a model that have been used, with what they were measured to cost."""
        entry = self._stage.entries.get(model)
        if entry is None or entry.retire:
            return ()
        return tuple(tier for tier in tiers_learned(entry) if tier.level in entry.costs.sleep_s)

    def model(self, name: str) -> Model | None:
        entry = self._stage.entries.get(name)
        return entry.model if entry is not None else None

    def view(self, at: float) -> View:
        stage = self._stage
        with stage.looking(at):
            wanted_by = wanting(stage) if stage.waiting else {}
            models = tuple(self._view_model(entry, wanted_by) for entry in stage.entries.values())
            oldest = max((model.oldest_s for model in models), default=0.0)
            devices = tuple(map(self._view_device, stage.book.pools))
            return View(stage.now, devices, models, stage.clients, oldest, tuple(stage.turns.now(stage.now)))

    def queue(self, at: float) -> tuple[QueueView, ...]:
        """Every model that clients wait for, with the reason; longest first."""
        with self._stage.looking(at):
            return queue_views(self._stage)

    def present(self, model: str, at: float) -> tuple[str, tuple[str, ...]]:
        """(what it does now and why, a sentence; the models that this names)."""
        entry = self._stage.entries.get(model)
        if entry is None:
            return "", ()
        with self._stage.looking(at):
            return present(self._stage, entry)

    def places(self) -> tuple[PlaceView, ...]:
        """Who holds what now."""
        book = self._stage.book
        return tuple(
            PlaceView(entry.id, entry.state, entry.instance.generation, entry.instance.level, dict(book.of(entry.id)))
            for entry in self._stage.entries.values()
            if entry.state not in HOME
        )

    def turn_of(self, model: str) -> TurnView | None:
        """Of a model that rises or is about to: since when its room is made, and by whom."""
        entry = self._stage.entries.get(model)
        move = self._stage.move_of(entry) if entry is not None else None
        if entry is None or move is None or move.target is not entry:
            return None
        first = next((item.arrived_at for item in entry.queue.items() if not item.ghost), None)
        return TurnView(entry.id, move.began_at, tuple(move.victims), first)

    def gated_for(self, model: str) -> str:
        """The model that this one makes room for; "" = none."""
        entry = self._stage.entries.get(model)
        move = self._stage.move_of(entry) if entry is not None else None
        return move.target.id if move is not None and move.target is not None and move.target is not entry else ""

    def waiting_since(self) -> dict[str, float]:
        """Model that is not ready -> arrival of the first client who waits for it."""
        found = {}
        for entry in self._stage.waiting:
            first = next((item.arrived_at for item in entry.queue.items() if not item.ghost), None)
            if first is not None:
                found[entry.id] = first
        return found

    def admission(self, request: RequestId) -> tuple[float, float] | None:
        """(arrival, admission) of a request in flight."""
        admission = self._stage.admitted.get(request)
        return (admission.arrived_at, admission.at) if admission is not None else None

    def _view_device(self, name: str) -> DeviceView:
        pool = self._stage.book.pools[name]
        device = pool.device
        lane = next((move.target.id if move.target else next(iter(move.victims)) for move in self._stage.lanes.get(name, ())), "")
        return DeviceView(
            name,
            device.kind,
            device.name,
            device.capacity_mib,
            device.headroom_mib,
            pool.booked_mib,
            pool.used_mib,
            pool.outside_mib,
            pool.holder,
            lane,
            pool.available_mib,
        )

    def _view_model(self, entry: Entry, wanted_by: dict[str, Entry]) -> ModelView:
        stage, instance, now = self._stage, entry.instance, self._stage.now
        more = extras(stage, entry, wanted_by)
        expected = max(0.0, entry.up_cost() - (now - instance.since)) if entry.state in RISING else None
        instances: tuple[InstanceView, ...] = ()
        if entry.state not in HOME:
            instances = (
                InstanceView(
                    entry.id,
                    entry.state,
                    instance.generation,
                    instance.devices,
                    dict(stage.book.of(entry.id)),
                    dict(entry.measured_mib),
                    entry.host_mib,
                    len(instance.in_flight),
                    now - instance.since,
                    entry.idle_for(now),
                    instance.level,
                    expected,
                ),
            )
        oldest = now - entry.queue.first().arrived_at if entry.queue.clients else 0.0
        return ModelView(
            entry.id,
            entry.state,
            entry.pinned,
            entry.queue.clients,
            oldest,
            expected_wait_s(stage, entry),
            entry.starts,
            entry.wakes,
            entry.evictions,
            entry.failures,
            max(0.0, entry.backoff_until - now) if entry.state is State.FAILED else 0.0,
            entry.quarantined,
            entry.need_mib,
            entry.need_source,
            entry.costs.up(entry.model),
            entry.sleeps,
            entry.wake_failures,
            tuple(tier.level for tier in entry.tiers),
            entry.sleep_off or ("" if entry.model.doze is not None else entry.model.no_sleep),
            tiers_learned(entry),
            entry.last_error,
            blocked_by(stage, entry),
            instances,
            entry.model.parallel,
            more.wake_s,
            more.measured,
            more.next_state,
            more.next_s,
            more.served_s,
            more.owed_s,
            more.gated_for,
            more.note,
            entry.failing,
        )


def tiers_learned(entry: Entry) -> tuple[SleepTier, ...]:
    costs = entry.costs
    tiers = (*entry.model.sleep, *((entry.model.doze,) if entry.model.doze is not None else ()))
    return tuple(SleepTier(tier.level, costs.residue(tier), costs.copy(tier), costs.sleeping(tier), costs.waking(tier)) for tier in tiers)


def _crowd(entry: Entry, slots: int) -> str:
    """What fills a model's queue, with the bound that it fills."""
    limit = entry.model.queue_limit
    at_once = f"{slots} that it takes at once (parallel) and " if slots else ""
    behind = f"{limit} more" if slots else f"{limit} behind those that it serves"
    return f"{requests_wait(entry.queue.clients)} for {entry.id}, and no more may: {at_once}{behind} (queue_limit)"
