"""The stage of the stories: a real greenroom server, fake engines under it, clients in front, and standing oracles.

    async with Rig(tmp_path, {"a": fake(vram=8000, ready_after=0.3)}, budget_mib=10_000) as rig:
        reply = await rig.chat("a", stream=True)

On the way out every rig checks what must hold in every story:

* O1  claims of living engines never exceed the device's budget, nor the book its capacity;
* O2  every response is complete, or an explicit error; a cut stream ends with an error event, never cleanly;
* O3  no two engines of one model are alive at once;
* O4  after SIGTERM: exit code 0, no process, no zombie, no open port, no temporary file;
* O5  no engine is put to sleep over a request, none gets one before it is awake, and no client sees what one says
      whose weights are gone;
* O6  /api/status answers within 250 ms at every moment (with slack for a starved machine).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

FAKES = Path(__file__).resolve().parent.parent / "fakes"
FE = FAKES / "fe.py"
DEVICE = "bench0"
UP_S_MAX = 20.0  # for the server to announce its address
DOWN_S_MAX = 20.0  # from SIGTERM to the exit
WAIT_S_MAX = 20.0  # for anything a story waits for
STATUS_S_MAX = 0.25  # O6
STATUS_S_WORST = 1.5  # ... of a single sample on a starved machine
STARVED_S = 0.03  # the poller itself woke this much too late: its sample says nothing about the server
POLL_S = 0.04
READ_BYTES = 1 << 18
PLENTY_MIB = 1 << 20  # host RAM for all sleepers
CONTROL = frozenset({"/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/pause", "/resume"})
GARBAGE = "!"  # in the text of a fake vLLM without its weights, and in no other

Line = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Fake:
    """A model served by the fake engine: its knobs, and what the configuration says beside the command."""

    knobs: Mapping[str, str]
    config: Mapping[str, Any]
    wrap: Callable[[Sequence[str]], Sequence[str]] | None = None

    def entry(self, name: str, rig: Rig) -> dict[str, Any]:
        own = {"model": name, "journal": rig.journal_path, "claims": rig.claims, "budget": rig.budget_mib, "steer": rig.steering(name)}
        knobs = {**own, **self.knobs}
        command: Sequence[str] = [sys.executable, "-S", "-E", *self.program(name, rig), *(f"{key}={value}" for key, value in knobs.items())]
        if self.wrap is not None:
            command = self.wrap(command)
        return {"cmd": list(command), "memory": f"{knobs['vram']}MiB", "device": DEVICE, **self.config}

    def program(self, name: str, rig: Rig) -> list[str]:
        return [str(FE), "--port", "${PORT}"]


@dataclass(frozen=True, slots=True)
class FakeVllm(Fake):
    """A model served by the fake vLLM: also what stands on its command line, and how much its weights are on disk."""

    weights: int = 0
    flags: Sequence[str] = ()

    def program(self, name: str, rig: Rig) -> list[str]:
        link = rig.home / "vllm"  # the name that a command of vLLM has
        if not link.is_symlink():
            link.symlink_to(FAKES / "fake_vllm.py")
        folder = rig.home / "weights" / quote(name, safe="")
        if not folder.exists():
            folder.mkdir(parents=True)
            with (folder / "model.safetensors").open("wb") as file:
                file.truncate(self.weights << 20)  # takes no room
        return [str(link), "serve", str(folder), "--port", "${PORT}", "--served-model-name", name, *self.flags]


def fake(
    vram: int = 1000, *, config: Mapping[str, Any] | None = None, wrap: Callable[[Sequence[str]], Sequence[str]] | None = None, **knobs: Any
) -> Fake:
    """A fake model.  `knobs` are those of tests/fakes/fe.py; `start_2__ready_after=0.5` is `start.2.ready_after=0.5`."""
    return Fake({"vram": str(vram), **by_name(knobs)}, dict(config or {}), wrap)


def vllm(
    vram: int = 8000,
    vram_asleep: int | str = 1000,
    *,
    sleep: str | int = "auto",
    sleep_after: float | None = None,
    ttl: float | None = None,
    weights: int | None = None,
    flags: Sequence[str] = ("--enable-sleep-mode",),
    config: Mapping[str, Any] | None = None,
    wrap: Callable[[Sequence[str]], Sequence[str]] | None = None,
    **knobs: Any,
) -> Fake:
    """A fake vLLM that can sleep.  `weights` MiB (3/4 of what it gives back) lie in its folder and are what level 1 copies.

    `vram_asleep="1000,800"` is for levels 1 and 2.  `knobs` are those of tests/fakes/fake_vllm.py; seconds where times are.
    """
    weights = (vram - int(str(vram_asleep).partition(",")[0])) * 3 // 4 if weights is None else weights
    idle = {"sleep_after": sleep_after, "ttl": ttl}
    entry = {"sleep": str(sleep), **{key: f"{value}s" for key, value in idle.items() if value is not None}, **(config or {})}
    sizes = {"vram": str(vram), "vram_asleep": str(vram_asleep), "weights": str(weights)}
    return FakeVllm({**sizes, **by_name(knobs)}, entry, wrap, weights, flags)


def by_name(knobs: Mapping[str, Any]) -> dict[str, str]:
    """`start_2__vram=1` and `start_1_5__vram=1` as the fakes spell them."""
    return {
        re.sub(r"^start_([\d_]+)__", lambda found: f"start.{found[1].replace('_', '-')}.", key): str(value) for key, value in knobs.items()
    }


# ------------------------------------------------------------------------------------------------------------ clients


@dataclass(slots=True)
class Reply:
    """A response as it came over the wire."""

    status: int
    headers: dict[str, str]  # lower-case names
    body: bytes = b""
    complete: bool = False  # the framing came to its end
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)  # moment and SSE event (text between blank lines), comments too
    asked_at: float = 0.0
    head_at: float = 0.0
    ended_at: float = 0.0

    @property
    def took_s(self) -> float:
        return self.ended_at - self.asked_at

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def data(self) -> list[bytes]:
        """The payloads of the `data:` events."""
        return [event[5:].strip() for _, event in self.arrivals if event.startswith(b"data:")]

    @property
    def tokens(self) -> list[bytes]:
        return [payload for payload in self.data if payload != b"[DONE]" and not payload.startswith(b'{"error"')]

    @property
    def text(self) -> str:
        """What the model said, streamed or not; "" when it said nothing."""
        said = ""
        for payload in self.tokens if self.is_stream else [self.body]:
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                choice = json.loads(payload)["choices"][0]
                said += choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        return said

    @property
    def done(self) -> bool:
        """Whole as the engine meant it: 2xx, framing at its end, and the end marker if it is a stream."""
        return self.status < 400 and self.complete and (not self.is_stream or b"[DONE]" in self.data)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI-shaped error: of the body, or of the stream's error event; {} when there is none."""
        texts = self.data if self.is_stream else [self.body]
        for text in texts:
            with contextlib.suppress(ValueError):
                value = json.loads(text)
                if isinstance(value, dict) and isinstance(value.get("error"), dict):
                    return dict(value["error"])
        return {}

    def fault(self, may_abort: bool = False) -> str:
        """What O2 has against it, or ""."""
        if self.done:
            return ""
        if self.status >= 400 and self.complete:
            return (
                "" if self.error.get("message") and "code" in self.error else f"{self.status} without an OpenAI error: {self.body[:200]!r}"
            )
        if self.is_stream:
            return (
                ""
                if self.error and not self.complete
                else f"a stream ended without [DONE] or error event (clean={self.complete}): {self.data[-2:]}"
            )
        return "" if may_abort and not self.complete else f"a body of status {self.status} was cut after {len(self.body)} bytes"


