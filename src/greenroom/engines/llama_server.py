"""llama.cpp's llama-server: flags, GGUF files, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from greenroom.core.facts import SleepTier
from greenroom.engines import devices as pinning
from greenroom.engines import gguf
from greenroom.engines import llama_memory as memory
from greenroom.engines.base import AsleepCheck, Call, DeviceRef, Estimate, Readiness, SleepRecipe
from greenroom.engines.discovery import PROGRAM, Found, find_llama_server
from greenroom.engines.flags import OFF, basename
from greenroom.engines.generic import Generic, json_body

MODEL = ("-m", "--model")
DRAFT = ("-md", "--model-draft", "--spec-draft-model")
PROJECTOR = ("-mm", "--mmproj")
ADAPTERS = ("--lora", "--lora-scaled", "--control-vector")
FROM_HUB = ("-hf", "-hfr", "--hf-repo")
FETCHED = (*FROM_HUB, "-mu", "--model-url", "-dr", "--docker-repo")
BESIDE_FROM_HUB = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "-hfv", "-hfrv", "--hf-repo-v")
BESIDE_FROM_WEB = ("-mmu", "--mmproj-url")
DEVICE = ("-dev", "--device")
GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
ROUTER = ("--models-dir", "--models-preset")
BUILT_IN = re.compile(r"^--(?:fim|gpt-oss|vision|embd)-.*(?:default|spec)$")
EMBEDDING = ("--embedding", "--embeddings")
RERANK = ("--rerank", "--reranking")
DISK_MIB_PER_S = 1024.0
UP_FLOOR_S = 0.3
WAKE_FLOOR_S = 0.1
ASLEEP_RAM_MIB = 64  # 29 to 46 MiB measured
ASLEEP_GPU_MIB = 512  # its context stays
CPU_INFO = Path("/proc/cpuinfo")
CPU_INFO_BYTES_MAX = 64 * 1024


class LlamaServer(Generic):
    kind = "llama_server"
    port_flags: ClassVar[tuple[str, ...]] = ("--port",)
    host_flags: ClassVar[tuple[str, ...]] = ("--host",)
    host_variables: ClassVar[tuple[str, ...]] = ("LLAMA_ARG_HOST",)
    key_variables: ClassVar[tuple[str, ...]] = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY")
    canary_extras: ClassVar[Mapping[str, Any]] = {"ignore_eos": True}
    term_again_s: ClassVar[float | None] = 1.0  # a TERM just after it became ready can be swallowed
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"listening on http|server is listening|model loaded|all slots are idle")
    phase_lines: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<listen>listening on http|server is listening)|(?P<weights>\bmodel loaded\b)",
    )

    # ------------------------------------------------------------------------------------------------------- launching

    def program_argv(self) -> tuple[str, ...]:
        """The command; a bare `llama-server` that is not on PATH becomes the one inside the installed wheel."""
        argv = self.config.argv
        if argv and argv[0] == PROGRAM and self.config.container is None and isinstance(found := self._found, Found):
            return (str(found.path), *argv[1:]) if found.source == "package" else argv
        return argv

    @cached_property
    def _found(self) -> object:
        return find_llama_server(path=self.env.get("PATH"))

    def own_env(self, devices: Sequence[DeviceRef]) -> dict[str, str]:
        env: dict[str, str] = {}
        if self.config.argv[:1] == (PROGRAM,) and isinstance(found := self._found, Found) and self.config.container is None:
            env |= found.env
        if self._in_ram(devices):
            env |= self._ram_env(devices)
        elif "vulkan" in basename(self.program_argv()[0]).lower() or "vulkan" in self.program_argv()[0].lower():
            env |= pinning.vulkan_env(devices, self.env)
        return {name: value for name, value in env.items() if name not in self.env}

    def _ram_env(self, devices: Sequence[DeviceRef]) -> dict[str, str]:
        env: dict[str, str] = {}
        # It offloads to any device it finds unless told not to.
        if devices[0].kind == "ram" and self.flags.value(*DEVICE, env="LLAMA_ARG_DEVICE") is None:
            env |= {"LLAMA_ARG_DEVICE": "none", "VK_LOADER_DRIVERS_DISABLE": "*"}
        # Its cache of old prompts would grow to 8 GiB beside the book.
        if self.options().cache_ram_mib is None and (files := self._headers) is not None:
            env["LLAMA_ARG_CACHE_RAM"] = str(memory.prompt_cache_limit_mib(files.model[0], self.options()))
        return env

    def pinned_devices(self) -> tuple[str, ...]:
        return super().pinned_devices() or pinning.pinned_by_flag(self.flags.value(*DEVICE, env="LLAMA_ARG_DEVICE"))

    def readiness(self) -> Readiness:
        ready = super().readiness()
        prefix = (self.flags.value("--api-prefix", env="LLAMA_ARG_API_PREFIX") or "").rstrip("/")
        if not prefix or ready.base_path:
            return ready
        return Readiness(
            path=ready.path,
            fallback_paths=ready.fallback_paths,
            headers=ready.headers,
            base_path=prefix,
            warmup_path=ready.warmup_path,
            warmup_body=ready.warmup_body,
        )

    # --------------------------------------------------------------------------------------------------------- numbers

    def default_parallel(self) -> int:
        return self.options().parallel

    def options(self) -> memory.Options:
        """What the flags and the operator's environment say, defaults of b10434 filled in."""
        flags = self.flags
        ctx = flags.integer("-c", "--ctx-size", env="LLAMA_ARG_CTX_SIZE") or 0
        slots = flags.integer("-np", "--parallel", env="LLAMA_ARG_N_PARALLEL") or -1
        return memory.Options(
            ctx=max(0, ctx),
            parallel=slots if slots > 0 else memory.PARALLEL_AUTO,
            ubatch=self._ubatch(),
            cache_k=memory.cache_type_bytes(flags.value("-ctk", "--cache-type-k", env="LLAMA_ARG_CACHE_TYPE_K")),
            cache_v=memory.cache_type_bytes(flags.value("-ctv", "--cache-type-v", env="LLAMA_ARG_CACHE_TYPE_V")),
            gpu_layers=self._gpu_layers(),
            flash=(flags.value("-fa", "--flash-attn", env="LLAMA_ARG_FLASH_ATTN") or "auto").lower() not in OFF,
            swa_full=flags.has("--swa-full", env="LLAMA_ARG_SWA_FULL"),
            kv_offload=not (flags.has("-nkvo", "--no-kv-offload") or flags.value(env="LLAMA_ARG_KV_OFFLOAD") in OFF),
            mmproj_offload=not flags.has("--no-mmproj-offload"),
            cpu_moe_layers=self._cpu_moe_layers(),
            embedding=flags.has(*EMBEDDING, env="LLAMA_ARG_EMBEDDINGS") or flags.has(*RERANK, env="LLAMA_ARG_RERANKING"),
            repack=not (flags.has("-nr", "--no-repack") or flags.value(env="LLAMA_ARG_REPACK") in OFF),
            mapped=self._mapped(),
            cache_ram_mib=flags.integer("-cram", "--cache-ram", env="LLAMA_ARG_CACHE_RAM"),
            fits_itself=ctx <= 0 and (flags.value("-fit", "--fit", env="LLAMA_ARG_FIT") or "on").lower() not in OFF,
        )

    def _ubatch(self) -> int:
        ubatch = self.flags.integer("-ub", "--ubatch-size", env="LLAMA_ARG_UBATCH") or memory.UBATCH_DEFAULT
        batch = self.flags.integer("-b", "--batch-size", env="LLAMA_ARG_BATCH")
        return min(ubatch, batch) if batch else ubatch

    def _gpu_layers(self) -> int | None:
        if self.flags.value(*DEVICE, env="LLAMA_ARG_DEVICE") == "none":
            return 0
        text = self.flags.value(*GPU_LAYERS, env="LLAMA_ARG_N_GPU_LAYERS")
        return int(text) if text is not None and text.isdigit() else None

    def _cpu_moe_layers(self) -> int:
        if self.flags.has("-cmoe", "--cpu-moe", env="LLAMA_ARG_CPU_MOE"):
            return 1 << 16
        return max(0, self.flags.integer("-ncmoe", "--n-cpu-moe", env="LLAMA_ARG_N_CPU_MOE") or 0)

    def _mapped(self) -> bool:
        mode = (self.flags.value("-lm", "--load-mode", env="LLAMA_ARG_LOAD_MODE") or "auto").lower()
        return not (self.flags.has("--no-mmap") or self.flags.value(env="LLAMA_ARG_MMAP") in OFF or mode in ("none", "dio"))

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        """Weights + KV + compute from the GGUF headers, per device when split over several."""
        files = self._headers
        if files is None:
            why = "the model is fetched at start" if self.flags.value(*FETCHED) else "no readable GGUF file is named"
            return Estimate(None, detail=f"{why}: its need is learned at the first start", in_ram=self._in_ram(devices))
        need = self._need(files, self.options(), devices)
        return Estimate(need.device_mib, need.host_mib, "estimated", need.describe(), in_ram=self._in_ram(devices))

    def _need(self, files: memory.Files, options: memory.Options, devices: Sequence[DeviceRef]) -> memory.Need:
        if self._in_ram(devices):
            return memory.on_host(files, options, cpu_flags())
        total = max((device.total_mib for device in devices), default=0)
        vendor = next((device.vendor for device in devices), "")
        return memory.on_gpus(files, options, count=self.config.devices_count, vendor=vendor, total_mib=total)

    def contexts(self, devices: Sequence[DeviceRef]) -> tuple[tuple[int, int], ...]:
        """The context that its command names in eighths, largest first."""
        files, options = self._headers, self.options()
        if files is None or not options.ctx:
            return ()
        now_mib = self._need(files, options, devices).device_mib
        smaller = [options.ctx * part // 8 // memory.CTX_PAD * memory.CTX_PAD for part in range(7, 0, -1)]
        found = [(ctx, now_mib - self._need(files, replace(options, ctx=ctx), devices).device_mib) for ctx in smaller if ctx]
        return tuple((ctx, freed_mib) for ctx, freed_mib in found if freed_mib > 0)

    def _in_ram(self, devices: Sequence[DeviceRef]) -> bool:
        """Whether its memory is this host's RAM.  A declared device counts as RAM unless layers are offloaded by name."""
        kinds = {device.kind for device in devices}
        if kinds == {"declared"}:
            return self.flags.value(*GPU_LAYERS, env="LLAMA_ARG_N_GPU_LAYERS") is None or self._gpu_layers() == 0
        return kinds == {"ram"}

    @property
    def _headers(self) -> memory.Files | None:
        """Headers of all files of the command, read again only when a file has changed; None when they cannot be read."""
        try:
            model = self._read(self.flags.value(*MODEL, env="LLAMA_ARG_MODEL"))
            draft = self._read(self.flags.value(*DRAFT, env="LLAMA_ARG_SPEC_DRAFT_MODEL"))
            extra = sum(path.stat().st_size for path in self._extra_files() if path.is_file())
        except (OSError, gguf.GgufError):
            return None
        return memory.Files(model, draft, extra) if model else None

    def _read(self, text: str | None) -> tuple[gguf.Header, ...]:
        path = self.host_path(text) if text else None
        return gguf.read_model(path) if path is not None else ()

    def _extra_files(self) -> list[Path]:
        named = [self.flags.value(*PROJECTOR, env="LLAMA_ARG_MMPROJ"), *(self.flags.value(flag) for flag in ADAPTERS)]
        singles = [
            part.rsplit(":", 1)[0] if part.rsplit(":", 1)[-1].replace(".", "").isdigit() else part
            for text in named
            if text
            for part in text.split(",")
        ]
        return [path for text in singles if (path := self.host_path(text)) is not None]

    def times(self) -> tuple[float, float]:
        """Weights at 1 GiB/s and up to a second of set-up; small files start in a few tenths of a second."""
        load_s = self._load_s()
        return UP_FLOOR_S + load_s + min(0.7, load_s), 0.2

    def _load_s(self) -> float:
        files = self._headers
        weights_mib = sum(part.file_bytes for part in (*files.model, *files.draft)) / (1 << 20) if files else DISK_MIB_PER_S
        return weights_mib / DISK_MIB_PER_S

    # ----------------------------------------------------------------------------------------------------------- sleep

    def idle_s(self) -> int | None:
        """Seconds after which it falls asleep by itself; None = never.  A router only hands the flag on."""
        seconds = self.flags.integer("--sleep-idle-seconds")
        router = self.flags.value(*ROUTER) or self.env.get("LLAMA_ARG_MODELS_DIR")
        return None if seconds is None or seconds < 1 or router else seconds

    def own_no_sleep(self) -> str:
        seconds = self.idle_s()
        return "it has no sleep routes" if seconds is None else f"it falls asleep by itself only, {seconds} s after its last request"

    def doze(self, estimate: Estimate) -> SleepTier | None:
        if self.idle_s() is None:
            return None
        load_s = self._load_s()
        return SleepTier(1, ASLEEP_RAM_MIB if estimate.in_ram else ASLEEP_GPU_MIB, 0, 0.0, WAKE_FLOOR_S + load_s)

    def metrics_call(self) -> Call | None:
        """Not where it falls asleep by itself: there a look at its figures counts as a request."""
        offers = self.flags.has("--metrics") or (self.given("LLAMA_ARG_ENDPOINT_METRICS") or "0") not in ("", "0", "false")
        return Call("/metrics", "GET") if offers and self.idle_s() is None else None

    def dozes(self) -> AsleepCheck | None:
        # Says "awake" as soon as it begins to load: only the answer to a call that woke it means that it serves.
        return AsleepCheck("/props") if self.idle_s() is not None else None

    def own_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe:
        """Only waking: every kind of server has this route, and answers on it when the model is loaded again."""
        check = self.dozes()
        if check is None or level != 1:
            return super().own_recipe(level, version)
        wake = Call("/tokenize", body=json_body({"content": ""}))
        # It dies of a load that fails.
        return SleepRecipe(level, (), (wake,), check, self.verifies(level), repeatable=False)

    def files(self) -> tuple[Path, ...]:
        named = [self.flags.value(*MODEL, env="LLAMA_ARG_MODEL"), self.flags.value(*DRAFT, env="LLAMA_ARG_SPEC_DRAFT_MODEL")]
        found: list[Path] = []
        for path in [self.host_path(text) for text in named if text]:
            try:
                found += gguf.part_paths(path) if path is not None else ()
            except gguf.GgufError:
                continue
        return tuple(path for path in (*found, *self._extra_files()) if path.is_file())

    # ---------------------------------------------------------------------------------------------------------- faults

    def model_missing(self) -> str:
        """Whether the model file is there, is a file and is whole; a server without any model would come up as a router."""
        text = self.flags.value(*MODEL, env="LLAMA_ARG_MODEL")
        if text is None:
            return "" if self._has_other_source() else "its command names no model; add `--model FILE.gguf` (or `-hf USER/REPO`)"
        for what, value in (("model", text), ("draft model", self.flags.value(*DRAFT)), ("projector", self.flags.value(*PROJECTOR))):
            path = self.host_path(value) if value else None
            if path is None:
                continue
            if path.is_dir():
                return f"the {what} {path} is a directory; name the .gguf file inside it"
            if not path.exists():
                return "" if self.flags.value(*FETCHED) else f"the {what} file {path} does not exist"
            try:
                gguf.read_model(path)
            except gguf.GgufError as exc:
                return f"the {what} cannot be loaded: {exc}"
            except OSError as exc:
                return f"the {what} {path} cannot be read: {exc.strerror}"
        return ""

    def fetches_from(self) -> str:
        flags = self.flags
        if flags.has("--offline") or (self.given("LLAMA_ARG_OFFLINE") or "0").strip().lower() not in OFF:
            return ""
        is_built_in = any(BUILT_IN.match(item) for item in self.command.argv)
        if is_built_in or flags.value(*FROM_HUB, *BESIDE_FROM_HUB) or self.given("LLAMA_ARG_HF_REPO"):
            return "hub"
        in_env = any(map(self.given, ("LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_MMPROJ_URL")))
        return "web" if in_env or flags.value(*FETCHED, *BESIDE_FROM_WEB) else ""

    def _has_other_source(self) -> bool:
        if self.command.shell or self.command.client:
            return True  # what the script adds is not known
        given = self.flags.value(*FETCHED, *ROUTER) or any(
            self.env.get(name) for name in ("LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_DOCKER_REPO", "LLAMA_ARG_MODELS_DIR")
        )
        return bool(given) or any(BUILT_IN.match(item) for item in self.command.argv)


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this machine's first CPU; empty where that cannot be read."""
    try:
        with CPU_INFO.open(encoding="utf-8", errors="replace") as file:
            text = file.read(CPU_INFO_BYTES_MAX)
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
