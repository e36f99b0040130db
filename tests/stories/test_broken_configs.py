"""Broken configuration files through the real command line: told in lines with file and line, exit 2, nothing started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CMD = 'cmd: "fe --port ${PORT}"'

# What is broken -> the file, and the line that is to be named.
BROKEN: dict[str, tuple[str | bytes, int]] = {
    "empty file": ("", 1),
    "only a comment": ("# nothing here\n", 1),
    "YAML that is not a mapping": ("- a\n- b\n", 1),
    "YAML that cannot be parsed": ('models:\n  a: {cmd: "x ${PORT}"\n', 3),
    "tab as indentation": ("models:\n\ta: 1\n", 2),
    "bytes that are not UTF-8": (b"models:\n  a: \xff\xfe\n", 2),
    "no models": ("logLevel: info\n", 1),
    "models is a list": ("models: [a, b]\n", 1),
    "wrong type": (f"models:\n  a:\n    {CMD}\n    parallel: many\n", 4),
    "unknown key": (f"models:\n  a:\n    {CMD}\n    memroy: 1GiB\n", 4),
    "unknown key at the top": (f"modles: {{}}\nmodels:\n  a: {{{CMD}}}\n", 1),
    "duplicate id": (f"models:\n  a: {{{CMD}}}\n  b: {{{CMD}}}\n  a: {{{CMD}}}\n", 4),
    "duplicate alias": (f"models:\n  a: {{{CMD}, aliases: [x]}}\n  b: {{{CMD}, aliases: [x]}}\n", 3),
    "alias that is another model": (f"models:\n  a: {{{CMD}, aliases: [b]}}\n  b: {{{CMD}}}\n", 2),
    "missing cmd": ("models:\n  a: {ttl: 5}\n", 2),
    "empty cmd": ("models:\n  a:\n    cmd: ''\n", 3),
    "unbalanced quote in cmd": ("models:\n  a:\n    cmd: |\n      fe --port ${PORT}\n      --name 'open\n", 5),
    "cmd without a port": ("models:\n  a: {cmd: fe}\n", 2),
    "group of an unknown model": (f"groups:\n  g:\n    members: [a, qwen4]\nmodels: {{a: {{{CMD}}}}}\n", 3),
    "model in two groups": (f"groups:\n  g: {{members: [a]}}\n  h: {{members: [a]}}\nmodels: {{a: {{{CMD}}}}}\n", 3),
    "macro cycle": (f"macros:\n  one: '${{two}}'\n  two: '${{one}}'\nmodels:\n  a: {{{CMD}}}\n", 2),
    "unknown macro": (f"models:\n  a: {{{CMD}, name: '${{nobody}}'}}\n", 2),
    "port clash": (
        "models:\n  a: {cmd: x, proxy: 'http://127.0.0.1:9000'}\n  b: {cmd: y, proxy: 'http://127.0.0.1:9000'}\n",
        3,
    ),
    "size without unit": (f"models:\n  a:\n    {CMD}\n    memory: 80\n", 4),
    "not a duration": (f"models:\n  a:\n    {CMD}\n    ttl: 5mins\n", 4),
    "preload of an unknown model": (f"hooks: {{on_startup: {{preload: [b]}}}}\nmodels: {{a: {{{CMD}}}}}\n", 1),
    "unknown device": (f"models:\n  a: {{{CMD}, device: gpu9x}}\ndevices: {{bench0: {{probe: none, memory: 1GiB}}}}\n", 2),
    "unknown limit": (f"limits: {{json_mb: 5}}\nmodels: {{a: {{{CMD}}}}}\n", 1),
    "unknown scheduling constant": (f"scheduling: {{patience: 5}}\nmodels: {{a: {{{CMD}}}}}\n", 1),
    "an environment variable that is not set": (f"models:\n  a:\n    {CMD}\n    env: ['X=${{env.GREENROOM_NOT_SET}}']\n", 4),
    "unsupported key of another program": (f"profiles: {{x: [a]}}\nmodels: {{a: {{{CMD}}}}}\n", 1),
}


# The command line, imported once and forked for each line of its input: a cold start of Python each would be most of the time.
WARM = """
import json, os, sys, traceback
import greenroom.cli.check, greenroom.cli.serve_cmd, greenroom.config.load, greenroom.serve.server
from greenroom.cli import main
for line in sys.stdin:
    words, out, err = json.loads(line)
    pid = os.fork()
    if not pid:
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.argv = ["greenroom", *words]
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = 70
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(home), "NO_COLOR": "1"}


