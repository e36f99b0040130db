"""Peers at work: who serves what, how each of them does, and the tickets of requests that they answer.

    peers = Peers(list_of_peers)                       # replaced on reload; what is known of those that stay is kept
    door = PeerDoor(local_admissions, peers, next_number, loop.time)
    plane.admissions, plane.catalog = door, peers.catalog(local_catalog)

A request for a model of this machine goes to the local admissions.  Where these refuse it and a peer with `overflow`
has the model, that one gets it; a peer with `prefer` is asked before them.  Whom to ask is decided in `peers`, which is
pure; this module keeps the books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from greenroom.core.facts import Outcome

from . import peers as rules
from .admission import Admissions, Catalog, Far, Grant, ModelRoute, Refusal, Ticket, Waiter, Wish
from .peers import Candidate, Health
from .upstream import Key, Line

OVERFLOWS: Final = frozenset({429, 502, 503, 504})
"""Refusals of this machine after which a peer may help out ..."""

STAYS: Final = frozenset({"shutting_down", "cancelled"})
"""... but not these."""

ERROR_CHARS_MAX: Final = 300  # of what is kept of a failure

ENDED: Final = ("ok", "client_gone", "engine_broke", "cut", "failed")
"""What may become of a request that a peer got; failed: another peer was asked, or the client was refused."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server, as the configuration has it; `models`: name here -> how a request for it is rewritten for there."""

    id: str
    host: str
    port: int
    base: str  # path prefix, no slash at its end
    shown: str  # scheme, host and port, for people
    host_header: bytes
    line: Line
    models: Mapping[str, ModelRoute]
    key_headers: tuple[tuple[bytes, bytes], ...] = ()
    response_s: float | None = 300.0
    stall_s: float | None = 300.0
    priority: int = 0
    weight: float = 1.0
    overflow: bool = False  # asked after this machine has refused
    prefer: bool = False  # asked before this machine
    probe: str | None = "/health"
    identity: str = ""  # changes with all that says who it is and how it is reached

    @property
    def wire(self) -> tuple[Key, bytes]:
        return Key(self.host, self.port, 0, self.line), self.host_header


@dataclass(slots=True)
class Standing:
    """How a peer does."""

    since: float  # when it became what it is: up or down
    is_up: bool = True
    health: Health = rules.NEW
    serving: dict[str, Health] = field(default_factory=dict)  # by the model's name there
    in_flight: int = 0
    requests: int = 0  # sent to it
    failures: int = 0  # of them, without an answer worth relaying; probes are not counted
    outcomes: Counter[str] = field(default_factory=Counter)
    last_error: str = ""  # also of the past
    last_error_at: float | None = None
    heard_at: float | None = None  # when it worked last

    def settle(self, now: float) -> None:
        """Up, unless its circuit is open or waits for a trial."""
        is_up = self.health.failures < rules.FAILURES_MAX
        if is_up != self.is_up:
            self.is_up, self.since = is_up, now


@dataclass(frozen=True, slots=True)
class Target:
    """One way to serve a model elsewhere."""

    peer: Peer
    standing: Standing
    route: ModelRoute

    @property
    def there(self) -> str:
        return self.route.use_model_name or self.route.id

    def candidate(self) -> Candidate:
        one, serving = self.standing, self.standing.serving.get(self.there, rules.NEW)
        return Candidate(self.peer.id, self.peer.priority, self.peer.weight, one.in_flight, one.health, serving)


class Peers:
    """All peers of one configuration, with how they do."""

    def __init__(self, peers: Iterable[Peer] = (), now: float = 0.0, before: Peers | None = None) -> None:
        """`before`: the peers until now, whose standing is kept where they are still the same server."""
        self.all: tuple[Peer, ...] = tuple(peers)
        known = {one.id: (one.identity, before.standings[one.id]) for one in before.all} if before is not None else {}
        self.standings: dict[str, Standing] = {}
        for peer in self.all:
            identity, standing = known.get(peer.id, ("", None))
            self.standings[peer.id] = standing if standing is not None and identity == peer.identity else Standing(now)
        self._targets: dict[str, tuple[Target, ...]] = {}  # model id of the catalog -> peers that serve it, as configured
        self.remote: frozenset[str] = frozenset()  # models that only peers serve

    def targets(self, model: str) -> tuple[Target, ...]:
        return self._targets.get(model, ())

    def catalog(self, local: Catalog) -> Catalog:
        """`local` with all that peers serve.  Names of this machine go first."""
        models, names = dict(local.models), dict(local.names)
        targets: dict[str, list[Target]] = {}
        for peer in self.all:
            for name, route in peer.models.items():
                target = Target(peer, self.standings[peer.id], route)
                full = f"{peer.id}/{name}"
                if full not in local.names:
                    targets.setdefault(full, []).append(target)
                    models[full] = ModelRoute(full, owner=peer.id, unlisted=True, is_remote=True, may_travel=True)
                    names[full] = full
                here = local.names.get(name)
                if here is None:
                    if name not in targets:
                        models[name] = ModelRoute(name, owner=peer.id, is_remote=True, may_travel=True)
                        names[name] = name
                    targets.setdefault(name, []).append(target)
                elif (peer.overflow or peer.prefer) and all(one.peer is not peer for one in targets.get(here, ())):
                    targets.setdefault(here, []).append(target)
                    models[here] = replace(models[here], may_travel=True)
        self._targets = {model: tuple(found) for model, found in targets.items()}
        self.remote = frozenset(self._targets) - frozenset(local.models)
        return replace(local, models=models, names=names)


