"""Rerank: one shape for clients, whatever the engine behind speaks.

Clients speak J (Jina, Cohere: `documents` in, `{"results": [{"index", "relevance_score"}]}` out) or T (TEI: `texts`
in, a bare list `[{"index", "score"}]` out) and get the same back.  Engines are asked in their own dialect, for
all documents; cutting to `top_n`, sorting and echoing documents happens here, so it is the same for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from greenroom.proxy import errors
from greenroom.proxy.admission import Refusal

_J_PATH = b"/v1/rerank"
_T_PATH = b"/rerank"
_REASON_CHARS_MAX = 500
DOCUMENTS_MAX = 65_536  # of one request: each is looked at while nobody else is served
_NOT_IN_MODE = "The engine is not in rerank mode (llama-server needs --reranking; elsewhere the model must be a reranker)"
_OURS = frozenset({"query", "documents", "texts", "top_n", "return_documents", "return_text"})
_DIALECT_MISMATCH = frozenset({404, 405, 422})  # how an engine says that it speaks the other one

_Fields: TypeAlias = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields)
_items = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the client wants, read once."""

    query: msgspec.Raw
    texts: tuple[msgspec.Raw, ...]  # as engines take them
    documents: tuple[msgspec.Raw, ...]  # as the client wrote them
    top_n: int  # already cut to the number of documents
    is_echoed: bool
    is_t_shaped: bool
    model: str | None
    others: _Fields  # passed on as they are


@dataclass(frozen=True, slots=True)
class RerankPlan:
    """What to send to the engine, and how to read its answer."""

    path: bytes
    body: bytes
    asked: _Asked
    other: tuple[bytes, bytes] | None = None  # path and body in the other dialect

    def fallback(self, status: int) -> RerankPlan | None:
        """The plan to try once more with when an engine of unknown dialect answered this status."""
        if self.other is None or status not in _DIALECT_MISMATCH:
            return None
        path, body = self.other
        return replace(self, path=path, body=body, other=None)

    def answer(self, status: int, body: bytes) -> tuple[int, bytes]:
        """(status, JSON body) for the client; errors of the engine keep their status, in our error shape."""
        if not 200 <= status < 300:
            return status, _error(status, body)
        try:
            results, rest = _read(body, len(self.asked.documents))
        except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError, OverflowError) as exc:
            message = f"The engine's rerank answer could not be read ({errors.shown(str(exc))}); look at its log."
            return 502, errors.error_body(Refusal(502, "engine_answer", message))
        results.sort(key=lambda found: (-found[1], found[0]))
        return 200, _written(results[: self.asked.top_n], rest, self.asked)


