"""A configuration made of references alone: names from what they name, an engine that fits, flags that do no harm."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.config.model import Config, ModelConfig
from greenroom.deploy.unfit import BuildError
from greenroom.store.facts import Reference
from greenroom.store.references import model_ids

ENGINES = ("llama_server", "vllm")
CONTEXT_TOKENS = 8192  # for each of its slots; what the model was trained for may be more than a card holds
SLOTS = 4
START_S_MAX = 600.0  # the first one may have to come over the network


def config_of(references: Sequence[Reference], *, engine: str = "") -> Config:
    """One model for each reference; `engine` is one of ENGINES, "" = told from the reference.

    Raises BuildError when one is given twice.
    """
    if engine and engine not in ENGINES:
        raise BuildError(f"{engine!r} is no engine that references can be served by; write {' or '.join(ENGINES)}")
    if len(set(references)) < len(references):
        twice = next(reference for reference in references if references.count(reference) > 1)
        raise BuildError(f"{twice} is given twice; name each model once")
    names = model_ids(references)
    models = tuple(_model(names[reference], reference, engine or engine_of(reference)) for reference in references)
    return Config(path="references", models=models)


def engine_of(reference: Reference) -> str:
    """vLLM for a repository of a hub without a file or quantisation, and not named after GGUF: it holds safetensors."""
    if reference.scheme == "hf" and not reference.tag and "gguf" not in reference.path.lower():
        return "vllm"
    return "llama_server"


def _model(name: str, reference: Reference, engine: str) -> ModelConfig:
    argv = _vllm(name) if engine == "vllm" else _llama()
    return ModelConfig(
        id=name, argv=argv, reference=str(reference), start_s_max=START_S_MAX, sleep_s_max=START_S_MAX, wake_s_max=START_S_MAX
    )


def _llama() -> tuple[str, ...]:
    context = str(CONTEXT_TOKENS * SLOTS)
    return ("llama-server", "--model", "${MODEL_PATH}", "--port", "${PORT}", "--ctx-size", context, "--parallel", str(SLOTS), "--jinja")


def _vllm(name: str) -> tuple[str, ...]:
    return ("vllm", "serve", "${MODEL_PATH}", "--port", "${PORT}", "--served-model-name", name, "--max-model-len", str(CONTEXT_TOKENS))