class Exchange:
    """One request under way on its own connection."""

    def __init__(self, rig: Rig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked_at: float) -> None:
        self._rig, self.reader, self.writer = rig, reader, writer
        self.reply = Reply(0, {}, asked_at=asked_at)
        self._pending = b""
        self._feed: Any = None

    async def head(self) -> Reply:
        """Read the status line and headers; 1xx answers are passed over."""
        while self.reply.status < 200:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            self.reply.status = int(lines[0].split(" ")[1])
            self.reply.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        self.reply.head_at = time.monotonic()
        return self.reply

    async def events(self, count: int) -> Reply:
        """Read until `count` data events came."""
        if not self.reply.status:
            await self.head()
        while len(self.reply.tokens) < count and await self._more():
            pass
        return self.reply

    async def rest(self) -> Reply:
        """Read to the end, whatever it is; the rig's oracle gets the reply."""
        try:
            if not self.reply.status:
                await self.head()
            while await self._more():
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.reply.ended_at = time.monotonic()
        self._rig.replies.append(self.reply)
        self.close()
        return self.reply

    async def _more(self) -> bool:
        """One more piece of the body; False at its clean end.  A cut raises."""
        headers = self.reply.headers
        if headers.get("transfer-encoding") == "chunked":
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = await self.reader.readexactly(size)
            await self.reader.readuntil(b"\r\n")
            if size == 0:
                self.reply.complete = True
                return False
        elif "content-length" in headers:
            left = int(headers["content-length"]) - len(self.reply.body)
            piece = await self.reader.read(min(left, READ_BYTES)) if left else b""
            if left and not piece:
                raise ConnectionResetError(f"{left} bytes are missing")
            self._take(piece)
            self.reply.complete = len(piece) == left
            return not self.reply.complete
        else:
            piece = await self.reader.read(READ_BYTES)
            if not piece:
                self.reply.complete = self.reply.status in (204, 304) or headers.get("connection") == "close"
                return False
        self._take(piece)
        return True

    def _take(self, piece: bytes) -> None:
        self.reply.body += piece
        if not self.reply.is_stream:
            return
        *events, self._pending = re.split(rb"\r?\n\r?\n", self._pending + piece)
        now = time.monotonic()
        self.reply.arrivals += [(now, event) for event in events if event]

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


