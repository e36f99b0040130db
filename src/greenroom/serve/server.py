"""The server process: startup, main loop, shutdown, reload."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from greenroom import __version__
from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config
from greenroom.config.model import Config
from greenroom.control.app import READERS, make_app, start_control
from greenroom.core.facts import Tell
from greenroom.host.docks import Docks
from greenroom.host.gpus import GpuError, GpuInfo, Gpus
from greenroom.host.logs import LogRing
from greenroom.host.runtimes import end_questions
from greenroom.host.supervisor import Supervisor, end_leftovers, start_watcher
from greenroom.ledger.footprints import Footprints, Learned, LearnedTier
from greenroom.ledger.schema import FILE
from greenroom.ledger.store import Ledger
from greenroom.ledger.traces import MissingExtra, Traces, require
from greenroom.proxy import server as data_plane
from greenroom.proxy.admission import Catalog
from greenroom.proxy.guards import Guards
from greenroom.proxy.keys import Keys
from greenroom.proxy.limits import Limits
from greenroom.proxy.peer_door import PeerDoor, Peers
from greenroom.proxy.peer_probe import PeerWatch
from greenroom.shell.crew import HostCrew
from greenroom.shell.heart import Shell
from greenroom.shell.watch import DozeWatch, Sampler, StallGuard
from greenroom.store.library import Library

from .accounts import Accounts
from .books import Books
from .desk import Desk, EventFeed, RingHandler
from .door import Door
from .fetching import Fetching
from .notify import Notifier
from .peers import PeersShown
from .storeroom import Storeroom
from .wiring import Plan, ledger_limits_of, limits_of, make_plan

log = logging.getLogger("greenroom")

DEFAULT_LISTEN = "127.0.0.1:8080"
SHUTDOWN_S_MAX = 30.0  # for requests in flight; then they are cut
ENVIRONMENT = dict(os.environ)  # as it was given to us; `hide_keys` takes from the live one
LIMIT_NAMES = tuple(Limits.__dataclass_fields__)


class Refused(Exception):
    """It will not serve like this; one sentence."""


def serve_forever(config_path: str, listen: str | None, state_dir: str | None, *, no_auth: bool, strict: bool) -> int:
    config = load_config(config_path, env=ENVIRONMENT, strict=strict, limit_names=LIMIT_NAMES)
    hide_keys(config)
    try:
        host, port = parse_listen(listen or DEFAULT_LISTEN)
        check_public(host, config, no_auth)
        check_tracing(config)
        home = prepare_state_dir(state_dir)
        server = GreenroomServer(config, config_path, (host, port), home, strict=strict)
        return uvloop.run(server.run())
    except Refused as exc:
        print(f"greenroom: {exc}", file=sys.stderr)
        return 2 if "no API keys" in str(exc) or "--listen" in str(exc) else 1


def hide_keys(config: Config) -> None:
    """Engines inherit our environment: what holds a client's key, or one of ours for a peer, leaves it."""
    for name in [name for name, value in os.environ.items() if value in config.secrets]:
        del os.environ[name]


def parse_listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise Refused(f"--listen {text!r} is not an address; write HOST:PORT, for example 127.0.0.1:8080")
    return host.strip("[]") or "0.0.0.0", int(port)


