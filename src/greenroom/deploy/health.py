"""How a container is asked whether it is well: one GET that wakes nobody, by a program its image holds."""

from __future__ import annotations

import shlex

from greenroom.deploy.intent import Workload

TIMEOUT_S = 5
RETRIES = 6  # a busy engine may answer late, and ending it costs everybody a load
HAVE_CURL = frozenset({"llama_server", "sglang", "vllm"})  # their own images; others may have it or not


def command(workload: Workload) -> tuple[str, ...]:
    """Fails unless the path of its `ready` answers 2xx; without a path any answer will do.

    In an image that may lack curl, what there is asks: wget, or bash by itself.  A container in which nobody can ask is
    taken for well: to end it again and again would help nobody.
    """
    probe = workload.ready
    assert probe is not None
    url = f"http://127.0.0.1:{probe.port}{probe.path or '/'}"
    fail = ("--fail",) if probe.path else ()
    curl = ("curl", "--silent", "--show-error", "--globoff", *fail, "--output", "/dev/null", "--max-time", str(TIMEOUT_S))
    if workload.kind in HAVE_CURL:
        return (*curl, url)
    request = f"GET {probe.path or '/'} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"
    printed = request.replace("\\", "\\\\").replace("%", "%%").replace("\r\n", "\\r\\n")
    talk = (
        f"exec 3<>/dev/tcp/127.0.0.1/{probe.port}; printf {shlex.quote(printed)} >&3; "
        f"read -r _ code _ <&3; [[ $code == {'2??' if probe.path else '???'} ]]"
    )
    tries = [
        ("curl", f'{shlex.join(curl)} "$0"'),
        # Of an error page wget tells nothing that would be the same everywhere.
        *([("wget", f'wget -q -T {TIMEOUT_S} -O /dev/null "$0"')] if probe.path else []),
        ("bash", f"timeout {TIMEOUT_S} bash -c {shlex.quote(talk)}"),
    ]
    script = "; ".join(f"if command -v {program} >/dev/null; then exec {line}; fi" for program, line in tries)
    return ("/bin/sh", "-c", script, url)
