"""What sleep is worth: real vLLM servers through greenroom, started, put to sleep and woken; two of them taking turns.

    python -m bench.sleep                         all of it, about a quarter of an hour on a quiet machine
    python -m bench.sleep --quick                 does it run? (one round; figures mean little)
    python -m bench.sleep --check                 exit 1 when a wake is not as much faster than a start as it must be
    python -m bench.sleep --json FILE             what was measured; --from FILE prints it again, without measuring
    python -m bench.sleep --picture docs/sleep.svg
    python -m bench.sleep --model DIR --model2 DIR [--small DIR]    on a real GPU, with the `vllm` on PATH

Without a GPU, vLLM's CPU build runs on a pretended one (tests/vllm_cpu; `make test-vllm` installs it).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm_cpu import rig

from greenroom.host.gpus import GpuInfo, Gpus
from greenroom.host.memory import available_mib

from . import sleep_report as report
from .harness import ask, cpu_s, free_port, process, workplace
from .sim.picture import write_bars

ROOT = Path(__file__).resolve().parent.parent
START_PORT = 6600
MIB = 1 << 20
CALL_S_MAX = 600.0
CHUNK = 64 * MIB
COPIES = 2  # of each kind in a round
PROMPT, TOKENS = "good evening, the actor waits in the green room", 8
WARMUP = {"path": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 1}}
STARTS_FROM_DISK = 2
PRETEND_KV_MIB = 128
SHARE = 0.85  # of a real GPU, for each model
TORCH_COPY = """
import sys, time, torch
host = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, pin_memory=True)
device = torch.empty_like(host, device="cuda")
for target, source in ((device, host), (host, device)):
    for _ in range(8):
        torch.cuda.synchronize(); began = time.perf_counter()
        target.copy_(source); torch.cuda.synchronize()
        print((len(host) >> 20) / (time.perf_counter() - began), end=" ")
    print()
"""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------- where models run


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, and how models are served on it."""

    device: str  # for people
    engine: str
    pretend: bool
    weights: Mapping[str, tuple[Path, ...]]  # model -> files
    entry: Callable[..., dict[str, Any]]  # (name, model, **config) -> a model of a greenroom.yaml
    devices: Mapping[str, Any]
    env: Mapping[str, str]
    vllm: Path

    def weights_mib(self, model: str) -> int:
        return sum(path.stat().st_size for path in self.weights[model]) // MIB


