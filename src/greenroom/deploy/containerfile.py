"""The Containerfile of greenroom's own image: greenroom beside the engines that a configuration uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenroom import __version__
from greenroom.deploy import images

FILE = "Containerfile"
UV_IMAGE = "ghcr.io/astral-sh/uv:0.8"
PYTHON_VERSION = "3.12"
WHEEL = f"greenroom-{__version__}-py3-none-any.whl"
FIRST = f"First: {WHEEL} beside {FILE}, whose head says how it is made."
LLAMA_PLACE = "/opt/llama.cpp"  # beside a larger engine
ORDER = ("vllm", "sglang", "tei", "llama_server")  # the first that is used is the base: the larger ones cannot be copied


def text_of(kinds: Sequence[str], target: str, named: Mapping[str, str]) -> str:
    """For engines `kinds` on `target`; `named` are images the operator chose, by engine."""
    base, *others = _known(kinds, target, named)
    lines = [
        "# greenroom and the engines it starts, in one image.  `greenroom generate` has written this file.",
        f"#   podman build -t {images.own_image(target)} -f {FILE} .",
        f"FROM {named.get(base) or images.engine_image(base, target)}",
        # No registry: whoever is first to publish something under this name there would get to run here.
        "# greenroom's wheel, to be put beside this file.  From its source: pip wheel --no-deps --wheel-dir . SOURCE",
        f"ARG WHEEL={WHEEL}",
        "COPY ${WHEEL} /opt/wheel/",
        f"COPY --from={UV_IMAGE} /uv /usr/local/bin/uv",
        f"RUN uv python install --install-dir /opt/python {PYTHON_VERSION} \\",
        f" && uv venv --python-preference only-managed --python {PYTHON_VERSION} /opt/greenroom \\",
        " && uv pip install --no-cache --python /opt/greenroom/bin/python /opt/wheel/*.whl \\",
        " && ln -s /opt/greenroom/bin/greenroom /usr/local/bin/greenroom",
    ]
    path = ["/app"] if base == "llama_server" else []
    for other in others:
        if other == "llama_server":
            lines.append(f"COPY --from={named.get(other) or images.engine_image(other, target)} /app {LLAMA_PLACE}")
            path.append(LLAMA_PLACE)
        else:
            lines.append(f"# {other} does not fit beside {base} in one image: give its models --mode engines, or another set.")
    if path:
        lines += [f"ENV PATH={':'.join(path)}:$PATH", f"ENV LD_LIBRARY_PATH={':'.join(path)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"]
    if LLAMA_PLACE in path:
        lines += [
            "# Made for another image: better no image than one in which it cannot start, or finds no GPU (the driver comes later).",
            f"RUN llama-server --version && ! ldd {LLAMA_PLACE}/*.so 2>&1 | grep 'not found' | grep -v 'libcuda.so'",
        ]
    lines += ["# The port of greenroom, not that of an engine.", "HEALTHCHECK NONE", 'ENTRYPOINT ["greenroom"]']
    return "\n".join(lines) + "\n"


def held(kinds: Sequence[str], target: str, named: Mapping[str, str]) -> frozenset[str]:
    """The engines that are in it."""
    base, *others = _known(kinds, target, named)
    return frozenset({base, *({"llama_server"} & set(others))})


def _known(kinds: Sequence[str], target: str, named: Mapping[str, str]) -> list[str]:
    """Those that an image is known for; the first is the base."""
    return [kind for kind in ORDER if kind in kinds and (named.get(kind) or images.engine_image(kind, target))] or ["llama_server"]
