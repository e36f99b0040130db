"""One rerank shape for clients, whatever the engine behind speaks (B53)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.proxy.admission import Refusal
from greenroom.proxy.rerank import DOCUMENTS_MAX, RerankPlan, plan

PATHS = (b"/rerank", b"/v1/rerank", b"/v2/rerank", b"/reranking", b"/v1/reranking")
ENGINES = ("llama_server", "vllm", "sglang", "tei", "generic")
ASKED = {"model": "r", "query": "q", "documents": ["x", {"text": "y"}, "z"], "top_n": 2}
SCORES = {"x": 0.1, "y": 0.9, "z": 0.5}


def asks(engine: str, request: Any = ASKED, path: bytes = b"/v1/rerank") -> RerankPlan:
    planned = plan(json.dumps(request).encode(), path, engine)
    assert isinstance(planned, RerankPlan), planned
    return planned


def an_engine(kind: str, path: bytes, body: bytes) -> tuple[int, bytes]:
    """J: `documents` at /v1/rerank only, results unsorted.  T: `texts` at /rerank only, a bare sorted list."""
    request = json.loads(body)
    if kind == "J":
        if path != b"/v1/rerank":
            return 404, b"{}"
        assert all(isinstance(document, str) for document in request["documents"])
        results = [{"index": at, "relevance_score": SCORES.get(text, 0.0)} for at, text in enumerate(request["documents"])]
        return 200, json.dumps({"model": "weights.gguf", "object": "list", "usage": {"total_tokens": 9}, "results": results}).encode()
    if path != b"/rerank" or "texts" not in request:
        return 422, b'{"error":"missing field `texts`","error_type":"Validation"}'
    ranked = sorted(enumerate(request["texts"]), key=lambda pair: -SCORES.get(pair[1], 0.0))
    return 200, json.dumps([{"index": at, "score": SCORES.get(text, 0.0)} for at, text in ranked]).encode()


def ask(engine: str, speaks: str, request: Any = ASKED, path: bytes = b"/v1/rerank") -> tuple[int, Any]:
    planned: RerankPlan | None = asks(engine, request, path)
    while planned is not None:
        status, raw = an_engine(speaks, planned.path, planned.body)
        other = planned.fallback(status)
        if other is None:
            status, got = planned.answer(status, raw)
            return status, json.loads(got)
        planned = other
    raise AssertionError


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("engine", "speaks"), [("llama_server", "J"), ("vllm", "J"), ("sglang", "J"), ("tei", "T"), ("generic", "J"), ("generic", "T")]
)
def test_all_paths_give_the_same_shape_for_every_engine(path: bytes, engine: str, speaks: str) -> None:
    """Sorted by score, cut to top_n, indices in the client's order, J-shaped."""
    status, got = ask(engine, speaks, path=path)

    assert status == 200
    assert got["results"] == [{"index": 1, "relevance_score": 0.9}, {"index": 2, "relevance_score": 0.5}]
    assert got["object"] == "list"
    assert got["model"]
    assert set(got) <= {"model", "object", "usage", "results"}


@pytest.mark.parametrize(("engine", "speaks"), [("llama_server", "J"), ("tei", "T")])
@pytest.mark.parametrize(("top_n", "count"), [(0, 3), (None, 3), ("absent", 3), (1, 1), (2, 2), (3, 3), (99, 3)])
def test_top_n_is_honoured_whoever_answers(engine: str, speaks: str, top_n: Any, count: int) -> None:
    """0, null and absent mean all; larger than the list means all."""
    request = {key: value for key, value in {**ASKED, "top_n": top_n}.items() if value != "absent"}

    assert len(ask(engine, speaks, request)[1]["results"]) == count


@pytest.mark.parametrize(("engine", "speaks"), [("llama_server", "J"), ("tei", "T")])
def test_documents_are_returned_as_the_client_wrote_them(engine: str, speaks: str) -> None:
    """`return_documents`: strings become {"text"}, objects come back whole; without it there are none."""
    request = {**ASKED, "documents": ["x", {"text": "y", "title": "kept"}], "return_documents": True}

    assert ask(engine, speaks, request)[1]["results"] == [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "y", "title": "kept"}},
        {"index": 0, "relevance_score": 0.1, "document": {"text": "x"}},
    ]
    assert "document" not in ask(engine, speaks)[1]["results"][0]


@pytest.mark.parametrize(("engine", "speaks"), [("llama_server", "J"), ("tei", "T"), ("generic", "T")])
def test_a_thousand_documents_keep_their_indices(engine: str, speaks: str) -> None:
    """Every index of the answer names the client's own document."""
    order = random.Random(1)
    documents = [f"d{at}" for at in range(1000)]
    SCORES.update({text: order.random() for text in documents})

    got = ask(engine, speaks, {**ASKED, "documents": documents, "top_n": 1000})[1]["results"]

    assert sorted(found["index"] for found in got) == list(range(1000))
    assert [found["relevance_score"] for found in got] == [SCORES[documents[found["index"]]] for found in got]
    assert [found["relevance_score"] for found in got] == sorted((SCORES[text] for text in documents), reverse=True)


