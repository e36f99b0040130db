"""SGLang's server (`python -m sglang.launch_server`, `sglang serve`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar

from greenroom.core.facts import SleepTier
from greenroom.engines.base import Call, Canary, DeviceRef, Estimate, SleepRecipe
from greenroom.engines.flags import OFF
from greenroom.engines.generic import CANARY_TEXT, canary, json_body
from greenroom.engines.hub import HubServer
from greenroom.engines.vllm import WITHOUT_WEIGHTS, product, tiers_of

FRACTION_DEFAULT = 0.88  # it computes its own from the size of the card; this is the usual outcome
BESIDE_MIB = 3072  # graphs and activations live beside the static share
HOST_MIB = 3072
PARALLEL_DEFAULT = 256
HEALTH_VARIABLE = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"

SWITCH = "--enable-memory-saver"
COPY_SWITCH = "--enable-weights-cpu-backup"
DRAFT_COPY_SWITCH = "--enable-draft-weights-cpu-backup"
GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
ASLEEP_GPU_MIB = 2560  # context, communication buffers and graphs stay
ASLEEP_GPU_NO_GRAPHS_MIB = 1536
IDLE_S_MAX = 5  # its scheduler is idle a moment after its last answer
RELOADING = frozenset({"auto", "safetensors", "fastsafetensors", "npcache", "pt", "mistral"})
OTHER_LOADERS = frozenset({"bitsandbytes", "gguf"})  # as --quantization


class Sglang(HubServer):
    kind = "sglang"
    ready_lines: ClassVar[re.Pattern[str]] = re.compile(r"The server is fired up and ready to roll|Application startup complete")
    phase_lines: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<listen>Uvicorn running on|Application startup complete)"
        r"|(?P<weights>Load weight end)"
        r"|(?P<graphs>Capture (?:\w+ )*cuda graph end)",
        re.IGNORECASE,
    )

    def metrics_call(self) -> Call | None:
        return Call("/metrics", "GET") if self.flags.has("--enable-metrics") else None

    def own_env(self, devices: Sequence[DeviceRef]) -> dict[str, str]:
        # Its /health generates a token by default: a probe would cost compute, and could kill it while memory is released.
        return {} if HEALTH_VARIABLE in self.env else {HEALTH_VARIABLE: "0"}

    def appended(self) -> tuple[str, ...]:
        wanted = {1: (SWITCH, COPY_SWITCH), 2: (SWITCH,)}.get(self.level() or 0, ())
        return (*super().appended(), *(flag for flag in wanted if not self.flags.has(flag)))

    def control_headers(self) -> tuple[tuple[str, str], ...]:
        """With a key for administrators the other one is refused on its sleep routes."""
        key = self._admin_key()
        return (("Authorization", f"Bearer {key}"),) if key else self.probe_headers()

    def secret_values(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().secret_values(), *filter(None, [self._admin_key()]))))

    def _admin_key(self) -> str | None:
        return self.flags.value("--admin-api-key")

    def estimate(self, devices: Sequence[DeviceRef]) -> Estimate:
        """The static share (weights + KV pool) of the device, and what lives beside it."""
        total = max((device.total_mib for device in devices), default=0)
        if not total:
            detail = "the size of the device is not known, so its share is not either"
            return Estimate(None, HOST_MIB, detail=detail, weights_mib=self.weights_mib() or None)
        explicit = self.flags.number("--mem-fraction-static")
        share = FRACTION_DEFAULT if explicit is None else explicit
        wanted = min(total, math.ceil(share * total) + BESIDE_MIB)
        detail = f"static share {share:g} of {total:,} MiB + {BESIDE_MIB:,} MiB" + ("" if explicit is not None else " (a usual default)")
        return Estimate(wanted, HOST_MIB, "flags", detail, self.weights_mib() or None)

    def devices_count(self) -> int | None:
        return product(
            self.flags.integer("--tensor-parallel-size", "--tp-size", "--tp"),
            self.flags.integer("--pipeline-parallel-size", "--pp-size", "--pp"),
        )

    def default_parallel(self) -> int:
        return self.flags.integer("--max-running-requests") or PARALLEL_DEFAULT

    def model_name(self) -> str | None:
        return self.flags.value("--model-path", "--model")

    # ----------------------------------------------------------------------------------------------------------- sleep

    def level(self) -> int | None:
        """The one level it has: 1 when it keeps a copy of its weights in host RAM, else 2; None = none as configured."""
        if self.config.sleep == "off" or self.config.sleep_calls is not None or self.own_no_sleep():
            return None
        return self._kept_level()

    def _kept_level(self) -> int:
        wanted = 1 if self.config.sleep == "1" else 2
        return 1 if self.flags.has(COPY_SWITCH) else wanted

    def own_no_sleep(self) -> str:
        if not self.flags.has(SWITCH):
            if self.config.sleep == "auto":
                return f"{SWITCH} is not given (write it, or `sleep: 1`)"
            if self.command.shell or self.command.client:
                return f"{SWITCH} is not given, and greenroom adds nothing inside a script or a container command"
        level = self._kept_level()
        if not self.allows(level):
            return f"with {COPY_SWITCH} it sleeps at level 1 only"
        if level == 1 and not self.flags.has(COPY_SWITCH) and (self.command.shell or self.command.client):
            return f"{COPY_SWITCH} is not given, and greenroom adds nothing inside a script or a container command"
        return self._spread() or self._lost(level)

    def sleep_notes(self) -> tuple[str, ...]:
        if self.level() is None or self._admin_key() or self.engine_key() or not (way := self.open_to_network()):
            return ()
        return (f"its sleep routes are open to the network ({way}); let it listen on 127.0.0.1, or give it --admin-api-key.",)

    def _spread(self) -> str:
        if (self.flags.integer("--data-parallel-size", "--dp-size", "--dp") or 1) > 1:
            return "with data parallel replicas one call may reach only some of them"
        if (self.flags.integer("--nnodes") or 1) > 1:
            return "it is spread over several machines"
        if (self.flags.value("--disaggregation-mode") or "null") != "null":
            return "it may not survive a sleep with disaggregated prefill"
        return ""

    def _lost(self, level: int) -> str:
        """What would not be right again after a wake from this level."""
        draft = self.flags.value("--speculative-algorithm", "--speculative-algo")
        drafts = draft is not None and not WITHOUT_WEIGHTS.search(draft)
        if level == 1:
            lost = drafts and not self.flags.has(DRAFT_COPY_SWITCH)
            return f"the weights of its draft model would be lost without {DRAFT_COPY_SWITCH}" if lost else ""
        if drafts:
            return "the weights of its draft model would be lost at level 2"
        quantization = (self.flags.value("--quantization") or "").lower()
        loader = quantization if quantization in OTHER_LOADERS else self.flags.value("--load-format") or "auto"
        if loader == "auto" and "gguf" in (self.model_name() or "").lower():
            loader = "gguf"
        if loader not in RELOADING:
            return f"weights of the format {loader} cannot be reloaded after level 2"
        return "" if self.model_name() else "its command does not say which weights to reload after level 2"

    def own_tiers(self, estimate: Estimate) -> tuple[SleepTier, ...]:
        level = self.level()
        residue_mib = ASLEEP_GPU_NO_GRAPHS_MIB if self._graphs() else ASLEEP_GPU_MIB
        return () if level is None else tiers_of((level,), self.all_weights_mib(estimate), residue_mib, HOST_MIB)

    def _graphs(self) -> bool:
        """Whether its graphs can be released too."""
        return (self.given(GRAPHS_VARIABLE) or "0").strip().lower() not in OFF | {""}

    def own_recipe(self, level: int, version: tuple[int, ...]) -> SleepRecipe:
        """Exactly what was released is resumed, once: it dies of anything else.  It cannot be asked whether it sleeps."""
        if self.level() != level:
            return super().own_recipe(level, version)
        weights = ["cuda_graph", "weights"] if self._graphs() else ["weights"]
        idle = Call(f"/flush_cache?timeout={IDLE_S_MAX}", optional=True)  # refused while it is not idle; releasing would kill it
        sleep = (idle, Call("/release_memory_occupation", body=json_body({"tags": ["kv_cache", *weights]})))
        resume = "/resume_memory_occupation"
        wake: tuple[Call, ...] = (Call(resume, body=json_body({"tags": ["kv_cache", *weights]})),)
        if level == 2:
            # The cache comes last: loading takes room beside the weights.
            reload = Call("/update_weights_from_disk", body=json_body({"model_path": self.model_name()}))
            wake = (Call(resume, body=json_body({"tags": weights})), reload, Call(resume, body=json_body({"tags": ["kv_cache"]})))
        return SleepRecipe(level, sleep, wake, None, self.verifies(level), repeatable=False)

    def own_canaries(self) -> tuple[Canary, ...]:
        """Its reranker answers with a bare list; another route scores tokens."""
        kept = tuple(question for question in super().own_canaries() if question.path not in ("/score", "/v1/rerank"))
        body = {"model": self.request_name(), "query": CANARY_TEXT, "documents": ["10 11 12", "a quiet room"]}
        return (*kept, canary("/v1/rerank", body, "*.score"))
