"""Sets of models that generated files must carry unharmed: awkward names, values and paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from greenroom.config.load import load_config_text
from greenroom.config.model import Config
from greenroom.config.yaml_out import dump

NOTE = '50% off "x" \\d$HOME'
LONG = "team/" + "a-very-long-name-" * 5
# of all twelve: one of them is offered a HF_TOKEN, so no other's has that name
SECRETS = {"GREENROOM_API_KEY": "sk-front-door", "ORG_MODEL_A_HF_TOKEN": "hf_0123456789", "EIGHTH_SECRET": "admin-4711"}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "org/näme:7b q4": {
        "cmd": [
            "llama-server",
            "--model",
            "/srv/my models/näme, 7b.gguf",
            "--chat-template-file",
            '/srv/tem plates/50% "chat" \\d$HOME\'s.jinja',
            "--ctx-size",
            "8192",
            "--port",
            "${PORT}",
        ],
        "env": [
            f"NOTE={NOTE}",
            "LINES=one\ntwo\t#three\n",
            "EMPTY=",
            "QUOTES='a' \"b\" `c`",
            "UNI=grün ☃ \U0001f600",
            "BACK=\\ \\n \\x41 %h %%",
        ],
        "aliases": ["b7"],
        "device": "gpu1",
        "memory": "9GiB",
        "healthCheckTimeout": 300,
        "ttl": 600,
    },
    "Org/Model-A": {
        "cmd": "vllm serve /srv/hub/Model-A --port ${PORT} --tensor-parallel-size 2 --max-model-len 4096",
        "env": {"HF_TOKEN": SECRETS["ORG_MODEL_A_HF_TOKEN"], "VLLM_LOGGING_LEVEL": "DEBUG"},
        "healthCheckTimeout": 900,
    },
    "org/model-a": {
        "cmd": "python -m vllm.entrypoints.openai.api_server --model /srv/hub/model-a --port 8123 --speculative-config "
        """'{"model": "/srv/draft", "num_speculative_tokens": 3}'""",
        "proxy": "http://127.0.0.1:8123",
        "healthCheckTimeout": 300,
        "device": "gpu0",
    },
    'it\'s "quoted" \\ $HOME %i': {
        "cmd": ["llama-server", "-m", "/srv/models/big-00001-of-00003.gguf", "--port", "${PORT}", "--grammar", 'root ::= "a" | "b"\n'],
        "stop_timeout": 42,
    },
    f"{LONG}1": {"cmd": "llama-server -m /srv/models/same.gguf --port ${PORT} --host ::1", "proxy": "http://[::1]:${PORT}"},
    f"{LONG}2": {"cmd": "llama-server -m /srv/other/same.gguf --port ${PORT} --host=127.0.0.1 --embedding"},
    "模型": {"cmd": "text-embeddings-router --model-id BAAI/bge-m3 --port ${PORT}", "host_memory": "4GiB"},
    "eighth": {
        "cmd": f"python3 -m sglang.launch_server --model-path org/eight --port ${{PORT}} --admin-api-key {SECRETS['EIGHTH_SECRET']}",
        "pin": True,
    },
    "on": {"cmd": "llama-server -m /srv/models/on.gguf --port ${PORT}", "device": "ram", "memory": "2GiB", "host_memory": "512MiB"},
    "1e3": {"cmd": "env CUDA_LAUNCH_BLOCKING=1 nice -n 5 llama-server -m /srv/models/e.gguf --port ${PORT} --device CUDA1"},
    "whisper": {
        "cmd": "/app/whisper --port ${PORT} --model /models/w.bin",
        "checkEndpoint": "none",
        "container": {"image": "registry.example/whisper:1", "volumes": ["/srv/whisper:/models", "/srv/out:/out:rw"], "args": "-e LANG=C"},
    },
    "a.b_c": {
        "cmd": ["llama-server", "-m", "/srv/models/abc.gguf", "--port", "${PORT}", "--lora", "/srv/l/1.gguf,/srv/l/2.gguf"],
        "filters": {"setParams": {"stop": "$${PORTAL}"}, "stripParams": "top_k"},
    },
}

TOP: Mapping[str, Any] = {
    "devices": {"gpu0": {"memory": "24GiB", "uuid": "GPU-00000000-aaaa"}, "gpu1": {"memory": "24GiB", "uuid": "GPU-11111111-bbbb"}},
    "apiKeys": [SECRETS["GREENROOM_API_KEY"]],
    "startPort": 6900,
}


def text(count: int) -> str:
    """A configuration with the first `count` models."""
    return dump({**TOP, "models": dict(list(MODELS.items())[:count])})


def config(count: int) -> Config:
    return load_config_text(text(count), "/srv/greenroom.yaml", env={})


def comparable(config: Config) -> Config:
    """Without what a file's place and layout give."""
    return replace(config, path="", warnings=(), models=tuple(replace(model, line=0) for model in config.models))