class PeerVisit:
    """A request that peers answer, from its question to its end (FarTicket)."""

    __slots__ = (
        "_asked",
        "_counted",
        "_door",
        "_elsewhere",
        "_is_ended",
        "_is_judged",
        "_left",
        "_refusal",
        "_rest_s",
        "_said",
        "_target",
        "_waiter",
        "wish",
    )

    def __init__(
        self,
        door: PeerDoor,
        wish: Wish,
        waiter: Waiter,
        targets: tuple[Target, ...],
        refusal: Refusal | None = None,
        elsewhere: Callable[[], None] | None = None,
    ) -> None:
        """`refusal`: of this machine, told where no peer helps.  `elsewhere`: who is asked where none does, in place of a refusal."""
        self._elsewhere = elsewhere
        self._door, self.wish, self._waiter, self._refusal = door, wish, waiter, refusal
        self._left = list(targets)  # not asked yet
        self._asked = door.clock()
        self._target: Target | None = None
        self._is_judged = False  # whether its peer is known to work, or not
        self._counted = ""  # the fault that was counted
        self._is_ended = False
        self._rest_s: float | None = None  # the shortest that one of them asked for
        self._said: list[str] = []  # peer and why not, of those that were asked

    # ---- for those who look

    @property
    def model(self) -> str:
        return self.wish.model

    @property
    def peer(self) -> str:
        return self._target.peer.id if self._target is not None else ""

    @property
    def asked_at(self) -> float:
        return self._asked

    @property
    def first_byte_s(self) -> float | None:
        found = getattr(self._waiter, "first_byte_s", None)
        return found if isinstance(found, float) else None

    def dismiss(self, message: str) -> bool:
        """By an operator: its client is told so.  False: it has ended already."""
        if self._is_ended or self._target is None:
            return False
        self._waiter.cut("cancelled", message)
        return True

    # ---- choosing

    def begin(self) -> None:
        """Ask the best peer, or be refused."""
        door, now = self._door, self._door.clock()
        candidates = [target.candidate() for target in self._left]
        best = rules.order(candidates, now)
        if not best:
            if self._elsewhere is not None:
                self._is_ended = True
                door.open.pop(self._waiter.request, None)
                self._elsewhere()
            else:
                self._refuse(candidates, now)
            return
        target = next(one for one in self._left if one.peer.id == best[0])
        self._left.remove(target)
        self._target, self._is_judged, self._counted = target, False, ""
        standing = target.standing
        standing.health = rules.begun(standing.health, now)
        standing.serving[target.there] = rules.begun(standing.serving.get(target.there, rules.NEW), now)
        standing.in_flight += 1
        standing.requests += 1
        door.open[self._waiter.request] = self
        peer = target.peer
        waited_ms = int((now - self._asked) * 1000)
        far = Far(peer.id, target.route, self.wish.hops + 1, peer.response_s, peer.stall_s)
        grant = Grant(self.wish.model, peer.host, peer.port, 0, "hot", waited_ms, peer.base, peer.key_headers, wire=peer.wire, far=far)
        self._waiter.admitted(grant)

    def _refuse(self, candidates: list[Candidate], now: float) -> None:
        self._is_ended = True
        self._door.open.pop(self._waiter.request, None)
        said = [*self._said, *(f"{one.peer} is not asked at present ({_why(one)})" for one in candidates if not one.can_be_asked(now))]
        tried = "; ".join(said)
        if self._refusal is not None:
            local = self._refusal
            message = f"{local.message.rstrip('.')}; no peer helped out: {tried}." if tried else local.message
            self._waiter.refused(replace(local, message=message))
        elif self._said:
            status = 502 if self._rest_s is None else 503  # one of them is there, and said when to come again
            self._waiter.refused(Refusal(status, "peer_failed", f"No peer answered for {self.wish.asked_name}: {tried}.", self._rest_s))
        else:
            left_s = rules.free_in_s(candidates, now)
            message = f"No peer that serves {self.wish.asked_name} is well: {tried}; the next trial is in {left_s:.0f} s."
            self._waiter.refused(Refusal(503, "peers_down", message, left_s))

    # ---- verdicts

    def answered(self, status: int, retry_after: bytes) -> str:
        """FarTicket: a head came."""
        target, now = self._target, self._door.clock()
        assert target is not None
        rest_s = rules.retry_after_s(retry_after)
        if rest_s is not None and status in rules.PASSED_ON:
            self._rest_s = rest_s if self._rest_s is None else min(self._rest_s, rest_s)
        if status in (429, 503) and (status == 429 or rest_s is not None):
            serving = target.standing.serving.get(target.there, rules.NEW)
            target.standing.serving[target.there] = rules.asked_for_rest(serving, now, rest_s)
        if status == 429:
            self._works(target, now)
            self._counted = "it answered 429"  # that is no fault of its
            return self._counted if self._is_another_left(now) else ""
        if status in rules.PASSED_ON:
            self._fails(target, now, f"it answered {status}", is_reached=True)
            return f"it answered {status}" if self._is_another_left(now) else ""
        if status in rules.REDIRECTS:
            return self._fails(target, now, f"it answered {status}, a redirect, and those are not followed", is_reached=True)
        if status in (401, 407):
            return self._fails(target, now, f"it answered {status}: it does not take the key of peers.{target.peer.id}", is_reached=True)
        self._works(target, now)
        return ""

    def timed_out(self, limit_s: float) -> str:
        """FarTicket: nothing went on for so long."""
        target = self._target
        assert target is not None
        return self._fails(target, self._door.clock(), f"nothing came from it for {limit_s:g} s", is_reached=True)

    def _is_another_left(self, now: float) -> bool:
        is_another = bool(rules.order([target.candidate() for target in self._left], now, again=True))
        return is_another or self._elsewhere is not None

    def _works(self, target: Target, now: float) -> None:
        standing = target.standing
        standing.health = rules.worked(standing.health)
        standing.serving[target.there] = rules.worked(standing.serving.get(target.there, rules.NEW))
        standing.heard_at = now
        standing.settle(now)
        self._is_judged = True

    def _fails(self, target: Target, now: float, why: str, *, is_reached: bool) -> str:
        """`is_reached`: it is there, but does not serve this model."""
        standing = target.standing
        if is_reached:
            standing.health = rules.worked(standing.health)
            standing.serving[target.there] = rules.failed(standing.serving.get(target.there, rules.NEW), now, why)
        else:
            standing.health = rules.failed(standing.health, now, why)
            standing.serving[target.there] = rules.dropped(standing.serving.get(target.there, rules.NEW))
        standing.failures += 1
        standing.last_error, standing.last_error_at = why[:ERROR_CHARS_MAX], now
        standing.settle(now)
        self._is_judged, self._counted = True, why
        return why

    def _leave(self, outcome: str) -> None:
        """Its peer has nothing more to do with it."""
        target, self._target = self._target, None
        if target is None:
            return
        standing = target.standing
        standing.in_flight -= 1
        standing.outcomes[outcome] += 1
        if not self._is_judged:
            standing.health = rules.dropped(standing.health)
            standing.serving[target.there] = rules.dropped(standing.serving.get(target.there, rules.NEW))

    # ---- called by the data plane

    def cancel(self) -> None:
        self._is_ended = True
        self._leave("client_gone")
        self._door.open.pop(self._waiter.request, None)

    def finish(self, outcome: Outcome, status: int, bytes_out: int, first_byte_s: float | None) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        target = self._target
        if target is not None and outcome is Outcome.ENGINE_BROKE and not self._counted:
            self._fails(target, self._door.clock(), "it broke off its answer", is_reached=False)
        self._leave(outcome.value)
        self._door.open.pop(self._waiter.request, None)

    def lost(self, why: str) -> None:
        """No answer came, or none that is relayed: the next one."""
        if self._is_ended:
            return
        target = self._target
        if target is not None:
            if self._counted != why:
                self._fails(target, self._door.clock(), why, is_reached=False)
            self._said.append(f"{target.peer.id}: {why}")
            self._leave("failed")
        self.begin()

    def quiet(self, is_quiet: bool) -> None:
        """Tunnels to peers hold nothing of ours."""

    def alive(self) -> None:
        """Nobody watches: the data plane does it itself."""

    def held(self) -> None:
        """As little."""

    def progress(self) -> str:
        return f"asking {self.peer}" if self._target is not None else "waiting"


