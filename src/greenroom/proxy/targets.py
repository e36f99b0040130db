"""Which request goes where, told from the method and the raw target alone.

Paths are matched on the raw bytes, exactly; only what steers an engine is looked for on a decoded,
normalised copy, because an engine may decode more than we do.  What is forwarded are always the raw bytes.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import quote, unquote, unquote_plus, unquote_to_bytes

from greenroom.proxy import errors
from greenroom.proxy.admission import Catalog, Refusal
from greenroom.proxy.keys import ANY, Scope

CACHED_TARGETS_MAX = 4096
CACHED_TARGET_BYTES_MAX = 512
ODD_PATH_BYTES_MAX = 4096  # of a path that is not written plainly: looking through it takes time, and any client may send it
DECODE_ROUNDS_MAX = 8  # of percent-encoding; what is wrapped deeper is refused


class Kind(StrEnum):
    """What a request is for."""

    INFERENCE = "inference"  # to a model named in the body or the query
    UPSTREAM = "upstream"  # to a model named in the path, raw
    MODELS = "models"  # GET /v1/models[/{id}]
    HEALTH = "health"
    READY = "ready"
    CONTROL = "control"  # relayed to the control plane
    PREFLIGHT = "preflight"  # OPTIONS on one of our own routes: answered here, without a key
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"


@dataclass(frozen=True, slots=True)
class Route:
    """Where one target leads.

    `name` is the model in the query or the path, as the client wrote it, decoded once; for INFERENCE a `model` in
    the body goes before it.  With `error` the request is refused, with `redirect` it is sent there
    (301 for GET and HEAD, else 308).
    """

    kind: Kind
    path: bytes  # raw path and query to send on; for UPSTREAM without /upstream/{model}
    name: str | None = None
    needs_model: bool = False
    rerank: bool = False
    error: Refusal | None = None
    may_start: bool = True  # False: answered 409 unless the model is ready
    is_settled: bool = False  # INFERENCE: the path names the model, and a body may name no other
    redirect: bytes | None = None
    allow: bytes = b""  # value of `Allow` with METHOD_NOT_ALLOWED
    changes: bool = False  # CONTROL: changes state, so a foreign page may not ask for it
    control: bool = False  # a path of the control plane, also under PREFLIGHT
    needs: int = field(init=False, default=0)  # scopes one of which the key must have; 0: no key is asked for

    def __post_init__(self) -> None:
        needs = _NEEDS[self.kind]
        if self.kind is Kind.CONTROL:
            if self.changes:
                needs = int(Scope.ADMIN)
            else:
                path = self.path.partition(b"?")[0]
                needs = 0 if path in _OPEN_PATHS or path.startswith(b"/ui/") else ANY if path == b"/api/me" else needs
        object.__setattr__(self, "needs", needs)


_NEEDS: Mapping[Kind, int] = {
    Kind.INFERENCE: int(Scope.INFERENCE),
    Kind.UPSTREAM: int(Scope.INFERENCE),
    Kind.MODELS: int(Scope.INFERENCE | Scope.VIEW),  # who may look sees them elsewhere, too
    Kind.HEALTH: 0,
    Kind.READY: 0,
    Kind.CONTROL: int(Scope.VIEW),
    Kind.PREFLIGHT: 0,
    Kind.NOT_FOUND: ANY,
    Kind.METHOD_NOT_ALLOWED: ANY,
}
_OPEN_PATHS = frozenset({b"/", b"/ui", b"/upstream", b"/upstream/", b"/favicon.ico"})  # the page itself, which asks for a key


# ---------------------------------------------------------------------------------------------------- table of routes

_POST = (b"POST",)
_GET = (b"GET", b"HEAD")
_BOTH = (b"GET", b"HEAD", b"POST")

RERANK_PATHS: frozenset[bytes] = frozenset({b"/rerank", b"/reranking", b"/v1/rerank", b"/v1/reranking", b"/v2/rerank"})

_INFERENCE: dict[bytes, tuple[bytes, ...]] = {
    # OpenAI
    b"/v1/chat/completions": _POST,
    b"/v1/completions": _POST,
    b"/v1/responses": _POST,
    b"/v1/embeddings": _POST,
    b"/v1/moderations": _POST,
    b"/v1/audio/speech": _POST,
    b"/v1/audio/transcriptions": _POST,
    b"/v1/audio/translations": _POST,
    b"/v1/audio/voices": _BOTH,
    b"/v1/images/generations": _POST,
    b"/v1/images/edits": _POST,
    b"/v1/images/variations": _POST,
    b"/v1/realtime": _GET,
    # Anthropic
    b"/v1/messages": _POST,
    b"/v1/messages/count_tokens": _POST,
    # Jina, Cohere, vLLM, SGLang
    **dict.fromkeys(RERANK_PATHS, _POST),
    b"/v1/score": _POST,
    b"/score": _POST,
    b"/v1/pooling": _POST,
    b"/pooling": _POST,
    b"/v1/classify": _POST,
    b"/classify": _POST,
    b"/v2/embed": _POST,
    b"/generate": _POST,
    b"/invocations": _POST,
    # TEI
    b"/embed": _POST,
    b"/embed_all": _POST,
    b"/embed_sparse": _POST,
    b"/predict": _POST,
    b"/similarity": _POST,
    b"/decode": _POST,
    # llama-server
    b"/chat/completions": _POST,
    b"/completions": _POST,
    b"/completion": _POST,
    b"/embedding": _POST,
    b"/embeddings": _POST,
    b"/infill": _POST,
    b"/tokenize": _POST,
    b"/v1/tokenize": _POST,
    b"/detokenize": _POST,
    b"/v1/detokenize": _POST,
    b"/apply-template": _POST,
    b"/props": _GET,
    # whisper.cpp, stable-diffusion.cpp
    b"/inference": _POST,
    b"/sdapi/v1/txt2img": _POST,
    b"/sdapi/v1/img2img": _POST,
    b"/sdapi/v1/loras": _GET,
}

# Sent on under another path: engines that have no /v1, and audio.cpp's tasks.
_RENAMED: dict[bytes, bytes] = {
    **{
        b"/v" + path: path
        for path in (
            b"/chat/completions",
            b"/completions",
            b"/responses",
            b"/messages",
            b"/messages/count_tokens",
            b"/embeddings",
            b"/rerank",
            b"/reranking",
        )
    },
    b"/audioapi/v1/tasks/run": b"/v1/tasks/run",
}

# Below these, paths we do not know are an engine's own affair (a new audio route, a stored response).
_INFERENCE_PREFIXES: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (b"/v1/audio/", _BOTH),
    (b"/v1/images/", _BOTH),
    (b"/v1/responses/", (*_BOTH, b"DELETE")),
)

_MODELS_PREFIXES = (b"/v1/models/", b"/models/")
_CONTROL_PREFIXES = (b"/api/", b"/ui/", b"/logs/")
_FIXED: dict[bytes, tuple[Kind, tuple[bytes, ...], bytes | None]] = {
    b"/v1/models": (Kind.MODELS, _GET, None),
    b"/models": (Kind.MODELS, _GET, None),
    b"/health": (Kind.HEALTH, _GET, None),
    b"/wol-health": (Kind.HEALTH, _GET, None),
    b"/ready": (Kind.READY, _GET, None),
    b"/metrics": (Kind.CONTROL, _GET, None),
    b"/logs": (Kind.CONTROL, _GET, None),
    b"/running": (Kind.CONTROL, _GET, None),
    b"/unload": (Kind.CONTROL, _BOTH, None),  # state-changing GET, as llama-swap has it
    b"/favicon.ico": (Kind.CONTROL, _GET, None),
    # Relative, so that a proxy in front may serve all of this below a prefix of its own.
    b"/": (Kind.CONTROL, _GET, b"ui/"),
    b"/ui": (Kind.CONTROL, _GET, b"ui/"),
    b"/upstream": (Kind.CONTROL, _GET, b"ui/"),
    b"/upstream/": (Kind.CONTROL, _GET, b"../ui/"),
}

_UPSTREAM = b"/upstream/"
SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})


# ----------------------------------------------------------------------------------------- what steers an engine itself

# Last segment of a path; every engine we know of, whatever prefix it is mounted under.
# fmt: off
_CONTROL_WORDS: frozenset[str] = frozenset({
    # vLLM
    "sleep", "wake_up", "is_sleeping", "collective_rpc", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
    "pause", "resume", "is_paused", "abort_request", "abort_requests", "server_info", "get_world_size", "release_kv_cache_memory",
    "reload_weights", "start_profile", "stop_profile",
    # SGLang
    "get_server_info", "flush_cache", "pause_generation", "continue_generation", "slow_down", "configure_logging", "freeze_gc",
    "open_session", "close_session", "set_lora", "pd_role_switch", "set_trace_level", "scheduler_receive_url",
    "scheduler_receive_meta_data",
    # llama-server fetches any address for whoever asks, so also the control routes of its neighbours
    "cors-proxy",
    # others
    "shutdown", "restart", "quit", "terminate", "unload", "server-kill", "server-stop", "server-restart", "unload-checkpoint",
    "reload-checkpoint", "reload_config",
})
# Families that grow with every release: anywhere in the last segment.
_CONTROL_FAMILIES = re.compile(
    "load_lora|lora_weights|(?:update|init|start|begin|end|finish|destroy|send|get|shutdown|draft)_weight|weights?_(?:checker|info)"
    "|release_memory|resume_memory|memory_occupation|transfer_engine|hicache|expert_distribution|internal_state|elastic_ep"
    "|external_corp|encoder_url"
)
# fmt: on
_CONTROL_FOLDERS = frozenset({"dumper", "fault_tolerance", "hicache", "storage-backend"})  # all below them
_CONTROL_PAIRS = frozenset({("models", "load"), ("gate", "activate")})
_CONTROL_WRITES = frozenset({"props", "lora-adapters", "adapters", "models", "load", "slots", "options"})  # reading them is harmless
_CONTROL_WRITE_FOLDERS = frozenset({"slots", "adapters"})


def is_engine_control(method: bytes, path: bytes, declared: Set[str] = frozenset()) -> bool:
    """Whether a raw path, in any spelling some engine may understand, steers the engine itself.

    Also true when it cannot be told, because no two readers need agree on what it says.  `declared`: last segments of
    the calls that the configuration names for sleep and wake.
    """
    if _PLAIN_PATH.match(path):  # nearly always
        return _steers(method, path.decode("ascii").lower().strip("/").split("/"), declared)
    text = decoded(path)
    return text is None or any(_ESCAPE.search(reading) or _may_steer(method, reading, declared) for reading in _readings(text))


def _steers(method: bytes, segments: list[str], declared: Set[str]) -> bool:
    """Whether a path of these segments, read as it is, steers."""
    last = segments[-1]
    above = segments[-2] if len(segments) > 1 else ""
    if (
        last in declared
        or _is_control_word(last)
        or last in _CONTROL_FOLDERS
        or above in _CONTROL_FOLDERS
        or (above, last) in _CONTROL_PAIRS
    ):
        return True
    return method not in SAFE_METHODS and (last in _CONTROL_WRITES or above in _CONTROL_WRITE_FOLDERS)


def _is_control_word(segment: str) -> bool:
    if segment in _CONTROL_WORDS:
        return True
    return _CONTROL_FAMILIES.search(segment) is not None and _WORD.match(segment) is not None


def _readings(text: str) -> set[str]:
    """A decoded path in ASCII: other letters are what Unicode calls compatible with it, or nothing."""
    if text.isascii():
        return {text.lower()}
    plain = unicodedata.normalize("NFKC", text).translate(_SLASHES).upper().casefold()  # some letters are ASCII in upper case only
    return {_NOT_ASCII.sub("", text.lower()), _NOT_ASCII.sub("", plain)}


def _may_steer(method: bytes, text: str, declared: Set[str]) -> bool:
    """Whether a decoded path may be read so that it steers.

    Where something in it can move or end a segment (dot segments, `;`, backslashes, a `?`), readers differ in what
    is left, and in which order they take it off: then it is enough that a segment may be left.
    """
    segments = [bare for piece in text.split("/") if (bare := _bare(piece))]
    if not _MOVES.search(text) and not any(_is_dots(segment) for segment in segments):
        return bool(segments) and _steers(method, segments, declared)
    found = {_bare(piece) for piece in _SEPARATES.split(text)}
    if any(_is_control_word(segment) for segment in found) or not found.isdisjoint(_CONTROL_FOLDERS | declared):
        return True
    if any(found.issuperset(pair) for pair in _CONTROL_PAIRS):
        return True
    return method not in SAFE_METHODS and not found.isdisjoint(_CONTROL_WRITES)


_PLAIN_PATH = re.compile(rb"(?:/[A-Za-z0-9_~-]+(?:\.[A-Za-z0-9_~-]+)*)+/?\Z")
_WORD = re.compile(r"[a-z0-9_-]+\Z")
_NOT_ASCII = re.compile(r"[^\0-\x7f]")
_ESCAPE = re.compile(r"%u?[0-9a-fA-F]{2}")
_MOVES = re.compile(r"[\\;?#]")  # may end a segment or the path
_SEPARATES = re.compile(r"[/\\;?#]")
_IGNORED = re.compile(r"[^!-~]|[%+]")  # blanks, and what is left of a broken escape
_NO_TEXT = re.compile(rb"[\0-\x1f\x7f]|%[uU][0-9a-fA-F]{4}")  # some readers drop it, some stop there, cpp-httplib knows %u
_SLASHES = str.maketrans({"\u2044": "/", "\u2215": "/", "\u2216": "\\", "\u29f5": "\\"})  # what code pages make of these


def decoded(path: bytes) -> str | None:
    """A raw path with every layer of percent-encoding taken off.

    None where that is no text on which readers agree: control characters, bytes that are not (the shortest) UTF-8,
    escapes of other kinds, letters beyond ASCII under escapes that are still to be undone, too many layers, too much.
    """
    if len(path) > ODD_PATH_BYTES_MAX:
        return None
    for _ in range(DECODE_ROUNDS_MAX):
        if _NO_TEXT.search(path):
            return None
        before, path = path, unquote_to_bytes(path)
        if path == before:
            try:
                return path.decode("utf-8")
            except UnicodeDecodeError:
                return None
        if not before.isascii():
            return None
    return None


def _bare(segment: str) -> str:
    """A segment without what some reader may leave out of it."""
    bare = _IGNORED.sub("", segment)
    return bare if _is_dots(bare) else bare.rstrip(".")


def _is_dots(segment: str) -> bool:
    return not segment.strip(".")


def _as_utf8(text: str) -> str:
    """Bytes carried as latin-1 become the UTF-8 they are; what is none stays."""
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


# ------------------------------------------------------------------------------------------------------------ routing


class _Memo:
    """What is worked out once for a catalog, and routes already found under it; replaced with the catalog."""

    __slots__ = ("catalog", "depth", "ignored", "routes")

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.routes: dict[tuple[bytes, bytes], Route] = {}
        self.depth = 1 + max((name.count("/") for name in catalog.names), default=0)
        self.ignored = tuple(re.compile(pattern) for pattern in catalog.upstream_ignore_paths)


_EMPTY = Catalog(models={}, names={})
_memo = _Memo(_EMPTY)


def route(method: bytes, target: bytes, catalog: Catalog) -> Route:
    """Where a request goes.  `target` is the raw origin-form target; `method` an upper-case token."""
    global _memo  # noqa: PLW0603 - one catalog at a time is in force; a cache a catalog would only hold old ones
    memo = _memo
    if memo.catalog is not catalog:
        memo = _memo = _Memo(catalog)
    key = (method, target)
    found = memo.routes.get(key)
    if found is not None:
        return found
    found = _find(method, target, memo)
    if len(target) <= CACHED_TARGET_BYTES_MAX:
        if len(memo.routes) >= CACHED_TARGETS_MAX:
            memo.routes.clear()
        memo.routes[key] = found
    return found


def _find(method: bytes, target: bytes, memo: _Memo) -> Route:
    path, _, query = target.partition(b"?")
    if path in _INFERENCE:
        return _inference(method, target, path, query, _INFERENCE[path], memo)
    if path in _RENAMED:
        return _inference(method, _RENAMED[path] + target[len(path) :], path, query, _POST, memo)
    if path in _FIXED:
        kind, methods, redirect = _FIXED[path]
        return _own(method, target, kind, methods, redirect=redirect)
    if path.startswith(_UPSTREAM):
        return _upstream(method, target, path, memo)
    for prefix in _MODELS_PREFIXES:
        if path.startswith(prefix):
            return _model(method, target, path, unquote(path[len(prefix) :].decode("latin-1"), errors="replace"), memo)
    if path.startswith(_CONTROL_PREFIXES):
        return _control(method, target, path)
    for prefix, methods in _INFERENCE_PREFIXES:
        if path.startswith(prefix) and not is_engine_control(method, path, memo.catalog.control_words) and not _is_crooked(path):
            return _inference(method, target, path, query, methods, memo)
    return _nowhere(method, target, path)


def _inference(method: bytes, forward: bytes, path: bytes, query: bytes, methods: tuple[bytes, ...], memo: _Memo) -> Route:
    if method not in methods:
        return _preflight_or_not_allowed(method, forward, path, methods)
    name = query_model(query, memo.catalog.names) if query else None
    rerank = path in RERANK_PATHS or (path in _RENAMED and _RENAMED[path] in RERANK_PATHS)
    may_start = not (path == b"/props" and _query_value(query, b"autoload") in {b"false", b"0"})
    return Route(Kind.INFERENCE, forward, name, needs_model=True, rerank=rerank, may_start=may_start)


def _own(method: bytes, target: bytes, kind: Kind, methods: tuple[bytes, ...], *, redirect: bytes | None = None) -> Route:
    control = kind is Kind.CONTROL
    path = target.partition(b"?")[0]
    if method not in methods:
        return _preflight_or_not_allowed(method, target, path, methods, control=control)
    return Route(kind, target, redirect=redirect, control=control, changes=path == b"/unload")


def _preflight_or_not_allowed(method: bytes, target: bytes, path: bytes, methods: Iterable[bytes], *, control: bool = False) -> Route:
    if method == b"OPTIONS":
        return Route(Kind.PREFLIGHT, target, control=control)
    allowed = [*methods, b"OPTIONS"]
    error = errors.method_not_allowed(_text(method), _text(path), [_text(each) for each in methods])
    return Route(Kind.METHOD_NOT_ALLOWED, target, error=error, allow=b", ".join(allowed))


def _model(method: bytes, target: bytes, path: bytes, name: str, memo: _Memo) -> Route:
    if name not in memo.catalog.names and (is_engine_control(method, path, memo.catalog.control_words) or _is_crooked(path)):
        return _nowhere(method, target, path)
    if method not in _GET:
        return _preflight_or_not_allowed(method, target, path, _GET)
    return Route(Kind.MODELS, target, name)


def _control(method: bytes, target: bytes, path: bytes) -> Route:
    if _is_crooked(path):
        return _nowhere(method, target, path)
    if method == b"OPTIONS":
        return Route(Kind.PREFLIGHT, target, control=True)
    return Route(Kind.CONTROL, target, control=True, changes=method not in SAFE_METHODS)


def _nowhere(method: bytes, target: bytes, path: bytes) -> Route:
    if is_engine_control(method, path):
        return Route(Kind.NOT_FOUND, target, error=errors.engine_control(_text(path)))
    return Route(Kind.NOT_FOUND, target, error=errors.unknown_route(_text(path), _near_paths(path)))


def _is_crooked(path: bytes) -> bool:
    """Whether somebody might read it as another path: dot segments, backslashes, what is no text, by any encoding."""
    text = decoded(path)
    if text is None or "\\" in text:
        return True
    return any(part.partition(";")[0].strip() in {".", ".."} for part in re.split(r"[/?#]", text))


# ----------------------------------------------------------------------------------------------------------- upstream


def _upstream(method: bytes, target: bytes, path: bytes, memo: _Memo) -> Route:
    rest = path[len(_UPSTREAM) :]
    name, used = _longest_name(rest, memo)
    if name is None:
        if is_engine_control(method, path, memo.catalog.control_words):
            return Route(Kind.UPSTREAM, target, error=errors.engine_control(_text(path)))
        asked = unquote(rest.partition(b"/")[0].decode("latin-1"), errors="replace")
        return Route(Kind.UPSTREAM, target, asked, error=errors.unknown_model(asked, errors.near_names(asked, memo.catalog)))
    forward = target[len(_UPSTREAM) + used :]
    if not forward.startswith(b"/"):  # nothing but the model, perhaps a query
        query = b"?" + forward[1:] if forward else b""
        return Route(Kind.UPSTREAM, b"/", name, redirect=b"./" + path.rpartition(b"/")[2] + b"/" + query)
    if is_engine_control(method, forward.partition(b"?")[0], memo.catalog.control_words):
        return Route(Kind.UPSTREAM, forward, name, needs_model=True, error=errors.engine_control(_text(forward)))
    if memo.catalog.models[memo.catalog.names[name]].is_remote:
        return _far(method, forward, name, memo)
    return Route(Kind.UPSTREAM, forward, name, needs_model=True, may_start=not _is_ignored(method, forward, memo))


def _far(method: bytes, forward: bytes, name: str, memo: _Memo) -> Route:
    """Where /upstream/MODEL/ leads when peers serve the model: they serve others, too, so never raw."""
    path, _, query = forward.partition(b"?")
    if not _is_inference(method, path):
        return Route(Kind.UPSTREAM, forward, name, needs_model=True, error=errors.far_path(_text(forward), name))
    other = query_model(query, memo.catalog.names) if query else None
    if other is not None and other != name:
        return Route(Kind.UPSTREAM, forward, name, needs_model=True, error=errors.two_models(name, other))
    return Route(Kind.INFERENCE, forward, name, needs_model=True, rerank=path in RERANK_PATHS, is_settled=True)


def _is_inference(method: bytes, path: bytes) -> bool:
    """Whether it could as well be asked without /upstream."""
    if path in _INFERENCE:
        return method in _INFERENCE[path]
    return any(path.startswith(prefix) and method in methods for prefix, methods in _INFERENCE_PREFIXES) and not _is_crooked(path)


def _longest_name(rest: bytes, memo: _Memo) -> tuple[str | None, int]:
    """(name, bytes of `rest` that spell it): the longest run of whole segments that is a model's name."""
    names = memo.catalog.names
    pieces = rest.split(b"/", memo.depth)[: memo.depth]
    used = len(b"/".join(pieces))
    while pieces:
        spelled = rest[:used].decode("latin-1")
        for name in (unquote(spelled, errors="replace"), _as_utf8(spelled)):
            if name in names:
                return name, used
        used -= len(pieces.pop()) + 1
    return None, 0


