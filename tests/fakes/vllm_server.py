"""A fake vLLM server without greenroom, and a client for it or for a true one."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from greenroom.host.ports import free_port

FAKE = Path(__file__).resolve().parent / "fake_vllm.py"
CALL_S_MAX = 60.0
UP_S_MAX = 10.0
LOOK_S = 0.005


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes
    at: float  # its end
    took_s: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def choice(self) -> Any:
        return self.json["choices"][0]


class Asked:
    """A request whose answer is read when it is wanted."""

    def __init__(self, port: int, target: str, value: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S_MAX)
        self._response: http.client.HTTPResponse | None = None
        self._connection.request("POST", target, json.dumps(value), {"Content-Type": "application/json"})

    def is_silent(self, seconds: float) -> bool:
        """Whether not a byte comes for so long."""
        assert self._connection.sock is not None
        return not select.select([self._connection.sock], [], [], seconds)[0]

    def status(self) -> int:
        """Once the headers are there."""
        self._response = self._response or self._connection.getresponse()
        return self._response.status

    def answer(self) -> Answer:
        with contextlib.closing(self._connection):
            status = self.status()
            assert self._response is not None
            return Answer(status, self._response.read(), time.monotonic())

    def events(self) -> Iterator[Any]:
        """The data of a stream's events as they come; [DONE] is the string."""
        with contextlib.closing(self._connection):
            assert self.status() == 200
            assert self._response is not None
            for line in self._response:
                if line.startswith(b"data: "):
                    text = line[6:].strip().decode()
                    yield text if text == "[DONE]" else json.loads(text)

    def hang_up(self) -> None:
        self._connection.close()


class Caller:
    """Who talks to a vLLM server on a port of this machine."""

    port: int
    call_s_max: ClassVar[float] = CALL_S_MAX

    def call(self, method: str, target: str, value: Any = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.call_s_max)
        with contextlib.closing(connection):
            asked_at = time.monotonic()
            connection.request(method, target, None if value is None else json.dumps(value), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
            at = time.monotonic()
            return Answer(response.status, body, at, at - asked_at)

    def get(self, target: str) -> Answer:
        return self.call("GET", target)

    def post(self, target: str, value: Any = None) -> Answer:
        return self.call("POST", target, value)

    def must(self, target: str, value: Any = None) -> Answer:
        """POST what must succeed."""
        answer = self.post(target, value)
        assert answer.status == 200, f"{target}: {answer.status} {answer.body[:500]!r}"
        return answer

    def is_sleeping(self) -> bool:
        return bool(self.get("/is_sleeping").json["is_sleeping"])


@dataclass(slots=True)
class Client(Caller):
    """Somebody who asks a server for text, and how it sleeps."""

    port: int
    name: str
    frees_memory: bool = True

    def sleep_state(self) -> str:
        """What the metric says: awake, weights_offloaded or discard_all."""
        lines = self.get("/metrics").body.decode().splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:engine_sleep_state{") and line.endswith(" 1.0")]
        return line.partition('sleep_state="')[2].partition('"')[0]

    def asked(self, tokens: int = 8, prompt: str = "good evening", **more: Any) -> dict[str, Any]:
        return {"model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}

    def ask(self, tokens: int = 8, **more: Any) -> Asked:
        """Send a greedy completion and do not wait."""
        return Asked(self.port, "/v1/completions", self.asked(tokens, **more))

    def greedy(self, tokens: int = 8, **more: Any) -> str:
        return str(self.must("/v1/completions", self.asked(tokens, **more)).choice["text"])

    def greedy_chat(self, tokens: int = 8) -> str:
        messages = [{"role": "user", "content": "good evening"}]
        value = {"model": self.name, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return str(self.must("/v1/chat/completions", value).choice["message"]["content"])

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@dataclass
class FakeServer:
    """One fake server, up inside `with`."""

    home: Path
    knobs: Sequence[str] = ()
    flags: Sequence[str] = ("--enable-sleep-mode",)
    dev_mode: bool = True
    model: str = "m"
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.home.mkdir(exist_ok=True)
        link = self.home / "vllm"
        if not link.is_symlink():
            link.symlink_to(FAKE)
        self.journal_path, self.log = self.home / "journal.jsonl", self.home / f"{self.model}.log"
        own = [f"model={self.model}", f"journal={self.journal_path}", f"claims={self.home / 'claims'}", f"steer={self.home / 'steer.json'}"]
        self.port = free_port(None, ())
        cmd = [sys.executable, "-S", "-E", str(link), "serve", "some/model", "--port", str(self.port), "--served-model-name", self.model]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*cmd, *self.flags, *own, *self.knobs],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": str(int(self.dev_mode))},
                stdout=log,
                stderr=log,
            )
        self.wait_for(lambda: self.exited() or self.is_open(), "the server is up")
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(UP_S_MAX)
        except subprocess.TimeoutExpired:  # how it ends is not what these tests are about, and none may be left
            self._process.kill()
            self._process.wait()

    @property
    def client(self) -> Client:
        return Client(self.port, self.model, "--enable-sleep-mode" in self.flags)

    def is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def exited(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """Once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(UP_S_MAX)

    def steer(self, **knobs: Any) -> None:
        new = self.home / "steer.new"
        new.write_text(json.dumps(knobs))
        new.rename(self.home / "steer.json")

    def journal(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.journal_path.read_bytes().splitlines()]
        return [line for line in lines if line["event"] == event]

    def held_mib(self) -> int:
        """What its last claim was."""
        return int(self.journal("claim")[-1]["mib"])

    def host_mib(self) -> int:
        return int(self.journal("claim")[-1]["host_mib"])

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + UP_S_MAX
        while not holds():
            assert time.monotonic() < deadline, f"not within {UP_S_MAX} s: {what}\n{self.log.read_text()}"
            threading.Event().wait(LOOK_S)
