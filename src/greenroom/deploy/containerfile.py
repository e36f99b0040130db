"""The Containerfile of greenroom's own image: greenroom beside the engines that a configuration uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenroom import __version__
from greenroom.deploy import images

FILE = "Containerfile"
UV_IMAGE = "ghcr.io/astral-sh/uv:0.8"
PYTHON_VERSION = "3.12"
ORDER = ("vllm", "sglang", "tei", "llama_server")  # the first that is used is the base: the larger ones cannot be copied


def text_of(kinds: Sequence[str], target: str, named: Mapping[str, str]) -> str:
    """For engines `kinds` on `target`; `named` are images the operator chose, by engine."""
    known = [kind for kind in ORDER if kind in kinds and (named.get(kind) or images.engine_image(kind, target))]
    if not known:
        known = ["llama_server"]
    base, *others = known
    lines = [
        "# greenroom and the engines it starts, in one image.  `greenroom generate` has written this file.",
        f"#   podman build -t {images.own_image(target)} -f {FILE} .",
        f"FROM {named.get(base) or images.engine_image(base, target)}",
        "# What pip would take: a version, the address of a repository, or a wheel copied in above this line.",
        f"ARG GREENROOM=greenroom=={__version__}",
        f"COPY --from={UV_IMAGE} /uv /usr/local/bin/uv",
        f"RUN uv python install --install-dir /opt/python {PYTHON_VERSION} \\",
        f" && uv venv --python-preference only-managed --python {PYTHON_VERSION} /opt/greenroom \\",
        ' && uv pip install --no-cache --python /opt/greenroom/bin/python "$GREENROOM" \\',
        " && ln -s /opt/greenroom/bin/greenroom /usr/local/bin/greenroom",
    ]
    path = ["/app"] if base == "llama_server" else []
    for other in others:
        if other == "llama_server":
            lines.append(f"COPY --from={named.get(other) or images.engine_image(other, target)} /app /opt/llama.cpp")
            path.append("/opt/llama.cpp")
        else:
            lines.append(f"# {other} does not fit beside {base} in one image: give its models --mode engines, or another set.")
    if path:
        lines += [f"ENV PATH={':'.join(path)}:$PATH", f"ENV LD_LIBRARY_PATH={':'.join(path)}:$LD_LIBRARY_PATH"]
    lines += ["# The port of greenroom, not that of an engine.", "HEALTHCHECK NONE", 'ENTRYPOINT ["greenroom"]']
    return "\n".join(lines) + "\n"
