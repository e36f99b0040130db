"""Which log lines end which phase of a start."""

from __future__ import annotations

import pytest

from greenroom.engines.base import LOGGED_PHASES
from greenroom.engines.detect import describe
from tests.engines.builders import a_model

CORE = "(EngineCore_DP0 pid=11280) INFO 02-16 14:53:25"
VLLM = [
    (f"{CORE} [core.py:97] Initializing a V1 LLM engine with config: model='m'", ""),
    (f"{CORE} [gpu_model_runner.py:4021] Starting to load model m...", ""),
    ("Loading safetensors checkpoint shards: 100% Completed | 3/3 [00:00<00:00,  3.04it/s]", ""),
    (f"{CORE} [default_loader.py:293] Loading weights took 0.98 seconds", "weights"),
    (f"{CORE} [gpu_model_runner.py:4118] Model loading took 7.6065 GiB memory and 1.163559 seconds", "weights"),
    (f"{CORE} [backends.py:319] Compiling a graph for compile range (1, 2048) takes 6.40 s", ""),
    (f"{CORE} [monitor.py:34] torch.compile takes 9.85 s in total", "compile"),
    (f"{CORE} [monitor.py:48] torch.compile took 9.85 s in total", "compile"),
    (f"{CORE} [decorators.py:707] torch.compile and initial profiling/warmup run together took 3.20 s in total", "compile"),
    (f"{CORE} [gpu_worker.py:356] Available KV cache memory: 26.54 GiB", ""),
    (f"{CORE} [gpu_model_runner.py:5061] Graph capturing finished in 12 secs, took 0.61 GiB", "graphs"),
    (f"{CORE} [core.py:259] init engine (profile, create kv cache, warmup model) took 31.10 seconds", ""),
    ("(APIServer pid=11112) INFO 02-16 14:53:40 [api_server.py:1351] Starting vLLM API server 0 on http://127.0.0.1:8000", "listen"),
    ("(APIServer pid=11112) INFO 02-16 14:53:40 [entry.py:140] Starting vLLM server on http://127.0.0.1:8000", "listen"),
    ("(APIServer pid=11112) INFO:     Application startup complete.", "listen"),
    ("INFO: Enforce eager set, disabling torch.compile and CUDAGraphs.", ""),
    ("INFO 12-02 12:01:21 model_runner.py:1110] Loading model weights took 14.9888 GB", "weights"),
]
SGLANG = [
    ("[2026-02-26 05:20:21 TP0] Load weight begin. avail mem=111.97 GB", ""),
    ("[2026-02-26 05:24:09 TP4] Load weight end. elapsed=228.09 s, type=GlmMoe, dtype=torch.bfloat16, avail mem=194.04 GB", "weights"),
    ("[2026-05-15 08:39:37 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=2.42 GB", ""),
    ("[2026-05-15 08:40:32 TP0] Capture cuda graph end. Time elapsed: 54.61 s. mem usage=1.93 GB. avail mem=8.16 GB.", "graphs"),
    ("[2026-05-15 08:40:33 TP0] Capture target decode CUDA graph end. elapsed=22.18 s, mem usage=1.91 GB", "graphs"),
    ("[2026-05-15 08:40:35] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)", "listen"),
    ("[2026-05-15 08:40:37] The server is fired up and ready to roll!", ""),
]
LLAMA = [
    ("main: HTTP server is listening, hostname: 127.0.0.1, port: 8080, http threads: 31", "listen"),
    ("main: loading model", ""),
    ("srv    load_model: loading model '/opt/models/qwen_3-30b3a-f16.gguf'", ""),
    ("main: model loaded", "weights"),
    ("main: server is listening on http://127.0.0.1:8080 - starting the main loop", "listen"),
    ("0.00.083.315 I srv  llama_server: model loaded", "weights"),
    ("0.00.083.324 I srv  llama_server: listening on http://127.0.0.1:18911", "listen"),
    ("srv  update_slots: all slots are idle", ""),
]
TEI = [
    ("2026-01-05T10:00:01Z  INFO text_embeddings_router: router/src/lib.rs:235: Starting model backend", ""),
    ("2026-01-05T10:00:03Z  INFO text_embeddings_router: router/src/lib.rs:252: Warming up model", "weights"),
    ("2026-01-05T10:00:04Z  INFO text_embeddings_router::http::server: Starting HTTP server: 127.0.0.1:8080", "listen"),
]
GENERIC = [("Server listening on 127.0.0.1:9", "listen"), ("hello", ""), ("", "")]
COMMANDS = {
    "vllm serve m": VLLM,
    "python -m sglang.launch_server --model-path m": SGLANG,
    "llama-server -m x.gguf": LLAMA,
    "text-embeddings-router --model-id m": TEI,
    "./serve.sh": GENERIC,
    "docker run --rm vllm/vllm-openai:latest --model m": VLLM,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_ends_its_phase_and_no_other(command: str) -> None:
    """As each engine writes it, older and newer."""
    engine = describe(a_model(command))
    told = [(line, engine.phase_of(line)) for line, _ in COMMANDS[command]]

    assert told == COMMANDS[command]
    assert {phase for _, phase in told} <= {*LOGGED_PHASES, ""}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_of_any_length_is_judged_in_no_time(command: str) -> None:
    """Engines print what they like while they start."""
    engine = describe(a_model(command))

    assert {engine.phase_of(text * 400) for text in ("Capture cuda ", "torch.compile took ", "model ", "\x00é ")} == {""}
