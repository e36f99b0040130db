"""vLLM's OpenAI server (`vllm serve`, `python -m vllm.entrypoints.openai.api_server`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from greenroom.core.facts import SleepTier
from greenroom.engines.base import AsleepCheck, Call, Canary, DeviceRef, Estimate, SleepRecipe
from greenroom.engines.generic import CANARY_TEXT, CANARY_TOKENS, canary, in_ram, json_body
from greenroom.engines.hub import HubServer

UTILIZATION_DEFAULT = 0.92  # 0.9 up to about 0.19; the larger is the safer guess
MAX_NUM_SEQS_DEFAULT = 256
HOST_MIB = 3072  # API server, engine core and worker in host RAM
CPU_PROCESS_MIB = 1536  # the same three processes on a CPU build: 1.4 GiB measured with a tiny model
GPU_OVERHEAD_MIB = 2048  # context, graphs and activations beside weights and KV
MIB = 1 << 20

SWITCH = "--enable-sleep-mode"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
ASLEEP_GPU_MIB = 1536  # context and graphs stay
COPY_OUT_MIB_PER_S = 4 * 1024  # a first level-1 sleep pins the host memory it copies to
COPY_IN_MIB_PER_S = 20 * 1024
DISK_MIB_PER_S = 1024
# Loaders that can fill weights again in place; with others a level-2 sleeper could not be woken.
RELOADING = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "npcache", "pt", "mistral", "runai_streamer"})
OTHER_LOADERS = frozenset({"bitsandbytes", "gguf"})  # as --quantization
WITHOUT_WEIGHTS = re.compile(r"ngram|suffix", re.IGNORECASE)  # ways to draft that load no model
RELOAD_SINCE = (0, 11)  # /collective_rpc
WAIT_SINCE = (0, 17)  # /sleep?mode=
NUMBERED_SINCE = (0, 7)  # smaller ones are builds that do not know their version


class Vllm(HubServer):
    kind = "vllm"
    public_by_default: ClassVar[bool] = True
    key_variables: ClassVar[tuple[str, ...]] = ("VLLM_API_KEY",)
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"Application startup complete|Uvicorn running on|Starting vLLM API server")
    phase_lines: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<listen>Starting vLLM (?:API )?server|Uvicorn running on|Application startup complete)"
        r"|(?P<weights>Loading (?:model )?weights took|Model loading took)"
        r"|(?P<compile>torch\.compile (?:(?:takes|took) [\d.]+ s|and initial profiling))"
        r"|(?P<graphs>Graph capturing finished)"
    )

    def metrics_call(self) -> Call | None:
        return Call("/metrics", "GET")

    # ------------------------------------------------------------------------------------------------------- launching

    def own_env(self, devices: Sequence[DeviceRef]) -> dict[str, str]:
        # Its sleep routes exist in this mode only, beside others that nobody but us should reach.
        return {DEV_MODE: "1"} if self.levels() and DEV_MODE not in self.env else {}

    def appended(self) -> tuple[str, ...]:
        return (*super().appended(), *((SWITCH,) if self.levels() and self._switched() is None else ()))

    # --------------------------------------------------------------------------------------------------------- numbers

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        """Exact from the flags: it wants `utilization x total` free at start, whatever it will use later."""
        total = max((device.total_mib for device in devices), default=0)
        if in_ram(devices):
            return self._on_cpu(total)
        weights = self.weights_mib()
        explicit = self.flags.number("--gpu-memory-utilization")
        share = UTILIZATION_DEFAULT if explicit is None else explicit
        kv = self.flags.integer("--kv-cache-memory-bytes", "--kv-cache-memory")
        if not total:
            detail = "the size of the device is not known, so its share is not either"
            return Estimate(None, HOST_MIB, detail=detail, weights_mib=weights or None)
        wanted = math.ceil(share * total)
        detail = f"utilization {share:g} of {total:,} MiB" + ("" if explicit is not None else " (vLLM's default)")
        if kv is not None:
            need = weights // (self.devices_count() or 1) + math.ceil(kv / MIB) + GPU_OVERHEAD_MIB
            detail += f"; KV {math.ceil(kv / MIB):,} MiB fixed" + (
                "; lower the utilization to what it needs" if weights and need < wanted else ""
            )
            wanted = max(wanted, need if weights else 0)
        return Estimate(wanted, HOST_MIB, "flags", detail, weights or None)

    def _on_cpu(self, total: int) -> Estimate:
        weights = self.weights_mib()
        space_gib = self.flags.integer(env="VLLM_CPU_KVCACHE_SPACE")
        kv = self.flags.integer("--kv-cache-memory-bytes", "--kv-cache-memory")
        kv_mib = space_gib * 1024 if space_gib else math.ceil(kv / MIB) if kv else None
        if kv_mib is None:
            share = self.flags.number("--gpu-memory-utilization") or UTILIZATION_DEFAULT
            wanted = math.ceil(share * total) if total else None
            return Estimate(wanted, 0, "flags", f"{share:g} of all host RAM (no KV size is set)", weights or None, True)
        detail = f"weights {weights:,} + KV {kv_mib:,} + processes {CPU_PROCESS_MIB:,} MiB"
        return Estimate(weights + kv_mib + CPU_PROCESS_MIB, 0, "estimated", detail, weights or None, True)

    def model_name(self) -> str | None:
        argv = self.command.argv
        if "serve" in argv[:3]:
            index = argv.index("serve") + 1
            if index < len(argv) and not argv[index].startswith("-"):
                return argv[index]
        return self.flags.value("--model")

    def devices_count(self) -> int | None:
        """Tensor x pipeline x data parallel; None when no flag says so."""
        return product(
            self.flags.integer("--tensor-parallel-size", "-tp"),
            self.flags.integer("--pipeline-parallel-size", "-pp"),
            self.flags.integer("--data-parallel-size", "-dp"),
        )

    def default_parallel(self) -> int:
        return self.flags.integer("--max-num-seqs") or MAX_NUM_SEQS_DEFAULT

    # ----------------------------------------------------------------------------------------------------------- sleep

    def levels(self) -> tuple[int, ...]:
        """The sleep levels it has as configured, by the routes known here."""
        if self.config.sleep == "off" or self.config.sleep_calls is not None or self._refusal():
            return ()
        return tuple(level for level in (1, 2) if self.allows(level) and not (level == 2 and self._level2_refusal()))

    def own_no_sleep(self) -> str:
        return self._refusal() or ("" if self.levels() else self._level2_refusal())

    def sleep_notes(self) -> tuple[str, ...]:
        if not self.levels():
            return ()
        notes = []
        if self.allows(2) and (reason := self._level2_refusal()):
            notes.append(f"sleeps at level 1 only: {reason}.")
        if "expandable_segments:True" in (self.given("PYTORCH_CUDA_ALLOC_CONF") or ""):
            notes.append(
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF ends vLLM 0.11 with --enable-sleep-mode; newer ones work around it."
            )
        if self._dev_mode() and (way := self.open_to_network()):
            notes.append(f"{DEV_MODE} opens its control routes to the network ({way}); let it listen on 127.0.0.1.")
        return tuple(notes)

    def _switched(self) -> bool | None:
        """What the command says about sleep mode; None = nothing."""
        return self.flags.last(SWITCH, "--no-enable-sleep-mode")

    def _dev_mode(self) -> bool | None:
        """What the operator says about the mode with the sleep routes; None = nothing."""
        value = self.given(DEV_MODE)
        return None if value is None else value.strip() not in ("", "0")

    def _refusal(self) -> str:
        """Why it cannot sleep at all; "" when nothing speaks against it."""
        switched = self._switched()
        if switched is False:
            return "--no-enable-sleep-mode is given"
        if switched is None and self.config.sleep == "auto":
            return f"{SWITCH} is not given (write it, or `sleep: 1`)"
        if switched is None and (self.command.shell or self.command.client):
            return f"{SWITCH} is not given, and greenroom adds nothing inside a script or a container command"
        if self._dev_mode() is False:
            return f"{DEV_MODE} is switched off, and its sleep routes exist only with it"
        if self._dev_mode() is None and self.command.client:
            return f"its container does not get {DEV_MODE}=1, and greenroom cannot hand it in"
        return self._spread() or self._held_kv() or self._too_open()

    def _spread(self) -> str:
        if (self.flags.integer("--data-parallel-size", "-dp") or 1) > 1 or self.flags.value("--data-parallel-rank", "-dpn") is not None:
            return "with data parallel replicas one call may reach only some of them"
        if self.flags.has("--headless") or (self.flags.integer("--nnodes", "-n") or 1) > 1:
            return "it is spread over several machines"
        return ""

    def _held_kv(self) -> str:
        backend = self.flags.value("--kv-offloading-backend")
        if backend == "native" or (backend is None and self.flags.value("--kv-offloading-size") is not None):
            return "it would die after one sleep with native KV offloading"
        return "it may not survive a sleep with a KV connector (--kv-transfer-config)" if self.flags.value("--kv-transfer-config") else ""

    def _too_open(self) -> str:
        way = "" if self._dev_mode() else self.open_to_network()
        return f"its control routes would be open to the network ({way}); let it listen on 127.0.0.1" if way else ""

    def _level2_refusal(self) -> str:
        """Why level 2 is not for it: what would not be right again after its weights are reloaded."""
        loader = self.flags.value("--load-format") or "auto"
        quantization = self.flags.value("--quantization", "-q") or ""
        if quantization.lower() in OTHER_LOADERS:
            loader = quantization.lower()
        elif loader == "auto" and "gguf" in (self.model_name() or "").lower():
            loader = "gguf"
        if loader not in RELOADING:
            return f"weights of the format {loader} cannot be reloaded after level 2"
        if self.flags.has("--enable-lora"):
            return "LoRA adapters would be lost at level 2"
        if self.flags.has("--enable-expert-parallel"):
            return "weights spread by expert parallelism are not right again after level 2"
        draft = " ".join(self.flags.under("--speculative-config", "--speculative-model"))
        if draft and not WITHOUT_WEIGHTS.search(draft):
            return "the weights of its draft model would be lost at level 2"
        return ""

    def own_tiers(self, estimate: Estimate) -> tuple[SleepTier, ...]:
        weights = self.all_weights_mib(estimate)
        if not estimate.in_ram:
            return tiers_of(self.levels(), weights, ASLEEP_GPU_MIB, HOST_MIB)
        # There the copy lies on its own device.
        tiers = tiers_of(self.levels(), weights, CPU_PROCESS_MIB, 0)
        return tuple(replace(tier, residue_mib=tier.residue_mib + tier.host_mib, host_mib=0) for tier in tiers)

    def version_call(self) -> Call | None:
        return Call("/version", "GET") if self.levels() else None

    def own_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe:
        """Never a second sleep on top (it would be ignored), never /resume (it would run without its memory)."""
        if level not in self.levels():
            return super().own_recipe(level, version)
        known = version >= NUMBERED_SINCE
        if level == 2 and known and version < RELOAD_SINCE:
            return SleepRecipe(level, (), (), unfit=f"vLLM {'.'.join(map(str, version))} has no route that reloads its weights")
        # It has nothing in flight then; waiting is for what we might not know of.
        mode = "&mode=wait" if known and version >= WAIT_SINCE else ""
        forget = Call("/reset_prefix_cache", optional=True)
        wake: tuple[Call, ...] = (Call("/wake_up"), forget)
        if level == 2:
            reload = Call("/collective_rpc", body=json_body({"method": "reload_weights"}))
            wake = (Call("/wake_up?tags=weights"), reload, Call("/wake_up?tags=kv_cache"), forget)
        # A wake that failed half-way may have dropped copies of weights: nobody may believe the next one unseen.  One of
        # several ranks that failed leaves the others unable to wake twice.
        repeatable = (level == 2 or self.config.canary != "off") and (self.devices_count() or 1) == 1
        return SleepRecipe(
            level, (Call(f"/sleep?level={level}{mode}"),), wake, AsleepCheck("/is_sleeping"), self.verifies(level), repeatable
        )

    def own_canaries(self) -> tuple[Canary, ...]:
        name = self.request_name()
        # Tokens by number first: what they spell may be nothing that can be shown.
        numbers = {"prompt": CANARY_TEXT, "logprobs": 1, "return_tokens_as_token_ids": True}
        tokens = {"model": name, "max_tokens": CANARY_TOKENS, "temperature": 0, "seed": 0, **self.canary_extras, **numbers}
        return (
            canary("/v1/completions", tokens, "choices.0.logprobs.tokens"),
            *super().own_canaries(),
            canary("/classify", {"model": name, "input": CANARY_TEXT}, "data.0.probs"),
        )


def tiers_of(levels: Sequence[int], weights_mib: int, residue_mib: int, host_mib: int) -> tuple[SleepTier, ...]:
    """Priors of an engine that keeps its weights in host RAM (1) or gives them up (2); `host_mib` is its processes'."""
    known = {
        1: (host_mib + weights_mib, max(0.1, weights_mib / COPY_OUT_MIB_PER_S), weights_mib / COPY_IN_MIB_PER_S + 0.1),
        2: (host_mib, 0.2, weights_mib / DISK_MIB_PER_S + 0.5),
    }
    return tuple(SleepTier(level, residue_mib, *known[level]) for level in levels)


def product(*factors: int | None) -> int | None:
    """The product of the factors that are given; None when none is."""
    given = [factor for factor in factors if factor]
    return math.prod(given) if given else None