class Crossing:
    """A request of a model that this machine and peers serve: peers that are preferred, this machine, the others.

    It is the Waiter of this machine and the Ticket of them all.
    """

    __slots__ = ("_after", "_before", "_door", "_early", "_is_asking", "_waiter", "_wish", "ticket")

    def __init__(self, door: PeerDoor, wish: Wish, waiter: Waiter, targets: tuple[Target, ...]) -> None:
        self._door, self._wish, self._waiter = door, wish, waiter
        self._before = tuple(target for target in targets if target.peer.prefer)
        self._after = tuple(target for target in targets if not target.peer.prefer)
        self.ticket: Ticket | None = None
        self._is_asking = False  # this machine, which has not yet given a ticket
        self._early: Grant | None = None  # came meanwhile

    def begin(self) -> None:
        if not self._before:
            self._ask_here()
            return
        self._waiter.request = self._door.number()
        self.ticket = visit = PeerVisit(self._door, self._wish, self._waiter, self._before, elsewhere=self._ask_here)
        visit.begin()

    def _ask_here(self) -> None:
        self.ticket, self._is_asking = None, True
        try:
            ticket = self._door.local.ask(self._wish, self)
        finally:
            self._is_asking = False
        if self.ticket is None:  # else it was refused at once, and has gone on
            self.ticket = ticket
        early, self._early = self._early, None
        if early is not None:
            self._waiter.admitted(early)

    @property
    def request(self) -> int:
        return self._waiter.request

    @request.setter
    def request(self, number: int) -> None:
        self._waiter.request = number

    @property
    def first_byte_s(self) -> float | None:
        found = getattr(self._waiter, "first_byte_s", None)
        return found if isinstance(found, float) else None

    def admitted(self, grant: Grant) -> None:
        if self._is_asking:
            self._early = grant  # who is admitted may be over at once, and says so to the ticket
        else:
            self._waiter.admitted(grant)

    def refused(self, refusal: Refusal) -> None:
        if not self._after or refusal.status not in OVERFLOWS or refusal.code in STAYS:
            self._waiter.refused(refusal)
            return
        self.ticket = visit = PeerVisit(self._door, self._wish, self._waiter, self._after, refusal)
        visit.begin()

    def cut(self, code: str, message: str) -> None:
        self._waiter.cut(code, message)

    # ---- Ticket

    def _now(self) -> Ticket:
        assert self.ticket is not None
        return self.ticket

    def cancel(self) -> None:
        self._now().cancel()

    def finish(self, outcome: Outcome, status: int, bytes_out: int, first_byte_s: float | None) -> None:
        self._now().finish(outcome, status, bytes_out, first_byte_s)

    def lost(self, why: str) -> None:
        self._now().lost(why)

    def quiet(self, is_quiet: bool) -> None:
        self._now().quiet(is_quiet)

    def alive(self) -> None:
        self._now().alive()

    def held(self) -> None:
        self._now().held()

    def progress(self) -> str:
        return self._now().progress()

    def answered(self, status: int, retry_after: bytes) -> str:
        visit = self.ticket
        return visit.answered(status, retry_after) if isinstance(visit, PeerVisit) else ""

    def timed_out(self, limit_s: float) -> str:
        visit = self.ticket
        return visit.timed_out(limit_s) if isinstance(visit, PeerVisit) else ""


