"""What is told of a request: to the hooks, and in the answer's head.  Texts that repeat are built once."""

from __future__ import annotations

from typing import Final, NamedTuple

from .heads import safe_value

_REMEMBERED_MAX: Final = 4096  # texts of each kind
_model_lines: dict[tuple[str, str], bytes] = {}
_paths: dict[bytes, str] = {}


class Record(NamedTuple):
    """What there is to know of a request that ended; passed once to the hooks."""

    model: str  # "" when it named none
    kind: str
    method: str
    path: str  # without query
    client: str  # key name or address
    status: int  # told to the client; 0: nothing was
    outcome: str  # an Outcome, or "refused" when no engine saw it
    start: str  # hot | wake | cold | ""
    bytes_in: int
    bytes_out: int
    waited_ms: int
    first_byte_s: float | None  # since the admission
    took_s: float
    tokens_in: int | None = None  # as the engine counted them; None: it did not say
    tokens_out: int | None = None
    request: int = 0  # its number; 0 = it was never asked for
    peer: str = ""  # who answered; "" = an engine of ours, or nobody


def start_lines(model: str, start: str) -> bytes:
    """The header lines that name the model and how it was started."""
    key = (model, start)
    lines = _model_lines.get(key)
    if lines is None:
        if len(_model_lines) >= _REMEMBERED_MAX:
            _model_lines.clear()
        lines = _model_lines[key] = b"X-Greenroom-Model: %b\r\nX-Greenroom-Start: %b\r\n" % (safe_value(model), safe_value(start))
    return lines


def path_text(target: bytes) -> str:
    """A raw target without its query (which may hold secrets), for people."""
    text = _paths.get(target)
    if text is None:
        text = target.partition(b"?")[0].decode("latin-1")
        if len(_paths) >= _REMEMBERED_MAX:
            _paths.clear()
        if len(target) <= 256:
            _paths[target] = text
    return text