@pytest.mark.parametrize(("engine", "speaks"), [("llama_server", "J"), ("vllm", "J"), ("tei", "T")])
def test_a_client_that_speaks_tei_gets_tei_back(engine: str, speaks: str) -> None:
    """`texts` in, a bare sorted list out, from any engine; `return_text` works."""
    request = {"model": "r", "query": "q", "texts": ["x", "y", "z"]}

    assert ask(engine, speaks, request, b"/rerank") == (
        200,
        [{"index": 1, "score": 0.9}, {"index": 2, "score": 0.5}, {"index": 0, "score": 0.1}],
    )
    assert ask(engine, speaks, {**request, "return_text": True}, b"/rerank")[1][0] == {"index": 1, "score": 0.9, "text": "y"}


def test_what_the_engine_is_asked() -> None:
    """Documents as strings, other fields as they came, none of what we do ourselves; TEI is not told a model."""
    request = {**ASKED, "return_documents": True, "truncate": True, "max_tokens_per_doc": 1e3}

    j, t = asks("llama_server", request, b"/v2/rerank?x=1"), asks("tei", request, b"/v1/rerank?x=1")

    assert (j.path, json.loads(j.body)) == (
        b"/v1/rerank?x=1",
        {"model": "r", "truncate": True, "max_tokens_per_doc": 1e3, "query": "q", "documents": ["x", "y", "z"]},
    )
    assert (t.path, json.loads(t.body)) == (
        b"/rerank?x=1",
        {"truncate": True, "max_tokens_per_doc": 1e3, "query": "q", "texts": ["x", "y", "z"]},
    )


def test_only_an_engine_of_unknown_dialect_is_asked_twice() -> None:
    """J first; T once, when the answer says that J is not spoken there."""
    first = asks("generic")

    assert first.path == b"/v1/rerank"
    assert [first.fallback(status) is not None for status in (404, 405, 422, 200, 400, 500, 501, 503)] == [True] * 3 + [False] * 5
    second = first.fallback(404)
    assert second is not None
    assert (second.path, second.fallback(404)) == (b"/rerank", None)
    assert asks("llama_server").fallback(404) is None


@pytest.mark.parametrize(
    ("answer", "order"),
    [
        ([{"index": 0, "score": 1}, {"index": 1, "score": 2}, {"index": 2, "score": -3}], [1, 0]),
        ({"results": [{"index": 2, "relevance_score": 1}, {"index": 0, "relevance_score": 1}, {"index": 1, "relevance_score": 0}]}, [0, 2]),
        ({"results": [{"index": 2, "score": 4.5, "document": {"text": "z"}}], "id": "rr-1"}, [2]),
        ({"data": [{"index": 1, "score": 1}, {"index": 0, "score": 2}], "object": "list"}, [0, 1]),
        ({"results": [{"index": 0, "relevance_score": None}, {"index": 1, "relevance_score": -9.5}]}, [1, 0]),
        ({"results": []}, []),
    ],
)
def test_every_known_answer_is_understood(answer: Any, order: list[int]) -> None:
    """Bare lists, `results`, `data`; ties in the client's order; a score that is no number comes last."""
    status, got = asks("vllm").answer(200, json.dumps(answer).encode())

    assert (status, [found["index"] for found in json.loads(got)["results"]]) == (200, order)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"oops", b"{}", b"7", b"null", b'{"results":7}', b'{"results":[7]}', b'{"results":[{"index":0}]}',
        b'{"results":[{"relevance_score":1}]}', b'{"results":[{"index":"0","relevance_score":1}]}', b'[{"index":true,"score":1}]',
        b'[{"index":3,"score":1}]', b'[{"index":-1,"score":1}]', b'[{"index":1,"score":1},{"index":1,"score":2}]',
        b'[{"index":0,"score":"high"}]', b'[{"index":0,"score":[]}]', b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_502(answer: bytes) -> None:
    """Rather an error than a ranking of documents that were not sent."""
    status, got = asks("vllm").answer(200, answer)

    assert (status, json.loads(got)["error"]["code"]) == (502, "engine_answer")


