"""Which image runs what, where nobody has named one: the engines' own, at versions this release was written against."""

from __future__ import annotations

from collections.abc import Mapping

from greenroom import __version__

LLAMA_CPP = "ghcr.io/ggml-org/llama.cpp"
LLAMA_CPP_BUILD = "b10481"
VLLM_VERSION = "v0.18.0"
SGLANG_VERSION = "v0.5.18"
TEI_VERSION = "1.8"

# engine -> target -> image; what is not here has no usual image
IMAGES: Mapping[str, Mapping[str, str]] = {
    "llama_server": {
        "nvidia": f"{LLAMA_CPP}:server-cuda-{LLAMA_CPP_BUILD}",
        "amd": f"{LLAMA_CPP}:server-rocm-{LLAMA_CPP_BUILD}",
        "intel": f"{LLAMA_CPP}:server-intel-{LLAMA_CPP_BUILD}",
        "cpu": f"{LLAMA_CPP}:server-{LLAMA_CPP_BUILD}",
    },
    "vllm": {
        "nvidia": f"docker.io/vllm/vllm-openai:{VLLM_VERSION}",
        "amd": f"docker.io/vllm/vllm-openai-rocm:{VLLM_VERSION}",
        "cpu": f"public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:{VLLM_VERSION}",
    },
    "sglang": {
        "nvidia": f"docker.io/lmsysorg/sglang:{SGLANG_VERSION}",
        "amd": f"docker.io/lmsysorg/sglang:{SGLANG_VERSION}-rocm720-mi30x",
    },
    "tei": {
        "nvidia": f"ghcr.io/huggingface/text-embeddings-inference:{TEI_VERSION}",
        "cpu": f"ghcr.io/huggingface/text-embeddings-inference:cpu-{TEI_VERSION}",
    },
}


def engine_image(kind: str, target: str) -> str:
    """The usual image of an engine for a kind of accelerator; "" when there is none."""
    return IMAGES.get(kind, {}).get(target, "")


def own_image(target: str) -> str:
    """What greenroom's image is called on the host where its Containerfile was built: no registry is assumed."""
    return f"localhost/greenroom:{__version__}-{target}"