def plan(body: bytes | bytearray, path: bytes, engine: str) -> RerankPlan | Refusal:
    """How to serve a rerank request.  `path` is the raw path and query, `engine` the model's dialect.  Refusal: 400."""
    try:
        fields = _fields.decode(body)
        asked = _read_request(fields, engine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return errors.bad_request("bad_json", "The body is not a JSON object; send `query` and `documents`.")
    if isinstance(asked, Refusal):
        return asked
    mark, query = path.partition(b"?")[1:]
    in_j = (_J_PATH + mark + query, _in_j(asked))
    in_t = (_T_PATH + mark + query, _in_t(asked))
    if engine == "tei":
        return RerankPlan(*in_t, asked)
    return RerankPlan(*in_j, asked, other=in_t if engine == "generic" else None)


# ------------------------------------------------------------------------------------------------------------ requests


def _read_request(fields: _Fields, engine: str) -> _Asked | Refusal:
    is_t_shaped = "texts" in fields and "documents" not in fields
    key = "texts" if is_t_shaped else "documents"
    query = fields.get("query")
    if query is None or not (_is_string(query) or _is_multimodal(query, engine)):
        return errors.bad_request("bad_query", "`query` must be a string; send what the documents are compared with.")
    raw = fields.get(key)
    if raw is None or bytes(raw)[:1] != b"[":
        return errors.bad_request("bad_documents", f"`{key}` must be a list of strings or of objects with `text`.")
    documents = tuple(_items.decode(raw))
    if not documents:
        return errors.bad_request("bad_documents", f"`{key}` is empty; send at least one document.")
    if len(documents) > DOCUMENTS_MAX:
        return errors.bad_request("bad_documents", f"`{key}` has {len(documents):,} entries; send at most {DOCUMENTS_MAX:,} at once.")
    texts: list[msgspec.Raw] = []
    for position, document in enumerate(documents):
        text = _text_of(document, engine)
        if text is None:
            return errors.bad_request("bad_documents", f"`{key}[{position}]` must be a string or an object with a string `text`.")
        texts.append(text)
    top_n = _top_n(fields.get("top_n"), len(documents))
    if top_n is None:
        return errors.bad_request("bad_top_n", "`top_n` must be a whole number of at least 0 (0 or left out: all documents).")
    return _Asked(
        query=query,
        texts=tuple(texts),
        documents=documents,
        top_n=top_n,
        is_echoed=_is_true(fields.get("return_text" if is_t_shaped else "return_documents")),
        is_t_shaped=is_t_shaped,
        model=_model(fields.get("model")),
        others={name: value for name, value in fields.items() if name not in _OURS},
    )


def _is_string(value: msgspec.Raw) -> bool:
    return bytes(value)[:1] == b'"'


def _is_multimodal(value: msgspec.Raw, engine: str) -> bool:
    """vLLM and SGLang take objects with images in place of text; the others would stumble over them."""
    return engine in {"vllm", "sglang", "generic"} and bytes(value)[:1] == b"{"


def _text_of(document: msgspec.Raw, engine: str) -> msgspec.Raw | None:
    if _is_string(document):
        return document
    if bytes(document)[:1] != b"{":
        return None
    text = _fields.decode(document).get("text")
    if text is not None and _is_string(text):
        return text
    return document if _is_multimodal(document, engine) else None


def _top_n(raw: msgspec.Raw | None, count: int) -> int | None:
    value = 0 if raw is None else msgspec.json.decode(raw)
    if value is None:
        value = 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return min(value or count, count)


def _is_true(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw) in {b"true", b'"true"', b"1"}


def _model(raw: msgspec.Raw | None) -> str | None:
    return msgspec.json.decode(raw, type=str) if raw is not None and _is_string(raw) else None


def _in_j(asked: _Asked) -> bytes:
    return msgspec.json.encode({**asked.others, "query": asked.query, "documents": asked.texts})


def _in_t(asked: _Asked) -> bytes:
    others = {name: value for name, value in asked.others.items() if name != "model"}
    return msgspec.json.encode({**others, "query": asked.query, "texts": asked.texts})


# ------------------------------------------------------------------------------------------------------------- answers


def _read(body: bytes, count: int) -> tuple[list[tuple[int, float]], _Fields]:
    """((index, score) in the engine's order, the other fields).  Raises ValueError and its kin when not understood."""
    if body.lstrip()[:1] == b"[":
        rest: _Fields = {}
        raw = msgspec.Raw(body)
    else:
        rest = _fields.decode(body)
        key = "results" if "results" in rest else "data"
        raw = rest.pop(key)
    results = [_one(item) for item in msgspec.json.decode(raw, type=list[dict[str, Any]])]
    indices = {index for index, _ in results}
    if len(indices) != len(results) or (indices and not 0 <= min(indices) <= max(indices) < count):
        raise ValueError("it names documents that were not sent, or one twice")
    return results, rest


def _one(item: dict[str, Any]) -> tuple[int, float]:
    index = item["index"]
    score = item["relevance_score"] if "relevance_score" in item else item["score"]
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError("an index is no number")
    if score is None:
        return index, -math.inf  # what some engines write for a score that is not a number: last
    return index, float(score)


def _written(results: list[tuple[int, float]], rest: _Fields, asked: _Asked) -> bytes:
    score_key = "score" if asked.is_t_shaped else "relevance_score"
    entries: list[dict[str, Any]] = []
    for index, score in results:
        entry: dict[str, Any] = {"index": index, score_key: score if math.isfinite(score) else None}
        if asked.is_echoed and asked.is_t_shaped:
            entry["text"] = asked.texts[index]
        elif asked.is_echoed:
            document = asked.documents[index]
            entry["document"] = {"text": document} if _is_string(document) else document
        entries.append(entry)
    if asked.is_t_shaped:
        return msgspec.json.encode(entries)
    head: dict[str, Any] = {"model": asked.model} if asked.model is not None else {}
    return msgspec.json.encode({**head, "object": "list", **rest, "results": entries})


def _error(status: int, body: bytes) -> bytes:
    message, is_shaped = _engine_reason(body)
    if status == 501:
        return errors.error_body(Refusal(501, "not_in_rerank_mode", f"{_NOT_IN_MODE}; it said: {message}"))
    if is_shaped:
        return body
    return errors.error_body(Refusal(status, "engine_error", message))


def _engine_reason(body: bytes) -> tuple[str, bool]:
    """(what the engine says, whether it says so in OpenAI's shape)."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body[:_REASON_CHARS_MAX].decode("utf-8", "replace").strip()
        return text or "nothing", False
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
        return str(message)[:_REASON_CHARS_MAX], error is not found and isinstance(error.get("message"), str)
    return str(error)[:_REASON_CHARS_MAX], False