@pytest.mark.parametrize(
    "body",
    [b'{"error":{"code":501,"message":"This server does not support reranking","type":"not_supported_error"}}', b"", b"Not Implemented"],
)
def test_501_is_passed_on_with_a_hint(body: bytes) -> None:
    """The client learns that the engine was not started as a reranker."""
    status, got = asks("llama_server").answer(501, body)

    error = json.loads(got)["error"]
    assert (status, error["code"], error["type"]) == (501, "not_in_rerank_mode", "not_supported_error")
    assert "not in rerank mode" in error["message"]
    assert "--reranking" in error["message"]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error":{"message":"too long","type":"x","code":400}}', "too long"),
        (413, b'{"error":"batch size 1000 > maximum allowed batch size 32","error_type":"Validation"}', "batch size 1000"),
        (422, b'{"detail":"field required"}', "field required"),
        (404, b'{"detail":"Not Found"}', "Not Found"),
        (500, b'{"object":"error","message":"boom","code":500}', "boom"),
        (503, b"Service Unavailable", "Service Unavailable"),
        (500, b"", "nothing"),
        (500, b"\xff" * 9000, "\ufffd"),
        (500, b"[]", "[]"),
    ],
)
def test_other_errors_keep_their_status_and_get_our_shape(status: int, body: bytes, message: str) -> None:
    """Whatever the engine's way of saying it."""
    got_status, got = asks("tei").answer(status, body)

    error = json.loads(got)["error"]
    assert got_status == status
    assert error["message"].startswith(message)
    assert len(error["message"]) <= 500


BROKEN = [
    (b"", "bad_json"),
    (b"[]", "bad_json"),
    (b"{", "bad_json"),
    ({}, "bad_query"),
    ({"query": "q"}, "bad_documents"),
    ({"documents": ["x"]}, "bad_query"),
    ({"query": None, "documents": ["x"]}, "bad_query"),
    ({"query": 7, "documents": ["x"]}, "bad_query"),
    ({"query": {"text": "q"}, "documents": ["x"]}, "bad_query"),
    ({"query": "q", "documents": []}, "bad_documents"),
    ({"query": "q", "texts": []}, "bad_documents"),
    ({"query": "q", "documents": [], "texts": ["x"]}, "bad_documents"),
    ({"query": "q", "documents": "x"}, "bad_documents"),
    ({"query": "q", "documents": None}, "bad_documents"),
    ({"query": "q", "documents": {"0": "x"}}, "bad_documents"),
    ({"query": "q", "documents": ["x", 7]}, "bad_documents"),
    ({"query": "q", "documents": ["x", None]}, "bad_documents"),
    ({"query": "q", "documents": [["x"]]}, "bad_documents"),
    ({"query": "q", "documents": [{"title": "x"}]}, "bad_documents"),
    ({"query": "q", "documents": [{"text": 7}]}, "bad_documents"),
    ({"query": "q", "documents": ["x"], "top_n": -1}, "bad_top_n"),
    ({"query": "q", "documents": ["x"], "top_n": "2"}, "bad_top_n"),
    ({"query": "q", "documents": ["x"], "top_n": 1.5}, "bad_top_n"),
    ({"query": "q", "documents": ["x"], "top_n": True}, "bad_top_n"),
    ({"query": "q", "documents": ["x"], "top_n": [1]}, "bad_top_n"),
]


@pytest.mark.parametrize(("request_", "code"), BROKEN)
@pytest.mark.parametrize("engine", ["llama_server", "tei"])
def test_a_broken_request_is_400_before_any_engine_is_asked(request_: Any, code: str, engine: str) -> None:
    """The empty list too."""
    refused = plan(request_ if isinstance(request_, bytes) else json.dumps(request_).encode(), b"/rerank", engine)

    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (400, code)


def test_engines_that_take_images_get_them() -> None:
    """vLLM and its kin take objects in place of text; they are passed on as they are."""
    image = {"content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}

    sent = json.loads(asks("vllm", {"query": image, "documents": [image, {"text": "y"}]}).body)

    assert (sent["query"], sent["documents"]) == (image, [image, "y"])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=30), st.integers(0, 40), st.randoms())
def test_any_scores_in_any_order_come_out_ranked(scores: list[float], top_n: int, chance: random.Random) -> None:
    """Highest first, ties in the client's order, the right number of them."""
    answer = [{"index": at, "relevance_score": score} for at, score in enumerate(scores)]
    chance.shuffle(answer)
    planned = asks("llama_server", {"query": "q", "documents": ["d"] * len(scores), "top_n": top_n})

    got = json.loads(planned.answer(200, json.dumps({"results": answer}).encode())[1])["results"]

    expected = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    assert [found["index"] for found in got] == expected[: top_n or len(scores)]


@given(st.binary(max_size=80))
def test_any_engine_answer_is_handled(body: bytes) -> None:
    """Nothing the engine writes makes it raise; what comes out is JSON."""
    for status in (200, 404, 501):
        json.loads(asks("tei").answer(status, body)[1])


def test_a_request_names_a_bounded_number_of_documents() -> None:
    """They are looked at one by one, and everybody else waits."""
    refused = plan(json.dumps({"query": "q", "documents": [""] * (DOCUMENTS_MAX + 1)}).encode(), b"/v1/rerank", "vllm")

    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (400, "bad_documents")
    assert "65,537" in refused.message