# ---------------------------------------------------------------------------------------------------------- the poller


class Poller(threading.Thread):
    """Asks for the status all the time and remembers how long it took and what it said (O6)."""

    def __init__(self, port: int, server_pid: int = 0) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._server_pid = server_pid
        self._stop_asked = threading.Event()
        self.took_s: list[float] = []
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self.faults: list[str] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        while not self._stop_asked.is_set():
            began_at, unserved_s = time.monotonic(), self._unserved_s()
            try:
                connection.request("GET", "/api/status")
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as exc:
                if not self._stop_asked.is_set():
                    self.faults.append(f"/api/status: {exc!r}")
                break
            took_s = time.monotonic() - began_at
            unserved_s = self._unserved_s() - unserved_s
            if answer.status != 200:
                self.faults.append(f"/api/status answered {answer.status}")
            else:
                self.seen.append((began_at + took_s, json.loads(body)))
            slept_from = time.monotonic()
            self._stop_asked.wait(POLL_S)
            if time.monotonic() - slept_from < POLL_S + STARVED_S:
                self.took_s.append(max(0.0, took_s - unserved_s))
        connection.close()

    def _unserved_s(self) -> float:
        """How long server and poller stood in line for a CPU so far: that is the machine's time, not the server's."""
        return queued_s(f"/proc/{self._server_pid}") + queued_s(f"/proc/self/task/{threading.get_native_id()}")

    def end(self) -> None:
        self._stop_asked.set()
        if self.ident is not None:
            self.join(10)


# ------------------------------------------------------------------------------------------------------------- the rig


