"""A small engine that misbehaves as told.  Standard library only, starts in about 15 ms.

    host_engine.py PORT [key=value ...]

host=127.0.0.1   where it listens; `::1` for IPv6
listen_after=0   seconds before it listens
ready_after=0    seconds before its check answers 200 (503 until then)
check=/health    the path of its check; any other answers 404
models=0         1: /v1/models answers 200 once it is ready
on_term=exit     exit | ignore | slow:SECONDS
exit_after=-     SECONDS:CODE: it ends by itself
post_s=0         how long a POST takes
say=-            a line it prints when it listens
"""

import os
import select
import signal
import socket
import sys
import time

DEFAULTS = {
    "host": "127.0.0.1",
    "listen_after": "0",
    "ready_after": "0",
    "check": "/health",
    "models": "0",
    "on_term": "exit",
    "exit_after": "",
    "post_s": "0",
    "say": "",
}


def main() -> None:
    port = int(sys.argv[1])
    knobs = {**DEFAULTS, **dict(item.split("=", 1) for item in sys.argv[2:])}
    began_at = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: on_term(knobs["on_term"]))
    exit_at, _, code = knobs["exit_after"].partition(":")
    say(f"started {os.getpid()}")
    wait_until(began_at + float(knobs["listen_after"]), exit_at, code, began_at)
    family = socket.AF_INET6 if ":" in knobs["host"] else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((knobs["host"], port))
    server.listen(64)
    say(f"listening {time.monotonic()}")
    if knobs["say"]:
        say(knobs["say"])
    while True:
        leave_in = began_at + float(exit_at) - time.monotonic() if exit_at else None
        if leave_in is not None and leave_in <= 0:
            sys.exit(int(code))
        if select.select([server], [], [], leave_in)[0]:
            client, _ = server.accept()
            try:
                answer(client, knobs, time.monotonic() - began_at >= float(knobs["ready_after"]))
            except OSError:
                pass
            client.close()


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")  # not print: the signal handler may come in between


def wait_until(moment: float, exit_at: str, code: str, began_at: float) -> None:
    while (left_s := moment - time.monotonic()) > 0:
        if exit_at and time.monotonic() - began_at >= float(exit_at):
            sys.exit(int(code))
        time.sleep(min(left_s, 0.01))


def answer(client: socket.socket, knobs: dict[str, str], ready: bool) -> None:
    head = client.recv(65536).decode("latin-1")
    if not head:
        return
    method, path = head.split(" ", 2)[:2]
    status = 404
    if method == "POST":
        say(f"post {path}")
        time.sleep(float(knobs["post_s"]))
        status = 200
    elif path == knobs["check"] or (path == "/v1/models" and knobs["models"] == "1"):
        status = 200 if ready else 503
    client.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok" % status)


def on_term(how: str) -> None:
    say("got TERM")
    if how == "exit":
        os._exit(0)
    if how.startswith("slow:"):
        time.sleep(float(how.split(":")[1]))
        say("cleaned up")
        os._exit(0)


main()