def check_public(host: str, config: Config, no_auth: bool) -> None:
    """Refuse to be reachable from other machines without keys, unless told so."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not config.api_keys and not no_auth:
        raise Refused(
            f"{host} is reachable from other machines and there are no API keys; set `apiKeys`, listen on 127.0.0.1, or give --no-auth"
        )


def check_tracing(config: Config) -> None:
    """Refuse to start without the packages that `tracing` needs."""
    if config.tracing is None:
        return
    try:
        require()
    except MissingExtra as exc:
        raise Refused(str(exc)) from exc


def prepare_state_dir(given: str | None) -> Path:
    base = Path(given) if given else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "greenroom"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        (base / "logs").mkdir(exist_ok=True, mode=0o700)
    except OSError as exc:
        raise Refused(f"the state directory {base} cannot be used: {exc.strerror}; give another one with --state-dir") from exc
    return base


def lock_home(home: Path) -> int:
    """The state directory is ours until this descriptor is closed."""
    try:
        handle = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise Refused(f"the state directory {home} cannot be written: {exc.strerror}; give another one with --state-dir") from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise Refused(f"another greenroom (pid {holder}) uses {home}; end it, or give another directory with --state-dir") from exc
    with contextlib.suppress(OSError):  # a full disk: it is ours all the same, only nobody is told whose
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


class GreenroomServer:
    """One running server."""

    def __init__(self, config: Config, config_path: str, listen: tuple[str, int], home: Path, *, strict: bool) -> None:
        self.config, self.config_path, self.listen, self.home, self.strict = config, config_path, listen, home, strict
        self.gpus = Gpus()
        self.found: Sequence[GpuInfo] = ()
        self._read = config  # as last taken over, before the store was asked
        self._stop = asyncio.Event()
        self._signals = 0
        self.storeroom = Storeroom(Library())
        self._systemd = Notifier()

    async def run(self) -> int:
        self._own_log = self._set_up_logging()
        lock = lock_home(self.home)
        supervisor = start_watcher(self.home)
        learned = Footprints(self.home / "ledger.sqlite")
        self.journal = self.home / FILE
        self.ledger = Ledger(self.journal, limits=ledger_limits_of(self.config))
        self._traces: Traces | None = None
        try:
            if tracing := self.config.tracing:
                self._traces = Traces.to(tracing.endpoint, service_name=tracing.service_name, sample=tracing.sample)
                self.ledger.listeners.append(self._traces)
            found, left = await end_leftovers(supervisor)
            if found:
                log.warning("%d processes of an earlier run were ended%s", len(found), f", {len(left)} are still there" if left else "")
            self._docks = Docks(supervisor.home, self.home / "runtimes")
            await self._end_containers()
            return await self._serve(supervisor, learned)
        finally:
            learned.close()
            self.storeroom.close()
            self.gpus.close()
            end_questions()
            if guarded := supervisor.guarded:
                names = ", ".join(sorted(guarded))
                log.warning("not known to be gone: %s; the watcher goes on to end them, and so does the next start", names)
            await supervisor.close()
            await asyncio.to_thread(self.ledger.close)
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            self._own_log.close()
            os.close(lock)

    # ------------------------------------------------------------------ startup

    async def _end_containers(self) -> None:
        runtimes = {model.container.runtime for model in self.config.models if model.container is not None}
        count, troubles = await self._docks.end_leftovers(runtimes)
        if count:
            log.warning("%d containers of an earlier run were ended", count)
        for trouble in troubles:
            log.warning("%s", trouble)

    async def _serve(self, supervisor: Supervisor, learned: Footprints) -> int:
        self._learned = learned
        self.found = self._find_gpus()
        self.storeroom.docks, self.storeroom.supervisor = self._docks, supervisor
        await self.storeroom.look(self.config)
        plan = self._plan(self.config)
        sock = self._bind()
        self.crew = HostCrew(
            plan.stage,
            gpus=self.gpus,
            supervisor=supervisor,
            log_dir=self.home / "logs",
            release_s_max=plan.setup.policy.room_wait_s,
            echo=self._echo(self.config),
            docks=self._docks,
        )
        self.storeroom.ring_of = self.crew.ring_of
        self.shell = Shell(plan.setup, self.crew)
        self.feed = EventFeed(self.shell.clock, int(time.time() * 1000))
        self.shell.tellers += [self.feed.tell, self._remember]
        self.door = Door(self.shell, self.crew)
        self.crew.lacking, self.door.changed, self.door.look = dict(plan.missing), self._lacks, self._look
        self.fetching = self.door.fetching = Fetching(self.storeroom.pull, self._landed, self.shell.say, self.shell.spawn, self.shell.clock)
        self.crew.masked = self.config.secrets
        self.peer_door = PeerDoor(self.door, Peers(), self.shell.next_request, self.shell.clock)
        self.accounts = Accounts()
        self.books = Books(self.shell, self.ledger, self.accounts)
        self.desk = Desk(self.shell, self.crew, plan, self.feed, self._own_log, self.accounts, self.ledger, self.journal)
        self.desk.peers = PeersShown(self.peer_door)
        self.desk.fetching, self.desk.lacks = self.fetching, self.door.lacks
        self.shell.tellers += [self.desk.told, self._fetch_pinned, self._start_failed]
        self.plan = plan
        await self.desk.recall()
        async with self._control() as socket_path:
            plane = self._plane(plan, socket_path)
            listener = await data_plane.serve(plane, sock)
            self._plane_now = plane
            self._watch_signals()
            sampler = Sampler(self.shell, self.crew, self.gpus)
            self.crew.look = sampler.look
            await sampler.sample()  # what others hold, before the first start
            tasks = [
                self.shell.spawn(sampler.run()),
                self.shell.spawn(StallGuard(self.shell, self.crew, self.door).run()),
                self.shell.spawn(DozeWatch(self.shell, self.crew).run()),
                self.shell.spawn(PeerWatch(self.peer_door, listener.pool).run()),
                self.shell.spawn(self.door.watch()),
            ]
            self._announce(listener, plan)
            self._fetch()
            self.shell.begin()
            self._systemd.tell("READY=1", f"STATUS=serving {len(plan.setup.models)} models")
            gc.collect()
            gc.freeze()  # what startup made stays for good; collections need not walk it
            await self._stop.wait()
            self._systemd.tell("STOPPING=1")
            log.info("shutting down: requests in flight have %g s (again to cut them)", SHUTDOWN_S_MAX)
            await self._shut_down(listener)
            for task in tasks:
                task.cancel()
        return 0

    def _plan(self, config: Config) -> Plan:
        """What a configuration comes to on this machine, with what its store holds."""
        return make_plan(self.storeroom.resolve(config), self.found, self._learned, strict=self.strict)

    def _fetch(self) -> None:
        """Take note of what is absent; what is to be loaded at start is fetched now."""
        self.storeroom.hold()
        self.fetching.take(self.storeroom.absent)
        self._want()

    def _want(self) -> None:
        """What is pinned, by the configuration or by an operator, and what is to be loaded at start is fetched without a request."""
        self.fetching.want(self.shell.scheduler.pinned | {model.id for model in self.plan.setup.models if model.preload})

    def _fetch_pinned(self, tell: Tell) -> None:
        if tell.kind == "pinned" and tell.model in self.fetching.absent:
            self.fetching.start(tell.model, asked=False)  # an operator says so: at once, whatever failed or was stopped before
        if tell.kind in ("pinned", "unpinned"):
            self._want()

    def _landed(self, model: str) -> None:
        log.info("%s is here", model)
        self._take(self._plan(self._read))  # not the file: half of a change to it may be written

    async def _look_for_images(self) -> None:
        if await self.storeroom.look(self._read):
            self._take(self._plan(self._read))

    def _look(self, model: str) -> None:
        if self.storeroom.changed(model):
            log.info("%s has come to the store, or is gone from it, by other hands", model)
            self._take(self._plan(self._read))

    def _bind(self) -> socket.socket:
        """Bind first: an address that is taken must cost nobody an engine."""
        host, port = self.listen
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            sock = socket.socket(infos[0][0], socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(infos[0][4])
        except OSError as exc:
            raise Refused(
                f"cannot listen on {host}:{port}: {exc.strerror or exc}; free it or choose another address with --listen"
            ) from exc
        sock.setblocking(False)
        return sock

    def _plane(self, plan: Plan, socket_path: str) -> data_plane.DataPlane:
        config = plan.config
        return data_plane.DataPlane(
            admissions=self.peer_door if plan.peers else self.door,
            catalog=self._with_peers(plan),
            keys=Keys(config.keys),
            guards=Guards(self.listen[0], config.allowed_hosts, config.cors_origins, check_host=not config.api_keys),
            limits=limits_of(config),
            control_socket=socket_path,
            hooks=self.books,
            ready=lambda: not self.shell.scheduler.shutting_down,
        )

    def _with_peers(self, plan: Plan) -> Catalog:
        """What the data plane routes by: the models of this machine and what peers serve."""
        peers = Peers(plan.peers, self.shell.clock(), self.peer_door.peers)
        catalog = peers.catalog(plan.catalog)
        self.peer_door.peers = peers
        return catalog

    @contextlib.asynccontextmanager
    async def _control(self):  # type: ignore[no-untyped-def]
        """The control plane on a private Unix socket; its path is kept short through the open folder when it is too long."""
        path = self.home / "control" / "control.sock"
        short, handle = str(path), None
        if len(os.fsencode(path)) > 100:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            short = f"/proc/self/fd/{handle}/{path.name}"
        try:
            self._app = make_app(self.desk)
            runner = await start_control(self._app, short)
        except OSError as exc:
            raise Refused(f"the control socket cannot be opened: {exc}") from exc
        try:
            yield short
        finally:
            await runner.cleanup()
            if handle is not None:
                os.close(handle)

    def _find_gpus(self) -> Sequence[GpuInfo]:
        try:
            return self.gpus.discover()
        except GpuError as exc:
            log.warning("GPUs cannot be read: %s", exc)
            return ()

    def _announce(self, listener: data_plane.Server, plan: Plan) -> None:
        host, port = listener.addresses[0]
        shown = f"[{host}]" if ":" in host else host
        devices = ", ".join(f"{device.id} {device.capacity_mib - device.headroom_mib} MiB" for device in plan.setup.devices)
        count = len(plan.setup.models)
        models = "1 model" if count == 1 else f"{count} models"
        log.info("greenroom %s serves %s on http://%s:%d (%s)", __version__, models, shown, port, devices)
        for warning in plan.config.warnings:
            log.warning("%s", warning)
        for model, lacking in plan.missing.items():
            log.warning("%s: %s", model, lacking)

    # ------------------------------------------------------------------ main loop

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._told_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    def _told_to_stop(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            from greenroom.core.facts import ShutdownAsked

            self.shell.post(ShutdownAsked(self.shell.clock(), force=True))

    def reload(self) -> None:
        """Read the configuration again; a bad one is reported and the present one stays."""
        try:
            config = load_config(self.config_path, env=ENVIRONMENT, strict=self.strict, limit_names=LIMIT_NAMES)
            plan = self._plan(config)
            limits_of(config)
        except ConfigError as exc:
            for problem in exc.problems:
                log.error("reload refused, the configuration stays as it was: %s", problem)
            return
        self.ledger.keep(ledger_limits_of(config))
        if config.tracing != self.config.tracing:
            log.warning("`tracing` has changed; that counts from the next start")
        self._read = config
        self._take(plan)
        log.info("configuration read again: %d models", len(plan.setup.models))
        self.shell.spawn(self._look_for_images())

    def _take(self, plan: Plan) -> None:
        config = plan.config
        old = self.crew.stage
        # Engines that still run keep their old description until they are gone.
        engines = {**{name: engine for name, engine in old.engines.items() if name in self.crew.running}, **plan.stage.engines}
        plan.stage.engines = engines
        plan.stage.devices = {**old.devices, **plan.stage.devices}
        plan.stage.levels = {**{name: levels for name, levels in old.levels.items() if name in self.crew.running}, **plan.stage.levels}
        self.crew.stage = plan.stage
        self.plan = self.desk.plan = plan
        self.crew.lacking = dict(plan.missing)
        self.crew.masked = config.secrets
        self._own_log.mask(config.secrets)
        hide_keys(config)
        plane = self._plane_now
        plane.catalog, plane.keys = self._with_peers(plan), Keys(config.keys, plane.keys)
        plane.admissions = self.peer_door if plan.peers else self.door
        plane.guards = Guards(self.listen[0], config.allowed_hosts, config.cors_origins, check_host=not config.api_keys)
        self.storeroom.hold()
        self.shell.reload(plan.setup)
        self._fetch()  # who waited for files asks the scheduler that knows the new setup

    def _lacks(self, model: str, lacking: str) -> None:
        """What a model lacks has changed, and all that is told of it and decided for it follows."""
        if not lacking:
            self.shell.say(Tell(self.shell.clock(), model, "mended", "what it lacked is there now"))
        self._take(self._plan(self._read))  # not the file: half of a change to it may be written

    def _start_failed(self, tell: Tell) -> None:
        """A start may be the first to see that something is lacking."""
        lacking = self.crew.lacking.get(tell.model, "")
        if tell.kind == "start_failed" and lacking and lacking != self.plan.missing.get(tell.model):
            self._lacks(tell.model, lacking)

    def _remember(self, tell: Tell) -> None:
        """Keep learned figures for the next start."""
        if tell.kind not in ("learned", "raised", "ready", "stopped", "asleep"):
            return
        key = self.plan.keys.get(tell.model)
        figures = self.shell.scheduler.learned(tell.model)
        if key is None or figures is None:
            return
        need, up_s, down_s = figures
        tiers = tuple(
            LearnedTier(tier.level, tier.residue_mib, tier.host_mib, tier.sleep_s, tier.wake_s)
            for tier in self.shell.scheduler.learned_tiers(tell.model)
        )
        before = self._learned.get(key) or Learned()
        now = Learned(
            need if need is not None else before.device_mib,
            before.host_mib,
            up_s or before.up_s,
            down_s or before.down_s,
            before.samples + (tell.kind in ("ready", "stopped")),
            (*tiers, *(known for known in before.tiers if all(known.level != tier.level for tier in tiers))),
        )
        self._learned.put(key, now)

    # ------------------------------------------------------------------ shutdown

    async def _shut_down(self, listener: data_plane.Server) -> None:
        self.fetching.close()
        self.crew.hurry()
        self._app[READERS].close_all()  # an open page is no request that must be waited for
        await asyncio.gather(listener.close(SHUTDOWN_S_MAX), self.shell.shut_down(SHUTDOWN_S_MAX))

    # ------------------------------------------------------------------ logging

    def _set_up_logging(self) -> LogRing:
        ring = LogRing("greenroom", file=self.home / "greenroom.log", mask=self.config.secrets)
        handler = RingHandler(ring)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        if self.config.log_to_stdout in ("proxy", "both"):
            out = logging.StreamHandler(sys.stdout)
            out.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
            log.addHandler(out)
        log.setLevel({"debug": logging.DEBUG, "warn": logging.WARNING, "error": logging.ERROR}.get(self.config.log_level, logging.INFO))
        return ring

    def _echo(self, config: Config):  # type: ignore[no-untyped-def]
        if config.log_to_stdout not in ("upstream", "both"):
            return None

        def echo(model: str, lines: Sequence[str]) -> None:
            for line in lines:
                print(f"[{model}] {line}", flush=True)

        return echo