class Rig:
    """A server with its state directory, its fake engines and its clients.  See the module's docstring."""

    def __init__(
        self,
        tmp_path: Path,
        models: Mapping[str, Fake | Mapping[str, Any]],
        *,
        budget_mib: int = 10_000,
        host_budget_mib: int | None = None,
        config: Mapping[str, Any] | None = None,
        lenient: bool = False,
        may_abort: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = tmp_path
        self.budget_mib = budget_mib
        self.host_budget_mib = host_budget_mib
        self.journal_path = tmp_path / "journal.jsonl"
        self.claims = tmp_path / "claims"
        self.state_dir = tmp_path / "state"
        self.tmp_dir = tmp_path / "tmp"
        self.config_path = tmp_path / "greenroom.yaml"
        self.lenient = lenient
        self.may_abort = may_abort
        self.replies: list[Reply] = []
        self.latencies_s: list[float] = []
        self.seen: list[tuple[float, dict[str, Any]]] = []  # (moment, status) of the poller
        self.port = 0
        self.output: list[str] = []  # what the server printed
        self._env = dict(env or {})
        self._extra = dict(config or {})
        self._faults: list[str] = []
        self._polls = Poller(0)
        self._server: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.tmp_dir.mkdir()
        self.journal_path.touch()
        self.write_config(models)

    def write_config(self, models: Mapping[str, Fake | Mapping[str, Any]], **extra: Any) -> None:
        """Write greenroom.yaml; a running server takes it on `reload()`."""
        self._extra |= extra
        devices = {DEVICE: {"memory": f"{self.budget_mib}MiB", "headroom": "0MiB", "probe": "none"}}
        if any(isinstance(model, FakeVllm) for model in models.values()):
            devices["ram"] = {"memory": f"{PLENTY_MIB}MiB", "headroom": "0MiB", "probe": "none"}  # whatever this machine has
        document = {
            "devices": devices,
            "startPort": 20_000 + os.getpid() * 40 % 20_000,
            "models": {name: model.entry(name, self) if isinstance(model, Fake) else dict(model) for name, model in models.items()},
            **self._extra,
        }
        self.config_path.write_text(json.dumps(document, indent=1))

    def steering(self, model: str) -> Path:
        return self.home / "steer" / f"{quote(model, safe='')}.json"

    def steer(self, model: str, **knobs: Any) -> None:
        """Change knobs of a model's fake from its next request on, in this process and those to come; None takes one back."""
        path = self.steering(model)
        path.parent.mkdir(exist_ok=True)
        wanted = (json.loads(path.read_text()) if path.exists() else {}) | knobs
        new = path.with_suffix(".new")
        new.write_text(json.dumps({key: value for key, value in wanted.items() if value is not None}))
        new.rename(path)

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        await self.start_server()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                await self.end_well()
        finally:
            self._polls.end()
            await self._force_down()
        if kind is not None:
            print("".join(self.output[-60:]), file=sys.stderr)

    async def start_server(self) -> None:
        """Start the server and wait for its address."""
        code = "import sys; from greenroom.cli import main; sys.argv[0] = 'greenroom'; main()"
        words = ["serve", "-c", str(self.config_path), "--listen", "127.0.0.1:0", "--state-dir", str(self.state_dir)]
        self._server = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            *words,
            *(["--lenient"] if self.lenient else []),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(self.tmp_dir), **self._env},
        )
        address: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_output(self._server, address))
        try:
            self.port = await asyncio.wait_for(address, UP_S_MAX)
        except TimeoutError:
            raise AssertionError(f"no address within {UP_S_MAX} s:\n{''.join(self.output)}") from None
        self._polls = Poller(self.port, self.pid)
        self._polls.start()

    async def _read_output(self, server: asyncio.subprocess.Process, address: asyncio.Future[int]) -> None:
        assert server.stdout is not None
        async for raw in server.stdout:
            line = raw.decode(errors="replace")
            self.output.append(line)
            found = re.search(r"models? on http://127\.0\.0\.1:(\d+)", line)
            if found and not address.done():
                address.set_result(int(found[1]))
        if not address.done():
            await server.wait()  # its exit code is known from here on; a kill in the same moment would take it away
            address.set_exception(AssertionError(f"the server ended at once:\n{''.join(self.output)}"))

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._server is None else self._server.returncode

    async def force_down(self) -> None:
        """End everything without a check, for stories that end the server themselves."""
        self._polls.end()
        await self._force_down()

    def notify(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def reload(self) -> None:
        """Ask it to read its configuration again; a request that is sent next may still be answered by the old one."""
        self.notify(signal.SIGHUP)

    async def reloaded(self) -> None:
        """The same, until it has been done."""
        known = len(self.output)
        self.reload()
        await until(lambda: any("configuration read again" in line for line in self.output[known:]), "the reload")

    async def kill_server(self) -> None:
        """SIGKILL to the supervisor alone."""
        assert self._server is not None
        self._end_polls()
        self._server.kill()
        await self._server.wait()

    async def stop_server(self, signum: int = signal.SIGTERM) -> int:
        """Ask it to end; its exit code."""
        assert self._server is not None
        self._end_polls()
        self._server.send_signal(signum)
        try:
            return await asyncio.wait_for(self._server.wait(), DOWN_S_MAX)
        except TimeoutError:
            raise AssertionError(f"the server did not end within {DOWN_S_MAX} s:\n{''.join(self.output[-40:])}") from None

    def _end_polls(self) -> None:
        self._polls.end()
        self.latencies_s += self._polls.took_s
        self.seen += self._polls.seen
        self._faults += self._polls.faults
        self._polls.took_s, self._polls.seen, self._polls.faults = [], [], []

    async def end_well(self) -> None:
        """Stop the server and check the standing oracles."""
        assert self._server is not None
        if self._server.returncode is None:
            await until(lambda: not self._zombies(), "the server's dead children were reaped", 3)
            code = await self.stop_server()
            assert code == 0, f"exit code {code}:\n{''.join(self.output[-40:])}"
        await until(lambda: not self.processes(), f"O4: no process is left, but {self.processes()}", 3)
        self.check()

    def check(self) -> None:
        """The standing oracles over what was seen so far."""
        claims = self.journal(event="claim")
        assert [line for line in claims if line["total_mib"] > self.budget_mib] == [], "O1: engines claimed more than the budget"
        if self.host_budget_mib is not None:
            over = [line for line in claims if line.get("host_mib") and line["total_host_mib"] > self.host_budget_mib]
            assert over == [], "O1: sleepers hold more host RAM than there is"
        booked = [
            (at, device) for at, status in self.seen for device in status["devices"] if device["reserved_mib"] > device["capacity_mib"]
        ]
        assert booked == [], "O1: the book was over its capacity"
        assert [fault for reply in self.replies if (fault := reply.fault(self.may_abort))] == [], "O2"
        assert [line for line in claims if line["twins"]] == [], "O3: two engines of one model at once"
        ports = {self.port, *(line["port"] for line in self.journal(event="start"))}
        assert [port for port in ports if is_open(port)] == [], "O4: open ports"
        left = [
            str(path)
            for folder in (self.tmp_dir, self.state_dir)
            for path in folder.rglob("*")
            if folder == self.tmp_dir or path.is_socket()
        ]
        assert left == [], "O4: temporary files or sockets"
        assert [line for line in self.journal(event="sleep_begin") if line["in_flight"]] == [], "O5: put to sleep over a request"
        assert self.journal(event="asleep_request") == [], "O5: a request came before the engine was awake"
        assert self.journal(event="crash") == [], "O5: work on memory that was not there"
        assert [reply.text for reply in self.replies if self.is_garbage(reply.text)] == [], (
            "O5: a client got what a model without weights says"
        )
        assert self._faults == [], "O6"
        self.check_latency()
        inner = [line for line in self.output if "invariant" in line or "Traceback" in line or "task failed" in line]
        assert inner == [], f"inner faults:\n{''.join(self.output[-80:])}"

    def is_garbage(self, text: str) -> bool:
        return GARBAGE in text

    def check_latency(self) -> None:
        took_s = sorted(self.latencies_s)
        if not took_s:
            return
        p99_s = took_s[min(len(took_s) - 1, int(len(took_s) * 0.99))]
        print(f"O6: {len(took_s)} status answers, p99 {p99_s * 1000:.0f} ms, max {took_s[-1] * 1000:.0f} ms")
        late = [one for one in took_s if one > STATUS_S_MAX]
        assert len(late) <= max(1, len(took_s) // 50), f"O6: {len(late)} of {len(took_s)} status answers took over 250 ms: {late}"
        assert took_s[-1] < STATUS_S_WORST, f"O6: a status answer took {took_s[-1]:.2f} s"

    def processes(self) -> list[tuple[int, str]]:
        """Living processes that belong to this rig (engines and their wrappers)."""
        found = []
        mark = str(self.journal_path).encode()
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    words = Path("/proc", name, "cmdline").read_bytes()
                    if mark in words and state_of(int(name)) not in "ZX":
                        found.append((int(name), words.replace(b"\0", b" ").decode(errors="replace")[:120]))
        return found

    def _zombies(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_and_state(int(name)) == (self.pid, "Z")]

    async def _force_down(self) -> None:
        if self._server is not None and self._server.returncode is None:
            self._server.kill()
            await self._server.wait()
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._reap_adopted)
        if self._reading is not None:
            await self._reading

    def _reap_adopted(self) -> None:
        """Take away dead orphans of a killed server: they come to this process once greenroom's host code made it their reaper."""
        pids = {line["pid"] for line in self.journal() if line["event"] in ("start", "worker")}
        deadline = time.monotonic() + 3
        while any(parent_and_state(pid)[0] == os.getpid() for pid in pids) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)

    # ---------------------------------------------------------------- clients

    async def send(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Exchange:
        """Send one request on a fresh connection."""
        asked_at = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        fields = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
        if method not in ("GET", "HEAD") and "Transfer-Encoding" not in fields:
            fields.setdefault("Content-Length", str(len(body)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)
        await writer.drain()
        return Exchange(self, reader, writer, asked_at)

    async def ask(
        self, model: str, *, stream: bool = False, path: str = "/v1/chat/completions", fe: Mapping[str, Any] | None = None, **more: Any
    ) -> Exchange:
        """Send a request for a model and do not wait.  `fe` are knobs of the fake for this request alone."""
        value: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "good evening"}], **more}
        if stream:
            value["stream"] = True
        if fe:
            value["fe"] = dict(fe)
        return await self.send("POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"})

    async def chat(self, model: str, *, stream: bool = False, fe: Mapping[str, Any] | None = None, **more: Any) -> Reply:
        """A whole chat."""
        exchange = await self.ask(model, stream=stream, fe=fe, **more)
        return await exchange.rest()

    async def embed(self, model: str) -> Reply:
        exchange = await self.ask(model, path="/v1/embeddings", input="good evening")
        return await exchange.rest()

    async def api(self, method: str, target: str) -> Reply:
        exchange = await self.send(method, target)
        return await exchange.rest()

    async def load(self, model: str, wait_s: float = WAIT_S_MAX) -> Reply:
        return await self.api("POST", f"/api/models/{model}/load?wait={wait_s}")

    async def unload(self, model: str, *, force: bool = False, wait_s: float = WAIT_S_MAX) -> Reply:
        return await self.api("POST", f"/api/models/{model}/unload?wait={wait_s}&force={int(force)}")

    async def put_to_sleep(self, model: str, level: int | None = None, wait_s: float = WAIT_S_MAX) -> Reply:
        at = "" if level is None else f"&level={level}"
        return await self.api("POST", f"/api/models/{model}/sleep?wait={wait_s}{at}")

    async def why(self, model: str) -> str:
        """Its story as one text."""
        told = (await self.api("GET", f"/api/models/{model}/why")).json
        return "\n".join([*(one["text"] for one in told["story"]), told.get("sleep_off", "")])

    async def warm(self, *models: str) -> None:
        """Bring models in by a chat each."""
        for model in models:
            reply = await self.chat(model)
            assert reply.status == 200, reply

    async def status(self) -> dict[str, Any]:
        exchange = await self.send("GET", "/api/status")
        await exchange.head()
        while await exchange._more():
            pass
        exchange.close()
        value: dict[str, Any] = exchange.reply.json
        return value

    async def model(self, name: str) -> dict[str, Any]:
        return next(one for one in (await self.status())["models"] if one["id"] == name)

    async def events(self, model: str = "") -> list[Line]:
        """What the server told so far, oldest first."""
        reply = await self.api("GET", "/api/events?follow=0&limit=512")
        return [event for event in reply.json["events"] if not model or event["model"] == model]

    async def kinds(self, model: str) -> list[str]:
        return [event["kind"] for event in await self.events(model)]

    async def wait_kind(self, model: str, kind: str, count: int = 1, within_s: float = WAIT_S_MAX) -> str:
        """Until the server told that of the model so often; the last one's text."""
        deadline = time.monotonic() + within_s
        while len(said := [event["text"] for event in await self.events(model) if event["kind"] == kind]) < count:
            assert time.monotonic() < deadline, f"{len(said)} x {kind} of {model}, not {count}, after {within_s} s"
            await asyncio.sleep(0.03)
        return str(said[-1])

    async def wait_state(self, model: str, *states: str, within_s: float = WAIT_S_MAX) -> dict[str, Any]:
        """Until the model is in one of the states; its status then."""
        deadline = time.monotonic() + within_s
        while (now := await self.model(model))["state"] not in states:
            assert time.monotonic() < deadline, f"{model} is {now['state']}, not {states}, after {within_s} s"
            await asyncio.sleep(0.02)
        return now

    async def wait_queued(self, model: str, count: int, within_s: float = WAIT_S_MAX) -> None:
        """Until that many requests wait for the model."""
        deadline = time.monotonic() + within_s
        while (now := (await self.model(model))["queued"]) != count:
            assert time.monotonic() < deadline, f"{now} wait for {model}, not {count}, after {within_s} s"
            await asyncio.sleep(0.01)

    # ---------------------------------------------------------------- the journal

    def journal(self, model: str = "", event: str = "") -> list[Line]:
        """What the engines wrote, oldest first."""
        lines = [json.loads(line) for line in self.journal_path.read_bytes().split(b"\n")[:-1]]
        return [line for line in lines if (not model or line["model"] == model) and (not event or line["event"] == event)]

    def starts(self, model: str = "") -> int:
        return len(self.journal(model, "start"))

    def inferences(self, model: str = "") -> list[Line]:
        """Requests that reached an engine and were no order to it."""
        return [
            line for line in self.journal(model, "begin") if line["method"] == "POST" and line["target"].partition("?")[0] not in CONTROL
        ]

    def chats(self, model: str) -> list[Line]:
        """Requests of clients that reached an engine: no canary, no warm-up, no order."""
        return [line for line in self.journal(model, "begin") if line["target"] == "/v1/chat/completions"]

    def moves(self, model: str) -> list[str]:
        """What the engines of a model did about sleep, in order: "sleep 2", "wake weights", "reload", "wake kv_cache", "forget"."""
        said = {
            "sleep_end": lambda line: f"sleep {line['level']}",
            "wake_end": lambda line: " ".join(["wake", *line["tags"]]),
            "reload": lambda line: "reload",
            "reset_prefix_cache": lambda line: "forget",
            "start": lambda line: "start",
        }
        return [said[line["event"]](line) for line in self.journal(model) if line["event"] in said]

    async def wait_journal(self, model: str, event: str, count: int = 1, within_s: float = WAIT_S_MAX) -> Line:
        """The `count`-th such line, once it is there."""
        await until(lambda: len(self.journal(model, event)) >= count, f"{count} x {event} of {model}", within_s)
        return self.journal(model, event)[count - 1]

    def lives(self, model: str) -> list[tuple[float, float]]:
        """(start, end) of each start of a model that ended by itself or on TERM; a KILLed one ends at infinity."""
        ends = {line["pid"]: line["at"] for line in self.journal(model, "exit")}
        return [(line["at"], ends.get(line["pid"], float("inf"))) for line in self.journal(model, "start")]


# --------------------------------------------------------------------------------------------------------------- small


async def until(holds: Callable[[], bool], what: str, within_s: float = WAIT_S_MAX) -> None:
    """Wait for a fact, with a deadline."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


async def together(*jobs: Awaitable[Reply]) -> list[Reply]:
    return list(await asyncio.gather(*jobs))


def codes(replies: Iterable[Reply]) -> list[int]:
    return [reply.status for reply in replies]


def queued_s(folder: str) -> float:
    """Seconds a process's main thread, or a thread, was ready to run and had no CPU; 0 where the kernel does not say."""
    try:
        return int(Path(folder, "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def parent_and_state(pid: int) -> tuple[int, str]:
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, "X"
    return int(fields[1]), fields[0]


def state_of(pid: int) -> str:
    return parent_and_state(pid)[1]