def greenroom(*words: str, home: Path) -> Done:
    """The installed command, from nothing."""
    command = [str(Path(sys.executable).with_name("greenroom")), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(home), check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def all_of(commands: Sequence[Sequence[str]], home: Path) -> list[Done]:
    """The answers to many commands, each in a process of its own."""
    names = [(home / f"{index}.out", home / f"{index}.err") for index in range(len(commands))]
    lines = [json.dumps([list(words), str(out), str(err)]) for words, (out, err) in zip(commands, names, strict=True)]
    warm = [sys.executable, "-c", WARM]
    done = subprocess.run(
        warm, input="\n".join(lines), capture_output=True, text=True, timeout=90, env=environment(home), cwd=home, check=True
    )
    codes = [int(line) for line in done.stdout.split()]
    return [Done(code, out.read_text(), err.read_text()) for code, (out, err) in zip(codes, names, strict=True)]


def written(folder: Path) -> dict[str, tuple[Path, int]]:
    """name -> the broken file and the line to be named; a missing file and a folder stand for files nobody can read."""
    found = {"file that does not exist": (folder / "gone.yaml", 1), "folder instead of a file": (folder, 1)}
    for index, (name, (text, line)) in enumerate(BROKEN.items()):
        path = folder / f"c{index:02}.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        found[name] = (path, line)
    return found


def faults_of(done: Done, path: Path, line: int) -> list[str]:
    """What is wrong with the answer to one broken file; [] when it is as it should be."""
    said = done.stderr.splitlines()
    faults = []
    if done.returncode != 2:
        faults.append(f"exit {done.returncode}")
    if done.stdout:
        faults.append(f"stdout {done.stdout!r}")
    if len(said) != 1:
        faults.append(f"{len(said)} lines: {said}")
    if not said or not re.match(rf"{re.escape(str(path))}:{line}: \S.*", said[0]):
        faults.append(f"not {path.name}:{line}: {said}")
    if "Traceback" in done.stderr:
        faults.append("traceback")
    return faults


def test_check_tells_every_broken_file_in_one_line(tmp_path: Path) -> None:
    """`greenroom check`: one line with file and line on standard error, exit 2, no traceback; more than 20 kinds of breakage."""
    files = written(tmp_path)
    assert len(files) >= 30
    answers = dict(zip(files, all_of([("check", str(path)) for path, _ in files.values()], tmp_path), strict=True))
    assert {name: faults for name, done in answers.items() if (faults := faults_of(done, *files[name]))} == {}


def test_serve_refuses_every_broken_file_in_the_same_words(tmp_path: Path) -> None:
    """`greenroom serve` ends with 2 before anything is started or written, and says what `check` says."""
    files = written(tmp_path)
    state = tmp_path / "state"
    rest = ("--listen", "127.0.0.1:0", "--state-dir", str(state))
    answers = dict(zip(files, all_of([("serve", "-c", str(path), *rest) for path, _ in files.values()], tmp_path), strict=True))
    assert {name: faults for name, done in answers.items() if (faults := faults_of(done, *files[name]))} == {}
    sample = files["unknown key"][0]
    assert greenroom("serve", "-c", str(sample), *rest, home=tmp_path) == answers["unknown key"]
    assert greenroom("check", str(sample), home=tmp_path) == answers["unknown key"]
    assert not state.exists()


def test_one_file_with_several_faults_tells_them_all(tmp_path: Path) -> None:
    """A mistake does not hide the next one: one line each, in the order of the file."""
    path = tmp_path / "many.yaml"
    path.write_text(f"models:\n  a:\n    {CMD}\n    ttl: 5mins\n    memory: 80\n  b: {{}}\n")
    done = greenroom("check", str(path), home=tmp_path)
    assert done.returncode == 2
    assert [line.removeprefix(f"{tmp_path}/").split(": ")[:2] for line in done.stderr.splitlines()] == [
        ["many.yaml:4", "models.a.ttl"],
        ["many.yaml:5", "models.a.memory"],
        ["many.yaml:6", "models.b"],
    ]