def _is_ignored(method: bytes, forward: bytes, memo: _Memo) -> bool:
    if not memo.ignored or method not in {b"GET", b"HEAD"}:
        return False
    path = unquote(forward.partition(b"?")[0].decode("latin-1"), errors="replace")
    return any(pattern.search(path) for pattern in memo.ignored)


# -------------------------------------------------------------------------------------------------------------- query


def _query_value(query: bytes, wanted: bytes) -> bytes | None:
    for pair in query.split(b"&"):
        name, _, value = pair.partition(b"=")
        if name == wanted:
            return value
    return None


def query_model(query: bytes, names: Mapping[str, str]) -> str | None:
    """The model in `?model=`, decoded; a bare `+` is read as itself when that is the name of a model."""
    value = _query_value(query, b"model")
    if not value:
        return None
    text = value.decode("latin-1")
    spaced = unquote_plus(text, errors="replace")
    if b"+" in value and spaced not in names:
        literal = unquote(text, errors="replace")
        if literal in names:
            return literal
    return spaced


def with_model(target: bytes, model: str, *, insert: bool = False) -> bytes:
    """The target with another model in `?model=`, however a reader may find one there.

    Where none stands, it is put there (`insert`) or the target is as it was.
    """
    path, mark, query = target.partition(b"?")
    if not mark and not insert:
        return target
    named = b"model=" + quote(model, safe="/:").encode("ascii")
    pieces = _PAIRS.split(query)  # pairs, and between them what separates them
    pieces[::2] = [named if _names_model(pair) else pair for pair in pieces[::2]]
    if insert and named not in pieces:
        return path + b"?" + b"&".join(filter(None, (query, named)))
    return path + mark + b"".join(pieces)


_PAIRS = re.compile(rb"([&;])")  # some readers take `;` for `&`


def _names_model(pair: bytes) -> bool:
    name = pair.partition(b"=")[0]
    return unquote_plus(name.decode("latin-1"), errors="replace").strip().lower() == "model"


# -------------------------------------------------------------------------------------------------------------- words


def _text(raw: bytes) -> str:
    return raw.decode("latin-1")


_KNOWN_PATHS = [_text(path) for path in (*_INFERENCE, *_FIXED) if len(path) > 1]


def _near_paths(path: bytes) -> list[str]:
    if len(path) > errors.SHOWN_CHARS_MAX:
        return []
    plain = "/" + "/".join(filter(None, map(_bare, (decoded(path) or "").lower().split("/"))))
    return difflib.get_close_matches(plain, _KNOWN_PATHS, n=1, cutoff=0.8)
