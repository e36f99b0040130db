#!/usr/bin/env python3
"""The fake engine of the stories: an HTTP program that misbehaves as told.  Standard library only; up in about 30 ms.

    python -S -E fe.py --port N [key=value ...] [start.2.key=value ...] [start.1-5.key=value ...]

`start.N.` and `start.N-M.` apply to the N-th start of the model only (counted in the journal).  A JSON request body may
hold `"fe": {"stream": "5x0.1", ...}`: knobs marked * for that request alone.

model=fe           its name                                journal=       file that gets a JSON line for every event
vram=0             MiB it claims                           claims=        folder that stands for the device
budget=0           MiB of the device, for the journal      ballast=0      MiB of RAM really touched
host=127.0.0.1     where it listens                        env=           names of environment variables to journal
listen_after=0     s until the port is open                ready_after=0  s until /health answers 200 (503 before)
health=ok          ok | instant | hang | 404 | dead_after:K (hangs after K requests)
models=            ids of /v1/models, comma-separated      warm_s=0       s the very first request takes longer
models_early=0     1: /v1/models answers 200 long before it is ready
on_term=exit       exit | ignore | slow:S | deaf (signals are pending until it is ready)
workers=0          children that do nothing                setsid=0       1: in sessions of their own
stream=3x0.01   *  events x s between them                 dialect=lf  *  lf | crlf | ping (a comment before each event)
big=0           *  KiB of the second event                 delay=0     *  s before a non-streaming answer
prompt=0        *  s before the first byte of a stream     body=0      *  bytes of padding in a non-streaming answer
parallel=0         more requests at once are answered 500
needs=             content-length (411 without) | one-framing (400 with both or none)
rerank=j           j (/v1/rerank: documents) | t (/rerank: texts) | n (501)
ws=0               1: WebSocket echo on any upgrade
sleep_s=0.05       s of POST /sleep                        wake_s=0.05    s of POST /wake_up
residue=0          MiB still claimed asleep                wake_fail=0    1: /wake_up answers 500
steer=             JSON file {knob: value} that wins over all of these; read again at every request
fail=           *  exit_at_start:CODE | oom | exit_after:K | die_before_byte | die_mid:K | abort_mid:K | hang_after_headers |
                   hang | status:N
log=               a line it prints at start               log_every=0    s between progress lines while it loads
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

DEFAULTS = {
    "model": "fe", "journal": "", "vram": "0", "claims": "", "budget": "0", "ballast": "0", "host": "127.0.0.1", "env": "",
    "listen_after": "0", "ready_after": "0", "health": "ok", "models": "", "models_early": "0", "warm_s": "0", "on_term": "exit",
    "workers": "0", "setsid": "0", "stream": "3x0.01", "dialect": "lf", "big": "0", "delay": "0", "prompt": "0", "body": "0",
    "parallel": "0", "needs": "", "rerank": "j", "ws": "0", "sleep_s": "0.05", "wake_s": "0.05", "residue": "0", "wake_fail": "0",
    "steer": "", "fail": "", "log": "", "log_every": "0",
}  # fmt: skip
HEAD_BYTES_MAX = 256 * 1024
WS_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BEGAN_AT = time.monotonic()


class Gone(Exception):
    """The client is not there any more."""


class Fake:
    """One running fake engine."""

    defaults = DEFAULTS
    control = frozenset({"/sleep", "/wake_up"})  # POST routes that infer nothing

    def __init__(self, port, words):
        self.port = port
        self.knobs = dict(self.defaults)
        self.steered = ""  # which state of the steering file holds
        self.holder = os.getpid()  # the process that claims
        by_start = []
        for word in words:
            key, _, value = word.partition("=")
            if key.startswith("start."):
                _, numbers, key = key.split(".", 2)
                by_start.append((numbers, key, value))
            else:
                self.set(key, value)
        self.journal_fd = os.open(self.knobs["journal"] or os.devnull, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.number = self.count_start()
        for numbers, key, value in by_start:
            first, _, last = numbers.partition("-")
            if int(first) <= self.number <= int(last or first):
                self.set(key, value)
        self.unsteered = dict(self.knobs)
        self.steer()
        self.lock = threading.Lock()
        self.ready = False
        self.asleep = 0
        self.requests = 0
        self.ended = 0
        self.at_once = 0

    def set(self, key, value):
        if key not in self.defaults:
            sys.exit(f"fe: there is no knob {key!r}")
        self.knobs[key] = value

    def steer(self):
        """Take the knobs of the steering file, when it changed."""
        try:
            stat = os.stat(self.knobs["steer"])
        except OSError:
            return
        state = f"{stat.st_mtime_ns} {stat.st_ino}"
        if state != self.steered:
            with open(self.knobs["steer"]) as file:
                wanted = json.load(file)
            self.knobs = dict(self.unsteered)
            for key, value in wanted.items():
                self.set(key, str(value))
            self.steered = state

    def number_of(self, key):
        return float(self.knobs[key])

    # ---------------------------------------------------------------- journal and claims

    def tell(self, event, **facts):
        line = {"at": time.monotonic(), "event": event, "model": self.knobs["model"], "pid": os.getpid(), "start": self.number, **facts}
        os.write(self.journal_fd, json.dumps(line).encode() + b"\n")

    def told(self):
        """The journal's lines about this model so far."""
        text = b""
        while part := os.pread(self.journal_fd, 1 << 20, len(text)):
            text += part
        lines = map(json.loads, text[: text.rfind(b"\n") + 1].splitlines())
        return [line for line in lines if line["model"] == self.knobs["model"]]

    def count_start(self):
        """This start's number, from 1; said in the journal under a lock."""
        fcntl.flock(self.journal_fd, fcntl.LOCK_EX)
        self.number = 1 + sum(line["event"] == "start" for line in self.told())
        names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", *filter(None, self.knobs["env"].split(",")))
        chosen = {name: os.environ[name] for name in names if name in os.environ}
        self.tell("start", argv=sys.argv, env=chosen, port=self.port)
        fcntl.flock(self.journal_fd, fcntl.LOCK_UN)
        return self.number

    def claim(self, mib, host=0, most=None):
        """Hold `mib` instead of what was held, and `host` MiB of RAM; the journal gets the sums of all living claims.

        False, and nothing changes, when the device would hold more than `most`.
        """
        if not self.knobs["claims"]:
            return True
        folder = self.knobs["claims"]
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total, total_host, twins = mib, host, []
            for name in os.listdir(folder):
                if not name.endswith(".claim"):
                    continue
                try:
                    with open(os.path.join(folder, name)) as file:
                        other = json.load(file)
                except (OSError, ValueError):
                    continue
                if other["pid"] == self.holder or not alive(other["pid"], other["born"]):
                    continue
                total += other["mib"]
                total_host += other.get("host", 0)
                if other["model"] == self.knobs["model"]:
                    twins.append(other["pid"])
            if most is not None and total > most:
                return False
            mine = {"pid": self.holder, "born": born(self.holder), "mib": mib, "host": host, "model": self.knobs["model"]}
            path = os.path.join(folder, f"{self.holder}.claim")
            with open(path + ".new", "w") as file:
                json.dump(mine, file)
            os.rename(path + ".new", path)
            budget = int(self.number_of("budget"))
            self.tell("claim", mib=mib, total_mib=total, budget_mib=budget, host_mib=host, total_host_mib=total_host, twins=twins)
        return True

    def leave(self, code, why):
        self.tell("exit", code=code, why=why)
        sys.stdout.flush()
        os._exit(code)

    # ---------------------------------------------------------------- life

    def run(self):
        signal.signal(signal.SIGTERM, self.on_term)
        signal.signal(signal.SIGINT, self.on_term)
        if self.knobs["on_term"] == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        if self.knobs["log"]:
            say(self.knobs["log"])
        if not self.claim_at_start():
            self.end_without_room()
        self.fork_helpers()
        self.ballast = bytearray(os.urandom(4096) * 256 * int(self.number_of("ballast")))
        kind, _, code = self.knobs["fail"].partition(":")
        if kind == "oom":
            self.end_without_room()
        if kind == "exit_at_start":
            say("fe: cannot start today")
            self.leave(int(code or 1), "told to at start")
        self.serve()

    def claim_at_start(self):
        return self.claim(int(self.number_of("vram")))

    def end_without_room(self):
        wanted = int(self.number_of("vram"))
        say(f"ggml_backend_cuda_buffer_type_alloc_buffer: allocating {wanted}.00 MiB on device 0: cudaMalloc failed: out of memory")
        say("main: error loading model")
        self.leave(1, "oom")

    def fork_helpers(self):
        for _ in range(int(self.number_of("workers"))):
            if os.fork() == 0:
                if self.knobs["setsid"] == "1":
                    os.setsid()
                self.tell("worker")
                while True:
                    signal.pause()

    def serve(self):
        """The main thread: times, accept, signals."""
        listen_at = BEGAN_AT + self.number_of("listen_after")
        ready_at = max(listen_at, BEGAN_AT + self.number_of("ready_after"))
        every = self.number_of("log_every")
        say_at = BEGAN_AT + every if every else None
        server = None
        while True:
            now = time.monotonic()
            if server is None and now >= listen_at:
                server = listen(self.knobs["host"], self.port)
                self.tell("listening")
            if not self.ready and now >= ready_at:
                self.become_ready()
                say_at = None
            if say_at is not None and now >= say_at:
                say(f"fe: loading, {now - BEGAN_AT:.1f} s")
                say_at = now + every
            coming = [at for at in (listen_at if server is None else None, None if self.ready else ready_at, say_at) if at is not None]
            timeout = max(0.0, min(coming) - time.monotonic()) if coming else None
            if server is None:
                time.sleep(timeout or 0)
            elif select.select([server], [], [], timeout)[0]:
                client, _ = server.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self.talk, args=(client,), daemon=True).start()

    def become_ready(self):
        self.ready = True
        self.tell("ready")
        say("fe: server is listening, model loaded")
        if self.knobs["on_term"] == "deaf":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    def on_term(self, number, _frame):
        self.tell("term", signal=number)
        how, _, seconds = self.knobs["on_term"].partition(":")
        if how in ("exit", "deaf"):
            self.leave(0, "term")
        if how == "slow":
            timer = threading.Timer(float(seconds), self.leave, (0, "term"))
            timer.daemon = True
            timer.start()

    # ---------------------------------------------------------------- one connection

    def talk(self, client):
        buffer = Buffer(client)
        try:
            while self.one(client, buffer):
                pass
        except (Gone, OSError):
            pass
        finally:
            client.close()

    def one(self, client, buffer):
        """One request; False when the connection is to be closed."""
        head = buffer.until(b"\r\n\r\n")
        if not head:
            return False
        first, *lines = head.split(b"\r\n")
        method, target, _ = first.decode("latin-1").split(" ", 2)
        headers = [tuple(part.strip() for part in line.decode("latin-1").split(":", 1)) for line in lines]
        self.steer()
        fields = {name.lower(): value for name, value in headers}
        path = target.partition("?")[0]
        if path == "/health" and method in ("GET", "HEAD"):
            return self.check(client)
        if "100-continue" in fields.get("expect", "").lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        framed = [name for name in ("content-length", "transfer-encoding") if name in fields]
        if "transfer-encoding" in fields:
            body = buffer.chunked()
        else:
            body = buffer.exactly(int(fields.get("content-length", "0")))
        inference = method == "POST" and path not in self.control
        with self.lock:
            self.requests += 1
            number = self.requests
            self.at_once += inference
            crowd = self.at_once
        digest = hashlib.sha256(body).hexdigest()
        self.tell("begin", number=number, method=method, target=target, headers=headers, sha256=digest, bytes=len(body), at_once=crowd)
        outcome = "gone"
        try:
            if "upgrade" in fields and self.knobs["ws"] == "1":
                outcome = self.websocket(client, buffer, fields)
                return False
            asked = SimpleNamespace(number=number, method=method, target=target, path=path, framed=framed, body=body, crowd=crowd)
            outcome = self.answer(client, asked)
            return outcome != "close"
        finally:
            with self.lock:
                self.at_once -= inference
                self.ended += inference
                ended = self.ended
            self.tell("end" if outcome != "gone" else "gone", number=number, outcome=outcome)
            kind, _, count = self.knobs["fail"].partition(":")
            if kind == "exit_after" and inference and ended >= int(count):
                self.leave(1, "told to after requests")

    def check(self, client):
        how, _, count = self.knobs["health"].partition(":")
        if how == "hang" or (how == "dead_after" and self.requests >= int(count)):
            wait(client, 3600)
        if how == "404":
            return self.reply(client, 404, {"error": "no such route"})
        if self.ready or how == "instant":
            return self.reply(client, 200, {"status": "ok"})
        return self.reply(client, 503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})

    def answer(self, client, asked):
        knobs, method, path, framed = self.knobs, asked.method, asked.path, asked.framed
        if knobs["needs"] == "content-length" and method == "POST" and "content-length" not in framed:
            return self.reply(client, 411, {"error": {"message": "send a Content-Length"}})
        if knobs["needs"] == "one-framing" and method == "POST" and len(framed) != 1:
            return self.reply(client, 400, {"error": {"message": f"{len(framed)} framing headers"}})
        if not self.ready and not (path == "/v1/models" and knobs["models_early"] == "1"):
            return self.reply(client, 503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        if path == "/v1/models":
            names = (knobs["models"] or knobs["model"]).split(",")
            return self.reply(client, 200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
        if path == "/is_sleeping":
            return self.reply(client, 200, {"is_sleeping": bool(self.asleep)})
        if path in ("/sleep", "/wake_up"):
            return self.doze(client, path)
        if method in ("GET", "HEAD"):
            return self.reply(client, 200, {"path": path}, head_only=method == "HEAD")
        if self.asleep:
            return self.reply(client, 500, {"error": {"message": "asleep"}})
        if self.number_of("parallel") and asked.crowd > self.number_of("parallel"):
            return self.reply(client, 500, {"error": {"message": f"{asked.crowd} requests at once"}})
        wanted, knobs = self.read(asked.body)
        return self.infer(client, path, wanted, knobs)

    def read(self, body):
        """What a JSON body wants, and the knobs for this request."""
        try:
            wanted = json.loads(body)
        except ValueError:
            wanted = {}
        wanted = wanted if isinstance(wanted, dict) else {}
        own = wanted["fe"] if isinstance(wanted.get("fe"), dict) else {}
        return wanted, {**self.knobs, **{key: str(value) for key, value in own.items()}}

    def doze(self, client, path):
        down = path == "/sleep"
        wait(client, self.number_of("sleep_s" if down else "wake_s"))
        if not down and self.knobs["wake_fail"] == "1":
            return self.reply(client, 500, {"error": {"message": "cannot wake"}})
        self.claim(int(self.number_of("residue" if down else "vram")))
        self.asleep = 1 if down else 0
        self.tell("sleep" if down else "wake")
        return self.reply(client, 200, {})

    def infer(self, client, path, wanted, knobs):
        kind, _, count = knobs["fail"].partition(":")
        if kind == "die_before_byte":
            self.leave(1, "told to before the first byte")
        if kind == "status":
            return self.reply(client, int(count), {"error": {"message": "told to"}})
        if kind == "hang":
            wait(client, 3600)
        if self.number_of("warm_s"):
            wait(client, self.number_of("warm_s"))
            self.knobs["warm_s"] = "0"
        if path.endswith(("/rerank", "/reranking")):
            return self.rerank(client, path, wanted)
        if wanted.get("stream") or kind == "hang_after_headers":
            return self.stream(client, wanted, knobs, kind, int(count or 0))
        wait(client, float(knobs["delay"]))
        if path.endswith("/embeddings"):
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
            return self.reply(client, 200, {"object": "list", "model": wanted.get("model"), "data": [vector]})
        message = {"role": "assistant", "content": "x" * int(knobs["body"]) or "good evening"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        whole = {"id": "fe", "object": "chat.completion", "model": wanted.get("model"), "choices": [choice], "usage": usage}
        return self.reply(client, 200, whole, cut_half=kind in ("die_mid", "abort_mid"), die=kind == "die_mid")

    def stream(self, client, wanted, knobs, kind, count):
        wait(client, float(knobs["prompt"]))
        send(client, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if kind == "hang_after_headers":
            wait(client, 3600)
        events, _, pause = knobs["stream"].partition("x")
        end = b"\r\n\r\n" if knobs["dialect"] == "crlf" else b"\n\n"
        for index in range(int(events)):
            wait(client, float(pause))
            if kind in ("die_mid", "abort_mid") and index == count:
                if kind == "die_mid":
                    self.leave(1, "told to mid-stream")
                return "close"
            text = "y" * (int(float(knobs["big"]) * 1024) if index == 1 else 0) or f"{index} "
            delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            part = {"id": "fe", "object": "chat.completion.chunk", "model": wanted.get("model"), "choices": [delta]}
            event = b"data: " + json.dumps(part | {"sent_at": time.monotonic()}).encode() + end
            ping = b": ping" + end if knobs["dialect"] == "ping" else b""
            send(client, framed_chunk(ping + event))
        send(client, framed_chunk(b"data: [DONE]" + end) + b"0\r\n\r\n")
        return "whole"

    def rerank(self, client, path, wanted):
        dialect = self.knobs["rerank"]
        if dialect == "n":
            return self.reply(client, 501, {"error": {"message": "This server does not support reranking", "type": "not_supported_error"}})
        if (dialect == "j" and path != "/v1/rerank") or (dialect == "t" and path != "/rerank"):
            return self.reply(client, 404, {"error": {"message": f"no such route: {path}"}})
        texts = wanted.get("documents" if dialect == "j" else "texts")
        if not isinstance(texts, list) or (dialect == "t" and not all(isinstance(text, str) for text in texts)):
            return self.reply(client, 422, {"error": {"message": "not the documents it wants"}})
        scored = [(index, (index * 7 % 11) / 11) for index in range(len(texts))]
        if dialect == "t":
            rows = sorted(scored, key=lambda row: -row[1])
            return self.reply(client, 200, [{"index": index, "score": score} for index, score in rows])
        scored = scored[: wanted.get("top_n") or len(scored)] if len(scored) <= (wanted.get("top_n") or 1 << 30) else scored
        return self.reply(client, 200, {"results": [{"index": index, "relevance_score": score} for index, score in scored]})

    def reply(self, client, status, value, head_only=False, cut_half=False, die=False, kind="application/json"):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} Told\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        if cut_half:
            send(client, head + body[: len(body) // 2])
            if die:
                self.leave(1, "told to in the middle of a body")
            return "close"
        send(client, head if head_only else head + body)
        return "whole"

    # ---------------------------------------------------------------- WebSocket echo

    def websocket(self, client, buffer, fields):
        import base64

        accept = base64.b64encode(hashlib.sha1(fields["sec-websocket-key"].encode() + WS_KEY).digest()).decode()
        offered = [name.strip() for name in fields.get("sec-websocket-protocol", "").split(",") if name.strip()]
        chosen = f"Sec-WebSocket-Protocol: {offered[0]}\r\n" if offered else ""
        send(
            client,
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n{chosen}\r\n".encode(),
        )
        while True:
            first, second = buffer.exactly(2)
            length = second & 127
            if length > 125:
                length = int.from_bytes(buffer.exactly(2 if length == 126 else 8), "big")
            mask = buffer.exactly(4)
            data = buffer.exactly(length)
            key = int.from_bytes((mask * (length // 4 + 1))[:length], "big")
            plain = (int.from_bytes(data, "big") ^ key).to_bytes(length, "big")
            opcode = first & 15
            self.tell("frame", opcode=opcode, bytes=length)
            send(client, frame(10 if opcode == 9 else opcode, plain))
            if opcode == 8:
                return "closed"


class Buffer:
    """What came from a client and was not yet read."""

    def __init__(self, client):
        self.client = client
        self.data = bytearray()

    def more(self):
        part = self.client.recv(1 << 18)
        if not part:
            raise Gone
        self.data += part

    def until(self, mark):
        try:
            while (at := self.data.find(mark)) < 0:
                if len(self.data) > HEAD_BYTES_MAX:
                    raise Gone
                self.more()
        except (Gone, OSError):
            return b""
        out = bytes(self.data[:at])
        del self.data[: at + len(mark)]
        return out

    def exactly(self, count):
        while len(self.data) < count:
            self.more()
        out = bytes(self.data[:count])
        del self.data[:count]
        return out

    def chunked(self):
        out = bytearray()
        while size := int(self.until(b"\r\n").split(b";")[0] or b"0", 16):
            out += self.exactly(size)
            self.exactly(2)
        while self.until(b"\r\n"):
            pass
        return bytes(out)


def listen(host, port):
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            say(f"fe: port {port} is taken: Address already in use")
        raise
    server.listen(256)
    return server


def wait(client, seconds):
    """Sleep, but notice a client that leaves; raises Gone."""
    until = time.monotonic() + seconds
    poller = select.poll()
    poller.register(client, select.POLLIN | select.POLLRDHUP)
    while (left_s := until - time.monotonic()) > 0:
        for _, what in poller.poll(left_s * 1000):
            if what & (select.POLLHUP | select.POLLERR | select.POLLRDHUP):
                raise Gone
            with contextlib.suppress(BlockingIOError):
                if not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise Gone
            poller.unregister(client)  # a pipelined request: it waits its turn
            poller.register(client, select.POLLRDHUP)


def send(client, data):
    try:
        client.sendall(data)
    except OSError:
        raise Gone from None


def framed_chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def frame(opcode, data):
    length = len(data)
    if length < 126:
        head = bytes([128 | opcode, length])
    elif length < 65536:
        head = bytes([128 | opcode, 126]) + length.to_bytes(2, "big")
    else:
        head = bytes([128 | opcode, 127]) + length.to_bytes(8, "big")
    return head + data


def born(pid):
    """Start time of a process in clock ticks; 0 when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def alive(pid, born_at):
    return born_at and born(pid) == born_at


def say(line):
    os.write(1, line.encode() + b"\n")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] != ["--port"]:
        sys.exit(__doc__)
    words = iter(arguments[2:])
    knobs = []
    for word in words:
        if word.startswith("--"):
            next(words, "")  # a flag of a real engine, put there by its dialect
        else:
            knobs.append(word)
    Fake(int(arguments[1]), knobs).run()


if __name__ == "__main__":
    main()