class PeerDoor:
    """The Admissions of a data plane that has peers."""

    def __init__(self, local: Admissions, peers: Peers, number: Callable[[], int], clock: Callable[[], float]) -> None:
        """`number` gives each request that the local admissions never see one of its own."""
        self.local, self.peers, self.number, self.clock = local, peers, number, clock
        self.open: dict[int, PeerVisit] = {}  # by the request's number

    def ask(self, wish: Wish, waiter: Waiter) -> Ticket:
        targets = self.peers.targets(wish.model)
        if wish.model not in self.peers.remote:
            # One that came from a peer is not handed on when this machine is full: the one that sent it may try others itself.
            if not targets or wish.hops:
                return self.local.ask(wish, waiter)
            crossing = Crossing(self, wish, waiter, targets)
            crossing.begin()
            return crossing
        waiter.request = self.number()
        visit = PeerVisit(self, wish, waiter, targets)
        if wish.hops >= rules.HOPS_MAX:
            message = (
                f"This request has passed {wish.hops} greenrooms, as many as it may, and {wish.asked_name} is served by peers only; "
                "look whether two of them name each other as its peer."
            )
            waiter.refused(Refusal(508, "peer_loop", message))
        else:
            visit.begin()
        return visit

    def is_ready(self, model: str) -> bool:
        return model in self.peers.remote or self.local.is_ready(model)

    def state_of(self, model: str) -> str:
        if model not in self.peers.remote:
            return self.local.state_of(model)
        return "peer" if any(target.standing.is_up for target in self.peers.targets(model)) else "peer_down"


def _why(candidate: Candidate) -> str:
    return candidate.health.last_error or candidate.serving.last_error or "it failed"
