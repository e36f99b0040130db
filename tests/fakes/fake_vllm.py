#!/usr/bin/env python3
"""A fake of vLLM's server with sleep mode, as it behaves on a GPU.  Standard library only; up in about 40 ms.

    python -S -E vllm serve NAME --port N [--enable-sleep-mode] [other flags of vLLM] [key=value ...]

Call it through a link named `vllm`, so that the command reads like the real one.  Journal, claims, steering and the
per-request `"fe": {...}` are those of fe.py, and so are its knobs, but for those that shape an answer (dialect, big, delay,
body, parallel, needs, rerank, ws, models, models_early, warm_s) and residue and wake_fail.  These come on top:

version=0.32.0     whose behaviour it has                  enforce=0      1: beyond `budget` of the device it is out of memory
vram=0             MiB awake                               vram_asleep=0  MiB asleep, or one for each level: 1000,800
weights=           MiB of weights (half of what sleeps)    host_mib=      MiB of RAM for a level-1 copy (the weights)
host_kept=0        1: the copy stays after the wake        host_real=0    1: the copy is really held in RAM
worker=1           0: no worker process; it holds the memory itself
strict=            1: /sleep over a request, or a request to a sleeper, kills it (exit 134): so do versions before 0.17
crash=exit         exit: it is gone at once with 134 | core: the engine core dies first, as when a worker is killed
dying_s=0.3        s from the death of the engine core to the end of the server (5 in reality)
sleep_s=0.02       wake_s=0.02       reload_s=0.02         s of work
stream=16x0.002  * tokens x s between them (max_tokens wins over the first)
prompt=0         * s before the first token                runner=        generate | embed | rank: it has no other routes
notice_s=0         s until it notices that a client left   seed=0         of all chances

Hazards.  Each knob holds KIND[:ARG][*TIMES][%CHANCE][@FILE], or several with commas, the first that applies is taken:
at most TIMES times (over all starts, until the steering file changes), with CHANCE (0..1), while FILE exists.

on_sleep=          slow:S | hang | 500 (still holds its memory) | no_free (says 200) | die:CODE | die:kill
on_wake=           slow:S | hang | 500 | oom | oom_partly (part stays mapped) | stuck (says 200) | garbage | die:...
on_wake_kv=        the same, for the call that wakes the KV cache alone
on_reload=         slow:S | hang | 500 (NotImplementedError) | no_load (says 200) | die:...
on_first=          first inference after a wake: die:139 | 500 | hang | slow:S | garbage
on_asleep=         worker_dies:S after it fell asleep      fail=share     refuses to start: its share is not free

The journal has `sleep_begin` (level, mode, in_flight), `sleep_end`, `wake_begin` (tags), `wake_end` (asleep), `reload`,
`reset_prefix_cache`, `asleep_request` (one arrived that cannot run), `admitted`, `abort`, `finished` (garbage), `fault`.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time

import fe

KNOB = re.compile(r"^(start\.[\d-]+\.)?[a-z_]+=")
FAULT = re.compile(r"^(?P<kind>\w+)(?::(?P<arg>[^*%@]+))?(?:\*(?P<times>\d+))?(?:%(?P<chance>[\d.]+))?(?:@(?P<file>.+))?$")
TAGS = frozenset({"weights", "kv_cache"})
MODES = ("abort", "wait", "keep")
WORDS = ("stage", "dark", "lamp", "low", "voice", "hums", "rain", "far", "blue", "hills", "dawn", "bell", "rope", "mask", "coat", "door")
GARBAGE = " !"
STATES = ("awake", "weights_offloaded", "discard_all")
LOOK_S = 0.01  # how often a waiting request looks for its client
UNMAPPED = "CUDA error: an illegal memory access was encountered"
NO_ROOM_AWAKE = "Call to wake_up method failed: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"
CONTROL = {  # path -> (method, first version)
    "/sleep": ("POST", (0, 11)),
    "/wake_up": ("POST", (0, 11)),
    "/is_sleeping": ("GET", (0, 11)),
    "/collective_rpc": ("POST", (0, 11)),
    "/reset_prefix_cache": ("POST", (0, 11)),
    "/pause": ("POST", (0, 12)),
    "/resume": ("POST", (0, 12)),
    "/is_paused": ("GET", (0, 12)),
}


class Dead(Exception):
    """The engine core is not there any more."""


class Failed(Exception):
    """The worker raised; the server answers 500."""


class Aborted(Exception):
    """The request was ended by a sleep or a pause."""


class Run:
    """A request in the engine."""

    def __init__(self, number, client, key):
        self.number, self.client, self.key = number, client, key
        self.aborted = False
        self.garbage = False


class Vllm(fe.Fake):
    """One running fake server."""

    defaults = fe.DEFAULTS | {
        "version": "0.32.0", "enforce": "0", "vram_asleep": "0", "weights": "", "host_mib": "", "host_kept": "0", "host_real": "0",
        "worker": "1",
        "strict": "", "crash": "exit", "dying_s": "0.3", "sleep_s": "0.02", "wake_s": "0.02", "reload_s": "0.02",
        "stream": "16x0.002", "notice_s": "0", "runner": "", "seed": "0",
        "on_sleep": "", "on_wake": "", "on_wake_kv": "", "on_reload": "", "on_first": "", "on_asleep": "",
    }  # fmt: skip
    control = frozenset(path for path, (method, _) in CONTROL.items() if method == "POST")

    def __init__(self, flags, words):
        super().__init__(int(flags.get("--port", "8000")), words)
        self.flags = flags
        self.version = tuple(int(part) for part in self.knobs["version"].split(".")[:2])
        self.dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self.name = flags.get("--served-model-name") or flags["model"]
        for knobs in (self.knobs, self.unsteered):
            knobs["host"] = flags.get("--host", "127.0.0.1")
            if knobs["listen_after"] == "0":
                knobs["listen_after"] = knobs["ready_after"]  # its port opens when the model is loaded
        self.state = threading.Condition()
        self.turn = threading.Lock()  # the engine core does one call after the other
        self.paused = ""  # "" | new (runs what it has) | all
        self.sleeping_tags = set()
        self.level = 0  # the one that sleeps
        self.told_level = 0  # the one the metric shows; -1: none
        self.mapped = set(TAGS)
        self.left_over = 0  # MiB mapped by a wake that failed
        self.host_copy = 0
        self.weights_lost = False  # level 2 came and no reload
        self.bewitched = False  # answers garbage until it sleeps again
        self.stale = set()  # prompts whose garbage is in the prefix cache
        self.waiting, self.running = {}, {}
        self.first = False  # nothing was inferred since the wake
        self.dead = False
        self.worker, self.worker_gone = 0, threading.Event()
        self.draws = 0

    def since(self, *version):
        return self.version >= version

    @property
    def strict(self):
        return self.knobs["strict"] == "1" or (self.knobs["strict"] == "" and not self.since(0, 17))

    @property
    def frees(self):
        return "--enable-sleep-mode" in self.flags

    # ---------------------------------------------------------------- memory

    def residue(self, level):
        each = self.knobs["vram_asleep"].split(",")
        return int(each[0] if level == 1 else each[-1])

    def holding(self):
        """MiB of the device it holds in its state."""
        vram, residue = int(self.number_of("vram")), self.residue(self.level)
        if self.mapped == TAGS:
            return vram
        weights = int(self.knobs["weights"] or (vram - residue) // 2)
        parts = {"weights": weights, "kv_cache": vram - residue - weights}
        return residue + self.left_over + sum(parts[tag] for tag in self.mapped)

    def copy_mib(self):
        vram, residue = int(self.number_of("vram")), self.residue(1)
        return int(self.knobs["host_mib"] or self.knobs["weights"] or (vram - residue) // 2)

    def hold(self):
        most = int(self.number_of("budget")) if self.knobs["enforce"] == "1" else None
        done = self.claim(self.holding(), self.host_copy, most)
        if done and self.knobs["host_real"] == "1":
            self.real_copy = bytearray(os.urandom(4096) * 256 * self.host_copy)
        return done

    def claim_at_start(self):
        if self.knobs["worker"] == "1":
            self.start_worker()
        return self.hold()

    def end_without_room(self):
        fe.say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB")
        fe.say("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        self.leave(1, "oom")

    # ---------------------------------------------------------------- life and death

    def run(self):
        if self.knobs["fail"] == "share":
            fe.say("ValueError: Free memory on device cuda:0 (10.00/79.10 GiB) on startup is less than desired GPU memory utilization")
            self.leave(1, "share")
        super().run()

    def become_ready(self):
        super().become_ready()
        fe.say("INFO:     Application startup complete.")

    def start_worker(self):
        """A child that stands for the worker: the device's memory is its own, and without it the engine is dead."""
        inlet, outlet = os.pipe()
        pid = os.fork()
        if pid == 0:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.close(outlet)
            self.tell("worker")
            os.read(inlet, 1)  # until the server is gone
            os._exit(0)
        os.close(inlet)
        self.worker = self.holder = pid
        threading.Thread(target=self.watch_worker, daemon=True).start()

    def watch_worker(self):
        os.waitpid(self.worker, 0)
        self.worker_gone.set()
        self.die("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.")

    def die(self, why):
        """The engine core dies; the server says so and follows."""
        with self.state:
            if self.dead:
                return
            self.dead = True
            self.state.notify_all()
        self.tell("dead", why=why)
        fe.say(f"ERROR {why}")
        fe.say("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.")
        later(self.number_of("dying_s"), self.leave, 1, "the engine core died")

    def leave(self, code, why):
        if self.worker and os.getpid() != self.worker:
            self.dead = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)
            self.worker_gone.wait(1)
        super().leave(code, why)

    def crash(self, why):
        """As a GPU does when work runs on memory that is not mapped."""
        fe.say(f"RuntimeError: {why}")
        self.tell("crash", why=why)
        if self.knobs["crash"] == "exit":
            self.leave(134, why)
        self.die(why)
        raise Dead

    # ---------------------------------------------------------------- hazards

    def fault(self, knob):
        """(kind, argument) of the hazard that strikes now; ("", "") when none does."""
        for text in filter(None, self.knobs[knob].split(",")):
            found = FAULT.match(text)
            if found is None:
                sys.exit(f"vllm: {knob}={text} is no hazard")
            if found["file"] and not os.path.exists(found["file"]):
                continue
            if found["times"] and self.struck(knob, text) >= int(found["times"]):
                continue
            if found["chance"] and self.draw() >= float(found["chance"]):
                continue
            self.tell("fault", knob=knob, text=text, kind=found["kind"], steered=self.steered)
            kind, arg = found["kind"], found["arg"] or ""
            if kind == "die":
                self.end_suddenly(arg)
            if kind in ("slow", "hang"):
                time.sleep(float(arg) if kind == "slow" else 3600)
            return kind, arg
        return "", ""

    def struck(self, knob, text):
        """How often it did since the knobs were steered last."""
        mine = [line for line in self.told() if line["event"] == "fault" and line["steered"] == self.steered]
        return sum((line["knob"], line["text"]) == (knob, text) for line in mine)

    def draw(self):
        self.draws += 1
        digest = hashlib.sha256(f"{self.knobs['seed']} {self.knobs['model']} {self.number} {self.draws}".encode()).digest()
        return int.from_bytes(digest[:4], "big") / (1 << 32)

    def end_suddenly(self, code):
        if code == "kill":
            self.tell("exit", code=-9, why="told to")
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        self.leave(int(code or 1), "told to")

    # ---------------------------------------------------------------- routes

    def check(self, client):
        if self.dead or not self.ready:
            return self.reply(client, 503, b"")
        return self.reply(client, 200, b"") if self.knobs["health"] == "ok" else super().check(client)

    def answer(self, client, asked):
        path, _, query = asked.target.partition("?")
        try:
            if path in CONTROL:
                return self.command(client, asked.method, path, arguments(query), asked.body)
            if path == "/version":
                return self.reply(client, 200, {"version": self.knobs["version"]})
            if path == "/ping":
                return self.check(client)
            if path == "/metrics":
                return self.reply(client, 200, self.metrics(), kind="text/plain; version=0.0.4; charset=utf-8")
            if path == "/v1/models":
                card = {"id": self.name, "object": "model", "owned_by": "vllm", "root": self.flags["model"], "max_model_len": 4096}
                return self.reply(client, 200, {"object": "list", "data": [card]})
            wanted, knobs = self.read(asked.body)
            route, runner = INFERENCE.get(path, (None, ""))
            if asked.method != "POST" or route is None or self.knobs["runner"] not in ("", runner):
                return self.reply(client, 404, {"detail": "Not Found"})
            if wanted.get("model", self.name) != self.name:
                return self.refuse(client, 404, f"The model `{wanted['model']}` does not exist.", "NotFoundError")
            return route(self, client, asked.number, wanted, knobs)
        except Failed as exc:
            return self.refuse(client, 500, str(exc))
        except Dead:
            return self.refuse(client, 500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")

    def refuse(self, client, status, text, kind="InternalServerError"):
        return self.reply(client, status, {"error": {"message": text, "type": kind, "param": None, "code": status}})

    def command(self, client, method, path, query, body):
        wanted, since = CONTROL[path]
        if not self.dev_mode or not self.since(*since):
            return self.reply(client, 404, {"detail": "Not Found"})
        if method != wanted:
            return self.reply(client, 405, {"detail": "Method Not Allowed"})
        if self.dead:
            raise Dead
        if path == "/sleep":
            return self.sleep(client, query)
        if path == "/wake_up":
            return self.wake_up(client, [value for key, value in query if key == "tags"])
        if path == "/collective_rpc":
            return self.collective_rpc(client, body)
        if path == "/pause":
            return self.pause(client, query)
        with self.turn:
            if path == "/is_sleeping":
                answer = {"is_sleeping": bool(self.sleeping_tags) or bool(self.paused and self.since(0, 17))}
            elif path == "/is_paused":
                answer = {"is_paused": bool(self.paused)}
            elif path == "/reset_prefix_cache":
                done = not self.running
                if done:
                    self.stale.clear()
                self.tell("reset_prefix_cache", done=done)
                answer = {"success": done} if self.since(0, 26) else b""
            else:
                self.unpause()
                answer = {"status": "resumed"}
        return self.reply(client, 200, answer)

    def metrics(self):
        with self.state:
            labels = f'engine="0",model_name="{self.name}"'
            lines = [
                f"vllm:num_requests_running{{{labels}}} {len(self.running)}.0",
                f"vllm:num_requests_waiting{{{labels}}} {len(self.waiting)}.0",
            ]
            if self.since(0, 12):
                for level, state in enumerate(STATES):
                    lines.append(f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {float(level == self.told_level)}')
        return "\n".join([*lines, ""]).encode()

    # ---------------------------------------------------------------- sleep, wake, pause

    def sleep(self, client, query):
        wanted = dict(query)
        level, mode = wanted.get("level", "1"), wanted.get("mode", "abort")
        known = mode in MODES or not self.since(0, 17)
        if self.since(0, 32) and (level not in ("0", "1", "2") or not known):
            return self.refuse(client, 400, f"level={level}, mode={mode}: not valid", "Bad Request")
        if not level.lstrip("-").isdigit() or not known:
            raise Failed(f"Invalid pause mode: {mode}")
        level, said = int(level), {"level": int(level), "mode": mode}
        with self.turn:
            with self.state:
                in_flight = len(self.connected())
                self.tell("sleep_begin", in_flight=in_flight, asleep=bool(self.sleeping_tags), **said)
                if in_flight and self.strict:
                    self.crash(UNMAPPED)
                if self.since(0, 17):
                    self.hold_back(mode)
            busy = self.paused == "new" and bool(self.running)
            if not busy:
                self.fall_asleep(level)
        if busy:  # the engine core works on meanwhile, and hears other calls
            with self.state:
                self.state.wait_for(lambda: self.dead or not self.running)
            if self.dead:
                raise Dead
            with self.turn:
                self.fall_asleep(level)
        self.told_level = level if level in (1, 2) else -1
        self.tell("sleep_end", mib=self.holding(), host_mib=self.host_copy, **said)
        return self.reply(client, 200, {"status": "sleeping", "level": level} if self.since(0, 32) else b"")

    def connected(self):
        """The requests in the engine, without those whose client it knows to be gone."""
        notices = self.number_of("notice_s") == 0
        return [run for run in (*self.running.values(), *self.waiting.values()) if not (notices and is_gone(run.client))]

    def hold_back(self, mode):
        """Pause the scheduler; what is in the engine is aborted, runs to its end, or freezes."""
        if mode == "abort":
            for run in (*self.running.values(), *self.waiting.values()):
                run.aborted = True
                self.tell("abort", number=run.number)
            self.running.clear()
            self.waiting.clear()
        self.paused = "all" if mode == "keep" else "new"
        self.state.notify_all()

    def unpause(self):
        with self.state:
            self.paused = ""
            self.state.notify_all()

    def fall_asleep(self, level):
        if level == 0 and self.since(0, 17):
            return
        if "weights" in self.sleeping_tags:
            fe.say("WARNING Executor is already sleeping.")
            return
        kind, _ = self.fault("on_sleep")
        time.sleep(self.number_of("sleep_s"))
        if kind == "500":
            raise Failed("Call to sleep method failed: CUDA error: unspecified launch failure")
        self.level = level
        self.sleeping_tags = set(TAGS)
        self.bewitched = False
        self.stale.clear()
        before = self.holding()
        if self.frees and kind != "no_free":
            self.mapped = set()
            self.weights_lost = self.weights_lost or level != 1
            self.host_copy = self.copy_mib() if level == 1 else self.host_copy
            self.hold()
        after = self.holding()
        fe.say(f"INFO Sleep mode freed {(before - after) / 1024:.2f} GiB memory, {after / 1024:.2f} GiB memory is still in use.")
        kind, arg = self.fault("on_asleep")
        if kind == "worker_dies":
            later(float(arg or 0), self.end_worker)

    def end_worker(self):
        if self.worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)
        else:
            self.die("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.")

    def wake_up(self, client, tags):
        with self.turn:
            self.tell("wake_begin", tags=tags)
            wanted = [tag for tag in tags if tag != "scheduling" or not self.since(0, 17)]
            if (wanted or not tags) and self.sleeping_tags and self.sleeping_tags.issuperset(wanted):
                self.map_again(wanted)
            whole = not self.sleeping_tags
            if whole or not self.since(0, 23):
                self.told_level = 0
                self.unpause()
            self.tell("wake_end", tags=tags, asleep=not whole, mib=self.holding())
        answer = {"status": "awake" if whole else "sleeping", "tags": tags or None}
        return self.reply(client, 200, answer if self.since(0, 32) else b"")

    def map_again(self, tags):
        kind, _ = self.fault("on_wake_kv" if tags == ["kv_cache"] else "on_wake")
        time.sleep(self.number_of("wake_s"))
        if kind == "500":
            raise Failed("Call to wake_up method failed: CUDA error: unspecified launch failure")
        if kind == "stuck":
            return
        before = (self.mapped, self.left_over, self.host_copy)
        self.mapped, self.left_over = self.mapped | (set(tags) or TAGS), 0
        if self.mapped >= {"weights"} and self.knobs["host_kept"] != "1":
            self.host_copy = 0
        if kind in ("oom", "oom_partly") or not self.hold():
            wanted = self.holding()
            self.mapped, self.left_over, self.host_copy = before
            if kind == "oom_partly":
                self.left_over = (wanted - self.holding() + self.left_over) // 2
                self.hold()
            fe.say(f"ERROR {NO_ROOM_AWAKE}")
            raise Failed(NO_ROOM_AWAKE)
        self.bewitched = self.bewitched or kind == "garbage"
        self.sleeping_tags -= set(tags) or TAGS
        self.first = True

    def pause(self, client, query):
        wanted = dict(query)
        mode = wanted.get("mode", "abort")
        if not self.since(0, 16):
            mode = "wait" if wanted.get("wait_for_inflight_requests") == "true" else "abort"
        if mode not in MODES:
            return self.refuse(client, 400, f"mode={mode}: not valid", "Bad Request")
        with self.turn, self.state:
            self.hold_back(mode)
        with self.state:
            self.state.wait_for(lambda: self.dead or self.paused != "new" or not self.running)
        return self.reply(client, 200, {"status": "paused"})

    def collective_rpc(self, client, body):
        wanted, _ = self.read(body)
        if "method" not in wanted:
            return self.refuse(client, 400, "Missing 'method' in request body", "Bad Request")
        with self.turn:
            if wanted["method"] != "reload_weights":
                raise Failed(f"Call to collective_rpc method failed: method {wanted['method']} is not implemented")
            if "weights" not in self.mapped:
                self.crash(UNMAPPED)
            kind, _ = self.fault("on_reload")
            time.sleep(self.number_of("reload_s"))
            if kind == "500":
                self.tell("reload", done=False)
                raise Failed("Call to collective_rpc method failed: NotImplementedError: get_all_weights")
            if kind != "no_load":
                self.weights_lost = False
            self.tell("reload", done=kind != "no_load")
        return self.reply(client, 200, {"results": [None]})

    # ---------------------------------------------------------------- inference

    @contextlib.contextmanager
    def admitted(self, number, client, key):
        """A request in the engine: it waits while the scheduler is paused, and runs when memory is there."""
        run = Run(number, client, key)
        with self.state:
            if self.dead:
                raise Dead
            if self.sleeping_tags or self.paused:
                self.tell("asleep_request", number=number, asleep=bool(self.sleeping_tags))
                if self.sleeping_tags and self.strict:
                    self.crash(UNMAPPED)
            self.waiting[number] = run
        try:
            with self.state:
                while self.paused and not run.aborted:
                    self.look(run)
                if not run.aborted:
                    del self.waiting[number]
                    self.running[number] = run
                    self.tell("admitted", number=number)
                    self.check_mapped()
                first, self.first = self.first and not run.aborted, self.first and run.aborted
            kind = self.fault("on_first")[0] if first else ""
            if kind == "500":
                raise Failed(UNMAPPED)
            self.bewitched = self.bewitched or kind == "garbage"
            yield run
        except fe.Gone:
            time.sleep(self.number_of("notice_s"))
            raise
        finally:
            self.finish(run)

    def look(self, run):
        """Wait a moment for a change, holding the state; raises when there is nothing to wait for."""
        self.state.wait(LOOK_S)
        if self.dead:
            raise Dead
        if is_gone(run.client):
            raise fe.Gone

    def check_mapped(self):
        if self.mapped != TAGS:
            self.crash(UNMAPPED)

    def step(self, run, seconds):
        """One turn of the engine for this request."""
        fe.wait(run.client, seconds)
        with self.state:
            while self.paused == "all" and not run.aborted:
                self.look(run)
            if self.dead:
                raise Dead
            if run.aborted:
                raise Aborted
            self.check_mapped()
            run.garbage = self.weights_lost or self.bewitched or run.key in self.stale
            if run.garbage:
                self.stale.add(run.key)

    def finish(self, run):
        """It leaves the engine, before its last byte is sent."""
        with self.state:
            inside = self.running.pop(run.number, None) or self.waiting.pop(run.number, None)
            if inside:
                self.tell("finished", number=run.number, garbage=run.garbage)
            self.state.notify_all()

    def tokens(self, run, wanted, knobs):
        """Yields tokens, each with None or, the last, with how it ended ("length", "stop" or "abort")."""
        if run.aborted:
            yield "", "abort"
            return
        many, _, pause = knobs["stream"].partition("x")
        limit = wanted.get("max_completion_tokens") or wanted.get("max_tokens")
        count = int(limit or many)
        salt = "" if wanted.get("temperature") == 0 else wanted.get("seed", run.number)
        try:
            fe.wait(run.client, float(knobs["prompt"]))
            for index in range(count):
                self.step(run, float(pause))
                digest = hashlib.sha256(f"{self.name} {run.key} {salt} {index}".encode()).digest()
                is_last = index == count - 1
                if is_last:
                    self.finish(run)
                reason = ("length" if limit else "stop") if is_last else None
                yield GARBAGE if run.garbage else " " + WORDS[digest[0] % len(WORDS)], reason
        except Aborted:
            yield "", "abort"

    def generate(self, client, number, wanted, knobs):
        chat = "messages" in wanted
        key = json.dumps(wanted.get("messages") if chat else wanted.get("prompt"))
        kind, _, count = knobs["fail"].partition(":")
        if kind == "die_before_byte":
            self.leave(1, "told to before the first byte")
        if kind == "status":
            return self.refuse(client, int(count), "told to")
        if kind == "hang":
            fe.wait(client, 3600)
        if wanted.get("stream"):
            return self.stream_out(client, chat, number, key, wanted, knobs, kind, int(count or 0))
        with self.admitted(number, client, key) as run:
            texts, reasons = zip(*self.tokens(run, wanted, knobs), strict=True)
        whole = self.envelope(chat, number, "".join(texts), reasons[-1], False) | {"usage": usage(key, sum(map(bool, texts)))}
        if wanted.get("logprobs") and not chat:
            whole["choices"][0]["logprobs"] = {"tokens": [f"token_id:{sum(text.encode())}" for text in texts if text]}
        return self.reply(client, 200, whole, cut_half=kind in ("die_mid", "abort_mid"), die=kind == "die_mid")

    def stream_out(self, client, chat, number, key, wanted, knobs, kind, count):
        """Its headers come at once, whatever the state of the engine; an engine that dies says so in an event."""
        fe.send(client, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
        if kind == "hang_after_headers":
            fe.wait(client, 3600)
        sent = said = 0
        try:
            with self.admitted(number, client, key) as run:
                for text, reason in self.tokens(run, wanted, knobs):
                    if kind in ("die_mid", "abort_mid") and sent == count:
                        if kind == "die_mid":
                            self.leave(1, "told to mid-stream")
                        return "close"
                    if chat and not sent:
                        self.event(client, self.envelope(chat, number, "", None, True, role="assistant"))
                    self.event(client, self.envelope(chat, number, text, reason, True))
                    sent, said = sent + 1, said + bool(text)
            if (wanted.get("stream_options") or {}).get("include_usage"):
                self.event(client, self.envelope(chat, number, None, None, True) | {"usage": usage(key, said)})
        except (Dead, Failed):
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            self.event(client, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}})
        fe.send(client, fe.framed_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return "whole"

    def event(self, client, value):
        fe.send(client, fe.framed_chunk(b"data: " + json.dumps(value).encode() + b"\n\n"))

    def envelope(self, chat, number, text, reason, part, role=None):
        kind = ("chat.completion.chunk" if part else "chat.completion") if chat else "text_completion"
        choice = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not chat:
            choice["text"] = text
        elif part:
            choice["delta"] = {"role": role, "content": text} if role else {"content": text}
        else:
            choice["message"] = {"role": "assistant", "content": text}
        choices = [] if text is None else [choice]
        return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{number}", "object": kind, "model": self.name, "choices": choices}

    def pooled(self, client, number, texts, knobs):
        """A number from 0 to 1 per text; the same for all when its weights are gone.  None when it was aborted."""
        with self.admitted(number, client, json.dumps(texts)) as run:
            if run.aborted:
                return None
            try:
                self.step(run, float(knobs["prompt"]) + float(knobs["stream"].partition("x")[2]))
            except Aborted:
                return None
        digests = (hashlib.sha256(f"{self.name} {text}".encode()).digest() for text in texts)
        return [0.5 if run.garbage else int.from_bytes(digest[:4], "big") / (1 << 32) for digest in digests]

    def embed(self, client, number, wanted, knobs):
        given = wanted.get("input", "")
        texts = given if isinstance(given, list) else [given]
        scores = self.pooled(client, number, [f"{text} {part}" for text in texts for part in range(4)], knobs)
        if scores is None:
            return self.refuse(client, 500, "the request was aborted")
        rows = [{"object": "embedding", "index": index, "embedding": scores[index * 4 : index * 4 + 4]} for index in range(len(texts))]
        return self.reply(client, 200, {"id": f"embd-{number}", "object": "list", "model": self.name, "data": rows})

    def rank(self, client, number, wanted, knobs):
        documents = wanted.get("documents", [])
        scores = self.pooled(client, number, [f"{wanted.get('query')} {text}" for text in documents], knobs)
        if scores is None:
            return self.refuse(client, 500, "the request was aborted")
        rows = [{"index": index, "document": {"text": documents[index]}, "relevance_score": score} for index, score in enumerate(scores)]
        rows.sort(key=lambda row: -row["relevance_score"])
        return self.reply(client, 200, {"id": f"rerank-{number}", "model": self.name, "results": rows[: wanted.get("top_n") or None]})

    def score(self, client, number, wanted, knobs):
        left, right = (value if isinstance(value, list) else [value] for value in (wanted.get("text_1", ""), wanted.get("text_2", "")))
        left = left * len(right) if len(left) == 1 else left
        scores = self.pooled(client, number, [f"{a} {b}" for a, b in zip(left, right, strict=False)], knobs)
        if scores is None:
            return self.refuse(client, 500, "the request was aborted")
        rows = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return self.reply(client, 200, {"id": f"score-{number}", "object": "list", "model": self.name, "data": rows})


INFERENCE = {  # path -> (its answer, the kind of model that has it)
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions"), (Vllm.generate, "generate")),
    "/v1/embeddings": (Vllm.embed, "embed"),
    **dict.fromkeys(("/score", "/v1/score"), (Vllm.score, "rank")),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (Vllm.rank, "rank")),
}


def usage(key, said):
    asked = len(key.split())
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def arguments(query):
    """`a=1&a=2` -> [("a", "1"), ("a", "2")]."""
    return [(key, value) for key, _, value in (pair.partition("=") for pair in query.split("&") if pair)]


def is_gone(client):
    """Whether the other side hung up."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def later(seconds, call, *words):
    timer = threading.Timer(seconds, call, words)
    timer.daemon = True
    timer.start()


def read_command(words):
    """(flags with the model, knobs) of `serve NAME --flag value --switch key=value`."""
    if words[:1] != ["serve"] or len(words) < 2:
        sys.exit(__doc__)
    flags, knobs = {"model": words[1]}, []
    rest = words[2:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            knobs.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals and rest and not rest[0].startswith("--") and not KNOB.match(rest[0]):
            value = rest.pop(0)
        flags[name.replace("_", "-")] = value
    return flags, knobs


if __name__ == "__main__":
    Vllm(*read_command(sys.argv[1:])).run()