def files_of(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.safetensors"))) or tuple(sorted(folder.glob("*.bin")))


def version_of(vllm: Path) -> str:
    python = vllm.with_name("python")
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"vLLM {done.stdout.strip().split('+')[0]}".strip()


@contextlib.contextmanager
def pretend_bench(home: Path) -> Iterator[Bench]:
    models = {"one": "mid-1", "two": "mid-2", "small": "tiny-1"}
    need_mib = rig.weights_mib("mid-1") + PRETEND_KV_MIB
    # Room for one awake and one asleep; before its first sleep a model is taken to keep half of what it holds.
    with rig.PretendGpu(home, (need_mib + 100) * 3 // 2 + 50) as gpu:

        def entry(name: str, model: str, **config: Any) -> dict[str, Any]:
            kind, _, seed = models[model].rpartition("-")
            return gpu.model_entry(name, kind=kind, seed=int(seed), kv_mib=PRETEND_KV_MIB, **config)

        vllm = rig.environment() / "bin" / "vllm"
        weights = {model: files_of(rig.model_path(folder)) for model, folder in models.items()}
        yield Bench("a pretend GPU", version_of(vllm), True, weights, entry, {"gpu0": {"headroom": "0MiB"}}, gpu.env, vllm)


@contextlib.contextmanager
def real_bench(gpu: GpuInfo, vllm: Path, folders: Mapping[str, Path], flags: list[str]) -> Iterator[Bench]:
    def entry(name: str, model: str, **config: Any) -> dict[str, Any]:
        cmd = [
            *(str(vllm), "serve", str(folders[model]), "--host", "127.0.0.1", "--port", "${PORT}", "--served-model-name", name),
            *("--gpu-memory-utilization", str(SHARE), "--enable-sleep-mode", *flags),
        ]
        return {"cmd": cmd, "memory": f"{int(SHARE * gpu.total_mib)}MiB", **config}

    weights = {model: files_of(folder) for model, folder in folders.items()}
    yield Bench(gpu.name, version_of(vllm), False, weights, entry, {}, {"CUDA_VISIBLE_DEVICES": gpu.uuid}, vllm)


def choose(options: argparse.Namespace, home: Path) -> contextlib.AbstractContextManager[Bench]:
    """The first real GPU with a vLLM and models to serve; else the pretended one.  Says which, and why."""
    gpus = Gpus()
    found, vllm = gpus.discover(), shutil.which("vllm")
    gpus.close()
    if not found:
        say(f"no real GPU: {gpus.why_none}")
    elif not vllm:
        say(f"{found[0].name} is there, but no `vllm` is on PATH")
    elif not options.model or not options.model2:
        say(f"{found[0].name} and {vllm} are there; name two models that it can serve: --model DIR --model2 DIR")
    else:
        folders = {"one": options.model, "two": options.model2} | ({"small": options.small} if options.small else {})
        return real_bench(found[0], Path(vllm).absolute(), folders, shlex.split(options.flags))
    if reason := rig.missing():
        raise SystemExit(f"nothing to measure: {reason}")
    return pretend_bench(home)


# --------------------------------------------------------------------------------------------------------- a greenroom in front


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float
    whole_s: float
    status: int
    words: tuple[Any, ...]  # token ids, where the engine tells them


@dataclass(slots=True)
class Greenroom:
    """A running greenroom as its clients and its operator see it, and what its journal says."""

    port: int
    journal: Path
    _read: int = 0

    def operate(self, model: str, operation: str, level: int = 0) -> float:
        """Seconds until the operation is done."""
        query = f"wait={CALL_S_MAX:g}" + (f"&level={level}" if level else "")
        began = time.perf_counter()
        status, body = ask(self.port, f"/api/models/{model}/{operation}?{query}", None, timeout_s=CALL_S_MAX + 10)
        took_s = time.perf_counter() - began
        if status != 200:
            raise SystemExit(f"{operation} {model}: {status} {body[:1000].decode(errors='replace')}")
        return took_s

    def view(self, model: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/models/{model}", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def pids(self, model: str) -> list[int]:
        return [pid for one in self.view(model)["instances"] if one["pid"] for pid in rig.tree(one["pid"])]

    def moves(self) -> list[dict[str, Any]]:
        """What the journal got since the last time."""
        lines = self.journal.read_text(encoding="utf-8").splitlines()
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]

    def answer(self, model: str) -> Answer:
        """A streamed greedy answer."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S_MAX)
        with contextlib.closing(connection):
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            first_s, words, is_whole = 0.0, [], False
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue  # a comment: it still loads
                if data == b"[DONE]":
                    is_whole = True
                    break
                choices = json.loads(data).get("choices") or [{}]
                told = choices[0].get("token_ids") or [choices[0].get("text", "")]
                first_s = first_s or time.perf_counter() - began
                words += told
            return Answer(first_s, time.perf_counter() - began, response.status if is_whole else 0, tuple(words))


@contextlib.contextmanager
def greenroom(bench: Bench, home: Path, models: Mapping[str, Any]) -> Iterator[Greenroom]:
    home.mkdir()
    path, journal, port = home / "greenroom.yaml", home / "journal", free_port()
    limits = {"healthCheckTimeout": int(CALL_S_MAX), "scheduling": {"early_sleep_s": "off"}}
    text = json.dumps({"startPort": START_PORT, **limits, "devices": bench.devices, "models": models})
    path.write_text(text, encoding="utf-8")
    journal.touch()
    command = ["env", *(f"{key}={value}" for key, value in bench.env.items()), sys.executable, "-m", "bench.timed", str(journal)]
    options = ["serve", "-c", str(path), "--listen", f"127.0.0.1:{port}", "--state-dir", str(home / "state")]
    with process([*command, *options], port, home, name="greenroom", cwd=ROOT):
        yield Greenroom(port, journal)


def tree_cpu_s(pids: Iterable[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += cpu_s(pid)
    return total


# -------------------------------------------------------------------------------------------------------------- what was found


@dataclass
class Notes:
    moves: dict[str, dict[str, dict[str, list[float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    )
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    memory: list[list[Any]] = field(default_factory=list)
    copies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # MiB/s
    cycle: dict[str, Any] = field(default_factory=dict)
    known: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # model -> its first answer
    asked: int = 0
    ok: int = 0
    alike: int = 0

    def note(self, model: str, move: str, **figures: float) -> None:
        for what, value in figures.items():
            self.moves[model][move][what].append(value)

    def check(self, model: str, answer: Answer) -> Answer:
        self.asked += 1
        self.ok += answer.status == 200
        self.alike += answer.words == self.known.setdefault(model, answer.words)
        return answer

    def value(self, machine: dict[str, Any]) -> dict[str, Any]:
        answers = {"asked": self.asked, "ok": self.ok, "alike": self.alike}
        found = {"machine": machine, "moves": self.moves, "parts": self.parts, "memory": self.memory}
        told: dict[str, Any] = json.loads(json.dumps({**found, "copies": self.copies, "cycle": self.cycle, "answers": answers}))
        return told


# ----------------------------------------------------------------------------------------------------------- starts and wakes


@dataclass
class Moves:
    """One model's starts, sleeps and wakes."""

    room: Greenroom
    notes: Notes
    name: str
    model: str
    files: tuple[Path, ...]
    free_mib: int  # of the machine, before the first start
    keeps_memory: bool = False

    def start(self, move: str = "start") -> None:
        ready_s = self.room.operate(self.name, "load")
        self._first(move, ready_s, tree_cpu_s(self.room.pids(self.name)))

    def stop(self) -> None:
        self.notes.note(self.name, "stop", ready=self.room.operate(self.name, "unload"))
        self.room.moves()

    def cycle(self, level: int, *, from_disk: bool = False) -> None:
        """Asleep and awake again."""
        self.room.moves()
        asleep_s = self.room.operate(self.name, "sleep", level)
        self.notes.note(self.name, f"sleep {level}", ready=asleep_s)
        self._parts(f"sleep {level}", asleep_s)
        self.remember(f"asleep at level {level}")
        move = f"wake {level}"
        if from_disk:
            if not drop_from_cache(self.files):
                say("the page cache keeps the weights: no wake from the disk")
            else:
                move += ", disk"
        pids = self.room.pids(self.name)
        before_s = tree_cpu_s(pids)
        ready_s = self.room.operate(self.name, "wake")
        used_s = tree_cpu_s(pids) - before_s
        self._parts(move, ready_s)
        self.remember(f"awake again after level {level}")
        self._first(move, ready_s, used_s)

    def _first(self, move: str, ready_s: float, used_s: float) -> None:
        answer = self.notes.check(self.model, self.room.answer(self.name))
        figures = {"first": answer.first_s, "answer": answer.whole_s, "asked": ready_s + answer.first_s}
        self.notes.note(self.name, move, ready=ready_s, cpu=used_s, **figures)
        hot = self.notes.check(self.model, self.room.answer(self.name))
        self.notes.note(self.name, "hot", first=hot.first_s, answer=hot.whole_s)

    def _parts(self, move: str, seen_s: float) -> None:
        """The last move of that kind in the journal; of the plain model only."""
        told = [line for line in self.room.moves() if line["model"] == self.name and line["move"] == move.split()[0]]
        if told and self.keeps_memory and "disk" not in move:
            line = told[-1]
            self.notes.parts[move].append({"s": line["s"], "around_s": seen_s - line["s"], "parts": line["parts"]})

    def remember(self, state: str) -> None:
        """Once for each state."""
        if not self.keeps_memory or state in [row[0] for row in self.notes.memory]:
            return
        view, pids = self.room.view(self.name), self.room.pids(self.name)
        one = view["instances"][0] if view["instances"] else {}
        device = sum(one.get("measured_by_device_mib", {}).values())
        host = one.get("host_mib") or 0
        figures = [device, rig.rss_mib(pids), rig.memfd_mib(pids), host, self.free_mib - available_mib()]
        self.notes.memory.append([state, *figures])


def measure_moves(bench: Bench, home: Path, notes: Notes, *, rounds: int, wakes: int, quick: bool) -> None:
    models = {"plain": bench.entry("plain", "one", sleep="auto"), "warmed": bench.entry("warmed", "one", sleep="auto", warmup=WARMUP)}
    if "small" in bench.weights:
        models["small"] = bench.entry("small", "small", sleep="auto")
    with greenroom(bench, home, models) as room:
        free_mib = available_mib()
        plain = Moves(room, notes, "plain", "one", bench.weights["one"], free_mib, keeps_memory=True)
        plain.remember("stopped")
        say("a start that is not counted: the page cache is warm from here on")
        room.operate("plain", "load")
        plain.remember("started")
        notes.check("one", room.answer("plain"))
        plain.remember("after its first answer")
        room.operate("plain", "unload")
        others = [("small", "small"), ("warmed", "one")] if "small" in models else [("warmed", "one")]
        each = [plain, *(Moves(room, notes, name, model, bench.weights[model], free_mib) for name, model in others)]
        for number in range(rounds):
            say(f"plain copies, round {number + 1} of {rounds}")
            measure_copies(bench, notes.copies)
            for one in each:  # in turn, so that what else the machine does meets all alike
                say(f"{one.name}, round {number + 1} of {rounds}")
                one.start()
                for level in (1, 2):
                    for _ in range(wakes):
                        one.cycle(level)
                if one is plain:
                    one.cycle(2, from_disk=True)
                one.stop()
        for _ in range(1 if quick else STARTS_FROM_DISK):
            if drop_from_cache(plain.files):
                say("a start with the weights out of the page cache")
                plain.start("start, disk")
                plain.stop()


# ----------------------------------------------------------------------------------------------------------- two take turns

SERVED_EACH = 3  # requests of a model before the other's turn


def measure_turns(bench: Bench, home: Path, notes: Notes, way: str, switches: int) -> None:
    """Both are started once, then take turns: each switch is asked for by a request."""
    sleep: Any = "off" if way == "off" else int(way)
    models = {name: bench.entry(name, name, sleep=sleep) for name in ("one", "two")}
    told: dict[str, Any] = {"starts": [], "switches": [], "first": [], "leave": [], "come": [], "served": 0}
    leave, come = ("stop", "start") if way == "off" else ("sleep", "wake")
    with greenroom(bench, home, models) as room:
        for number in range(2 + switches):
            name = ("one", "two")[number % 2]
            room.moves()
            began = time.perf_counter()
            answers = [notes.check(name, room.answer(name)) for _ in range(SERVED_EACH)]
            took_s = time.perf_counter() - began
            told["served"] += sum(answer.status == 200 for answer in answers)
            if number < 2:
                told["starts"].append(took_s)
                continue
            say(f"{report.WAYS[way]}: switch {number - 1} of {switches}, first token after {answers[0].first_s:.1f} s")
            told["switches"].append(took_s)
            told["first"].append(answers[0].first_s)
            moves = {line["move"]: line["s"] for line in room.moves()}
            told["leave"].append(moves.get(leave, 0.0))
            told["come"].append(moves.get(come, 0.0))
    notes.cycle[way] = told


# ------------------------------------------------------------------------------------------------------------- plain copies


def drop_from_cache(files: Iterable[Path]) -> bool:
    """Whether the page cache has let go of these files."""
    dropped = [_drop(path) for path in files]
    return all(dropped)


def _drop(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file).st_size
        cached = 0
        for place in range(0, size, max(1, size // 16)):
            try:
                cached += os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT)
            except BlockingIOError:
                pass  # only the disk has it
        return cached == 0
    except OSError:
        return False
    finally:
        os.close(file)


def read_rate(file: int, size: int) -> float:
    """MiB/s from a file (of a disk, or of memory only) to fresh memory of this process."""
    with contextlib.closing(mmap.mmap(-1, size)) as target, memoryview(target) as view:
        began = time.perf_counter()
        done = 0
        while done < size and (count := os.preadv(file, [view[done : done + CHUNK]], done)):
            done += count
        return done / MIB / (time.perf_counter() - began)


def write_rate(size: int) -> float:
    """MiB/s from memory of this process to fresh memory outside it."""
    with contextlib.closing(mmap.mmap(-1, size)) as source, memoryview(source) as view:
        ctypes.memset((ctypes.c_char * size).from_buffer(source), 1, size)
        file = os.memfd_create("bench")
        try:
            began = time.perf_counter()
            done = 0
            while done < size:
                done += os.write(file, view[done : done + CHUNK])
            return size / MIB / (time.perf_counter() - began)
        finally:
            os.close(file)


def measure_copies(bench: Bench, copies: dict[str, list[float]]) -> None:
    """MiB/s of plain copies of as much as the weights, by way."""
    path = max(bench.weights["one"], key=lambda each: each.stat().st_size)
    size = path.stat().st_size
    file, memory = os.open(path, os.O_RDONLY), os.memfd_create("bench")
    try:
        os.ftruncate(memory, size)
        with contextlib.closing(mmap.mmap(memory, size)) as filled:
            ctypes.memset((ctypes.c_char * size).from_buffer(filled), 1, size)
        for _ in range(COPIES):
            if _drop(path):
                copies["disk to device"].append(read_rate(file, size))
            else:
                read_rate(file, size)
            copies["page cache to device"].append(read_rate(file, size))
            if bench.pretend:
                copies["host RAM to device"].append(read_rate(memory, size))
                copies["device to host RAM"].append(write_rate(size))
    finally:
        os.close(file)
        os.close(memory)
    if not bench.pretend:
        command = [bench.vllm.with_name("python"), "-c", TORCH_COPY, str(max(64, size // MIB // 4))]
        done = subprocess.run(command, env={**os.environ, **bench.env}, capture_output=True, text=True, check=False)
        for way, line in zip(("host RAM to device", "device to host RAM"), done.stdout.splitlines(), strict=False):
            copies[way] += map(float, line.split()[1:])  # the first one also sets things up


# ------------------------------------------------------------------------------------------------------------------- the run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    notes, load = Notes(), os.getloadavg()[0]
    quick = options.quick
    rounds, wakes, switches = (1, 2, 2) if quick else (options.rounds, 2, 5)
    with workplace(options.keep) as home, choose(options, home) as bench:
        measure_moves(bench, home / "moves", notes, rounds=rounds, wakes=wakes, quick=quick)
        for way in report.WAYS:
            measure_turns(bench, home / f"turns-{way}", notes, way, switches)
        machine = {
            "cpus": len(os.sched_getaffinity(0)),
            "load": [load, os.getloadavg()[0]],
            "engine": bench.engine,
            "device": bench.device,
            "pretend": bench.pretend,
            "weights_mib": bench.weights_mib("one"),
            "quick": quick,
        }
    return notes.value(machine)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, two switches: does it run?")
    parser.add_argument("--check", action="store_true", help="exit 1 when something that must hold does not")
    parser.add_argument("--rounds", type=int, default=5, help="starts; each is followed by two wakes from each level (default 5)")
    parser.add_argument("--picture", type=Path, help="where the SVG goes (default: none)")
    parser.add_argument("--json", type=Path, help="where what was measured goes")
    parser.add_argument("--from", dest="old", type=Path, help="print what --json has kept, and measure nothing")
    parser.add_argument("--keep", default="", help="a folder for logs that stays")
    parser.add_argument("--model", type=Path, help="folder of a model for a real GPU")
    parser.add_argument("--model2", type=Path, help="another one, which takes turns with it")
    parser.add_argument("--small", type=Path, help="a model with next to no weights: tells what a move takes without them")
    parser.add_argument("--flags", default="", help="more flags for vLLM on a real GPU, in one word")
    options = parser.parse_args()
    found = json.loads(options.old.read_text(encoding="utf-8")) if options.old else measure(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report.print_report(found)
    if options.picture:
        write_bars(options.picture, report.title_of(found), report.bars_of(found))
    promises = report.promises_of(found)
    print("\nwhat must hold")
    for promise in promises:
        print(promise)
    return 1 if options.check and not all(promise.kept for promise in promises) else 0


if __name__ == "__main__":
    sys.exit(main())
