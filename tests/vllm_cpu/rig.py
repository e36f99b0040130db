"""True vLLM servers on a pretend GPU.

    with PretendGpu(tmp_path, total_mib=3000) as gpu:
        entry = gpu.model_entry("a", seed=1, kv_mib=512)      # a model of a greenroom.yaml
        with Server(gpu, entry) as server:                    # or without greenroom
            server.post("/sleep?level=1")

vLLM's CPU build runs with the plugin in plugin/, which makes sleeping free memory and keeps a ledger of who holds how
much of the device.  PretendGpu shows that ledger as a GPU through the stand-in NVML library: start greenroom with `gpu.env`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from greenroom.host.ports import free_port
from tests.fakes import nvml
from tests.fakes.vllm_server import Caller

from .plugin.pretend_gpu.ledger import Ledger

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MIB = 1 << 20
TICK_S = 0.005  # between two looks at the ledger
UP_S_MAX = 240.0  # of a server; a loaded machine needs a minute
DOWN_S_MAX = 60.0
CALL_S_MAX = 120.0
READY = "Application startup complete"


# ------------------------------------------------------------------------------------------------------ what is installed


def environment() -> Path:
    """The virtual environment with vLLM's CPU build (scripts/setup-vllm makes it); models and vLLM's cache lie in it."""
    return Path(os.environ.get("GREENROOM_VLLM") or ROOT / ".cache" / "vllm-env").absolute()


def missing() -> str:
    """Why no vLLM can be started, or ""."""
    return "" if (environment() / "bin" / "vllm").exists() else f"no vLLM in {environment()}: make test-vllm installs it"


@functools.cache
def model_path(name: str) -> Path:
    """The folder of a model of models.py, which is made if need be."""
    maker = [environment() / "bin" / "python", HERE / "models.py", environment() / "models", name]
    subprocess.run(maker, check=True, capture_output=True)
    return environment() / "models" / name


def weights_mib(name: str) -> int:
    return math.ceil(sum(path.stat().st_size for path in model_path(name).glob("*.safetensors")) / MIB)


# -------------------------------------------------------------------------------------------------------- the pretend GPU


class PretendGpu(threading.Thread):
    """A GPU that vLLM's CPU servers share, as they book it and as NVML shows it."""

    def __init__(self, home: Path, total_mib: int, *, context_mib: int = 100, uuid: str = "GPU-pretend") -> None:
        super().__init__(daemon=True)
        self.total_mib, self.context_mib, self.uuid = total_mib, context_mib, uuid
        folder = home / "pretend-gpu"
        folder.mkdir(parents=True)
        self.ledger = Ledger(folder, total_mib * MIB)
        self._library = home / "nvml"
        self._library.mkdir()
        nvml.build(self._library)
        self._machine = home / "machine"
        self._shown = ""
        self._showing = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.show()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self.join(10)

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.show()

    def show(self) -> None:
        """Write down for NVML what the ledger says now."""
        with self._showing:
            lines = [f"gpu 0 {self.uuid} {self.ledger.total} {self.ledger.outside} -1 Pretend GPU"]
            lines += [f"proc 0 -1 {pid} {held}" for pid, held in sorted(self.ledger.held().items())]
            if (text := "\n".join(lines) + "\n") != self._shown:
                new = self._machine.with_suffix(".new")
                new.write_text(text)
                new.rename(self._machine)
                self._shown = text

    @property
    def env(self) -> dict[str, str]:
        """For greenroom: where it finds this GPU."""
        return {"LD_LIBRARY_PATH": str(self._library), "FAKE_NVML": str(self._machine)}

    @property
    def engine_env(self) -> dict[str, str]:
        """For vLLM: the plugin, this GPU, and what keeps it offline, quiet and off other servers' cores."""
        return {
            "PYTHONPATH": str(HERE / "plugin"),
            "PRETEND_GPU_LEDGER": str(self.ledger.folder),
            "PRETEND_GPU_BYTES": str(self.ledger.total),
            "PRETEND_GPU_CONTEXT_BYTES": str(self.context_mib * MIB),
            "PRETEND_GPU_FORK": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CACHE_ROOT": str(environment() / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def held_mib(self, pids: Iterable[int] | None = None) -> int:
        """What these processes hold on the device; None: all."""
        held = self.ledger.held()
        return sum(held.values() if pids is None else (held.get(pid, 0) for pid in pids)) // MIB

    @contextlib.contextmanager
    def taken_outside(self, mib: int) -> Iterator[None]:
        """Another program holds so much for a while."""
        self.ledger.set_outside(mib * MIB)
        try:
            yield
        finally:
            self.ledger.set_outside(0)

    def need_mib(self, model: str, kv_mib: int) -> int:
        """What a server of this model holds when it is awake, at most."""
        return self.context_mib + weights_mib(model) + kv_mib

    def model_entry(
        self,
        name: str,
        *,
        kind: str = "mid",
        seed: int = 1,
        kv_mib: int = 512,
        port: str | int = "${PORT}",
        share: float | None = None,
        flags: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        **config: Any,
    ) -> dict[str, Any]:
        """A model of a greenroom.yaml, as an operator would write it: `kind` is tiny, mid or rerank of models.py.

        `share` is `--gpu-memory-utilization`; without it what weights and KV take.  `config` are further keys, such as `sleep`.
        """
        model = f"{kind}-{seed}"
        need_mib = self.need_mib(model, kv_mib)
        if share is None:
            share = max(1, math.floor((need_mib - self.context_mib) / self.total_mib * 10_000)) / 10_000
        cmd = [
            *(str(environment() / "bin" / "vllm"), "serve", str(model_path(model))),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", name),
            *("--kv-cache-memory-bytes", str(kv_mib * MIB), "--gpu-memory-utilization", str(share)),
            *("--max-model-len", "128" if kind == "rerank" else "512", "--enforce-eager", "--enable-sleep-mode"),
            *flags,
        ]
        return {"cmd": cmd, "env": {**self.engine_env, **(env or {})}, "memory": f"{need_mib}MiB", **config}


# ------------------------------------------------------------------------------------------- a server without greenroom


class Server(Caller):
    """One vLLM server, started from a model entry and ready inside `with`."""

    call_s_max = CALL_S_MAX

    def __init__(self, gpu: PretendGpu, entry: Mapping[str, Any]) -> None:
        self.gpu = gpu
        self.lines: list[str] = []  # what it printed
        self.port = free_port(None, ())
        cmd = [word.replace("${PORT}", str(self.port)) for word in entry["cmd"]]
        self.name = cmd[cmd.index("--served-model-name") + 1]
        self._began_at = time.monotonic()
        self.took_s = 0.0  # the cold start
        self._told = threading.Event()  # that it is up; or it has ended
        self._ended = threading.Event()
        self._process = subprocess.Popen(
            cmd,
            env={**os.environ, **entry["env"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        self._told.wait(UP_S_MAX)
        # It listens a moment after it has said so.
        while not (is_ready := self._is_listening()) and time.monotonic() < self._began_at + UP_S_MAX:
            if self._ended.wait(TICK_S):
                break
        if not is_ready:
            self.end()
            raise AssertionError("the server did not become ready:\n" + "".join(self.lines[-60:]))
        self.took_s = time.monotonic() - self._began_at
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if READY in line:
                self._told.set()
        self._ended.set()
        self._told.set()

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def worker(self) -> int:
        """The process that holds the weights."""
        (pid,) = set(tree(self.pid)) & set(self.gpu.ledger.held())
        return pid

    def exit_code(self) -> int:
        """Wait for a start that must fail."""
        return self._process.wait(UP_S_MAX)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(DOWN_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what a killed server leaves behind
        self._reader.join(DOWN_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()

    # ---------------------------------------------------------------- what it is asked

    def greedy(self, count: int = 16) -> list[int]:
        """The tokens of a greedy answer: the same weights give the same ones."""
        asked = {"model": self.name, "prompt": "good evening", "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return list(self.must("/v1/completions", {**asked, "return_token_ids": True}).json["choices"][0]["token_ids"])

    def scores(self) -> list[float]:
        """A reranker's scores of two documents, asked for one by one: a batch of two sums in another order than two of one."""
        asked = {"model": self.name, "query": "the actor"}
        answers = [self.must("/v1/rerank", {**asked, "documents": [document]}) for document in ("the green room", "the lights")]
        return [answer.json["results"][0]["relevance_score"] for answer in answers]


# ----------------------------------------------------------------------------------------------------------------- measuring


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def rss_mib(pids: Iterable[int]) -> int:
    """Resident memory, summed; what forked processes share counts once for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total // MIB


def memfd_mib(pids: Iterable[int]) -> int:
    """Memory in files without a name that these processes have open: weights of a level 1 sleeper."""
    blocks: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            for link in Path("/proc", str(pid), "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(link).startswith("/memfd:"):
                        stat = link.stat()
                        blocks[stat.st_dev, stat.st_ino] = stat.st_blocks
    return sum(blocks.values()) * 512 // MIB
