"""The counts of a request are those of its engine, whatever the route, the framing and the pieces; or they are not known."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.facts import Outcome
from greenroom.proxy.record import Record
from greenroom.proxy.tokens import HEAD_BYTES, SHORT_BYTES, TAIL_BYTES, Counts, Edges, count, header_count

from .relay_world import EngineSide, Seen, World, a_caller, a_world, chunked, get, on_uvloop, post, until

UNKNOWN = (None, None)
LONG = "word " * 10_000


def line(value: Any, **how: Any) -> bytes:
    return json.dumps(value, **how).encode()


def sse(*events: Any, done: bool = True) -> bytes:
    told = b"".join(b"data: %b\n\n" % line(event) for event in events)
    return told + (b"data: [DONE]\n\n" if done else b"")


def named(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), line(event)) for event in events)


def deltas(number: int) -> list[Any]:
    return [{"choices": [{"delta": {"content": f"w{i} "}}], "object": "chat.completion.chunk"} for i in range(number)]


OPENAI = {"prompt_tokens": 28, "completion_tokens": 3, "total_tokens": 31, "prompt_tokens_details": {"cached_tokens": 27}}
FLAT = {"prompt_tokens": 28, "total_tokens": 31, "completion_tokens": 3}
TIMINGS = {"cache_n": 27, "prompt_n": 1, "prompt_ms": 0.22, "predicted_n": 3, "predicted_ms": 0.095, "predicted_per_second": 10526.3}
CHAT = {"id": "c", "object": "chat.completion", "choices": [{"message": {"content": "hi"}}]}
RESPONSES = {
    "input_tokens": 28,
    "input_tokens_details": {"cached_tokens": 3},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 1},
}
ANTHROPIC = {"cache_read_input_tokens": 27, "input_tokens": 1, "output_tokens": 3}
MESSAGE_START = {"type": "message_start", "message": {"usage": ANTHROPIC | {"output_tokens": 0}}}
MESSAGE_DELTA = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}
VECTORS = [{"index": i, "embedding": [i / 7] * 300} for i in range(30)]

WHOLE: dict[str, tuple[bytes, Counts]] = {
    "chat": (line({**CHAT, "usage": FLAT}), (28, 3)),
    "chat, compact": (line({**CHAT, "usage": FLAT}, separators=(",", ":")), (28, 3)),
    "chat, indented": (line({**CHAT, "usage": OPENAI}, indent=2), (28, 3)),
    "chat, details": (line({**CHAT, "usage": OPENAI, "timings": TIMINGS}), (28, 3)),
    "chat, more behind it": (line({**CHAT, "usage": OPENAI, "prompt_logprobs": None, "kv_transfer_params": None}), (28, 3)),
    "long chat": (line({"choices": [{"message": {"content": LONG}}], "usage": FLAT}), (28, 3)),
    "no counts": (line(CHAT), UNKNOWN),
    "usage null": (line({**CHAT, "usage": None}), UNKNOWN),
    "responses": (line({"output": [{"content": LONG}], "usage": RESPONSES, "user": None, "metadata": {}}), (28, 3)),
    "messages": (line({"content": [{"text": "hi"}], "usage": ANTHROPIC}), (28, 3)),
    "messages, plain": (line({"content": [{"text": "hi"}], "usage": {"input_tokens": 28, "output_tokens": 3}}), (28, 3)),
    "embeddings, first": (line({"model": "e", "usage": {"prompt_tokens": 9, "total_tokens": 9}, "data": VECTORS}), (9, None)),
    "embeddings, last": (
        line({"data": VECTORS, "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}}),
        (9, 0),
    ),
    "rerank": (line({"model": "r", "usage": {"total_tokens": 20}, "results": [{"index": 0, "relevance_score": 0.3}]}), (20, None)),
    "completion": (line({"content": "x", "tokens_evaluated": 28, "prompt": "hi", "timings": TIMINGS}), (28, 3)),
    "completion, before it told what was cached": (
        line({"tokens_evaluated": 28, "tokens_cached": 27, "timings": {"prompt_n": 1, "predicted_n": 3}}),
        (28, 3),
    ),
    "completion of a long prompt": (line({"tokens_evaluated": 28, "prompt": LONG, "timings": TIMINGS}), (28, 3)),
    "generate": (
        line({"text": LONG, "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": 28, "completion_tokens": 3}}),
        (28, 3),
    ),
    "said, not meant": (line({"choices": [{"message": {"content": '{"usage": {"prompt_tokens": 1}}'}}], "usage": FLAT}), (28, 3)),
    "only said": (line({"choices": [{"message": {"content": '{"usage": {"prompt_tokens": 1}}'}}]}), UNKNOWN),
    "in a tool's arguments": (line({"content": [{"input": {"usage": {"prompt_tokens": 1}}}], "usage": ANTHROPIC}), (28, 3)),
    "no numbers": (line({**CHAT, "usage": {"prompt_tokens": "28", "completion_tokens": 3}}), UNKNOWN),
    "below nothing": (line({**CHAT, "usage": {"prompt_tokens": -1, "completion_tokens": 3}}), UNKNOWN),
    "beyond all measure": (line({**CHAT, "usage": {"prompt_tokens": 10**40, "completion_tokens": 3}}), UNKNOWN),
    "broken": (b'{"usage": {"prompt_tokens": 28, ', UNKNOWN),
    "nothing": (b"", UNKNOWN),
}
STREAMS: dict[str, tuple[bytes, Counts]] = {
    "asked for its usage": (sse(*deltas(400), {"choices": [], "usage": OPENAI}), (28, 3)),
    "short": (sse(*deltas(2), {"choices": [], "usage": FLAT}), (28, 3)),
    "not asked, vLLM": (sse(*deltas(400)), UNKNOWN),
    "not asked, llama-server": (sse(*deltas(400), {"choices": [], "timings": TIMINGS}), (28, 3)),
    "usage in every chunk": (
        sse(*({**one, "usage": {"prompt_tokens": 28, "completion_tokens": i}} for i, one in enumerate(deltas(400)))),
        (28, 399),
    ),
    "usage null in every chunk": (sse(*({**one, "usage": None} for one in deltas(400)), {"choices": [], "usage": FLAT}), (28, 3)),
    "messages": (
        named(MESSAGE_START, *({"type": "x", "delta": "w"} for _ in range(900)), MESSAGE_DELTA, {"type": "message_stop"}),
        (28, 3),
    ),
    "short messages": (named(MESSAGE_START, MESSAGE_DELTA, {"type": "message_stop"}), (28, 3)),
    "messages, told twice": (
        named(MESSAGE_START, {**MESSAGE_DELTA, "usage": {"input_tokens": 28, "output_tokens": 3}}, {"type": "message_stop"}),
        (28, 3),
    ),
    "responses": (
        named({"type": "response.completed", "response": {"output": [{"text": LONG}], "usage": RESPONSES}, "timings": TIMINGS}),
        (28, 3),
    ),
    "completion": (sse({"content": "x"}, {"stop": True, "tokens_evaluated": 28, "timings": TIMINGS}, done=False), (28, 3)),
}
ALL = [(name, body, told, False) for name, (body, told) in WHOLE.items()] + [
    (name, body, told, True) for name, (body, told) in STREAMS.items()
]
EVERY = pytest.mark.parametrize(("body", "told", "is_stream"), [one[1:] for one in ALL], ids=[one[0] for one in ALL])


def pieces_of(body: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(places) if end > start]


def through(reads: Iterable[Sequence[bytes]]) -> Edges:
    edges = Edges()
    for read in reads:
        edges.add(list(read))
    return edges


@EVERY
def test_counts_are_read_off_the_ends(body: bytes, told: Counts, is_stream: bool) -> None:
    """In one piece, and byte by byte."""
    in_one = through([[body]] if body else [])
    in_bytes = through([[body[at : at + 1]] for at in range(len(body))])

    assert [told, told] == [count(edges, is_stream=is_stream, is_whole=True) for edges in (in_one, in_bytes)]
    assert len(body) > SHORT_BYTES or told == count(body, is_stream=is_stream, is_whole=True)


@given(st.sampled_from(ALL), st.lists(st.lists(st.integers(0, 200_000), max_size=5), min_size=1, max_size=6))
def test_the_pieces_do_not_matter(one: tuple[str, bytes, Counts, bool], cuts: list[list[int]]) -> None:
    """Split anywhere, several pieces to a read: the same counts, and never more is kept than said."""
    _, body, told, is_stream = one
    edges = Edges()
    for read in pieces_of(body, [cut[0] for cut in cuts if cut]):
        edges.add(pieces_of(read, cuts[-1]))
        assert len(edges.tail) <= SHORT_BYTES
        assert len(edges.head) <= HEAD_BYTES

    assert told == count(edges, is_stream=is_stream, is_whole=True)
    assert bytes(edges.tail) == body[len(body) - len(edges.tail) :]
    assert edges.head == (body[:HEAD_BYTES] if len(body) > SHORT_BYTES else b"")
    assert len(edges.tail) >= min(len(body), TAIL_BYTES)


@given(st.binary(max_size=300), st.sampled_from([b'"usage"', b'"timings"', b'"usage":{', b'"tokens_evaluated":', b'"meta_info" : {"']))
def test_no_bytes_of_an_engine_break_it(noise: bytes, key: bytes) -> None:
    """Whatever stands where counts should be."""
    for body in (noise + key + noise, key + noise, noise + key):
        found = count(body, is_stream=False, is_whole=True)
        assert all(one is None or 0 <= one < 10**17 for one in found)


def test_of_a_stream_that_broke_off_only_the_beginning_is_known() -> None:
    """What it had produced by then, nobody counted."""
    body = named(MESSAGE_START, *({"type": "x", "delta": "w"} for _ in range(9)))

    assert count(through([[body]]), is_stream=True, is_whole=False) == (28, None)


@pytest.mark.parametrize(("value", "told"), [(b"12", 12), (b"", None), (b"-1", None), (b"1.5", None), (b"9" * 40, None)])
def test_a_header_that_counts(value: bytes, told: int | None) -> None:
    """Of text-embeddings-inference."""
    assert told == header_count(value)


# -------------------------------------------------------------------------------------------------------- through the relay


def replies(body: bytes, *, is_stream: bool, by: int = 0, extra: bytes = b"", status: int = 200) -> Callable[[Seen, EngineSide], Any]:
    """An engine that answers with `body`: with its length, or in chunks of `by` bytes."""
    kind = b"text/event-stream" if is_stream else b"application/json; charset=utf-8"
    framing = b"Transfer-Encoding: chunked" if by else b"Content-Length: %d" % len(body)
    head = b"HTTP/1.1 %d OK\r\nContent-Type: %b\r\n%b%b\r\n\r\n" % (status, kind, extra, framing)
    sent = chunked(*(body[at : at + by] for at in range(0, len(body), by))) if by else body

    async def reply(seen: Seen, side: EngineSide) -> None:
        await side.send(head)
        for at in range(0, len(sent), 50_000):
            await side.send(sent[at : at + 50_000])
            await asyncio.sleep(0)

    return reply


def ended(reply: Callable[[Seen, EngineSide], Any], request: bytes = post(b'{"model":"m"}')) -> Record:
    """What is told of a request that this engine answered."""

    async def main() -> Record:
        async with a_world(reply) as world, a_caller(world) as caller:
            await caller.ask(request)
            await until(lambda: world.hooks.records)
            return world.hooks.records[0]

    return on_uvloop(main)


@pytest.mark.parametrize("by", [0, 7, 40_000])
@EVERY
def test_a_record_tells_what_the_engine_counted(body: bytes, told: Counts, is_stream: bool, by: int) -> None:
    """With a length and in chunks."""
    record = ended(replies(body, is_stream=is_stream, by=by))

    assert (told, "ok") == ((record.tokens_in, record.tokens_out), record.outcome)


@pytest.mark.parametrize(
    ("extra", "status", "request_bytes"),
    [
        (b"Content-Encoding: gzip\r\n", 200, post(b'{"model":"m"}')),
        (b"", 400, post(b'{"model":"m"}')),
        (b"", 200, get("/v1/models")),  # greenroom's own answer
    ],
    ids=["compressed", "an error", "our own"],
)
def test_other_answers_are_not_counted(extra: bytes, status: int, request_bytes: bytes) -> None:
    """What is not a plain answer of an engine tells no tokens."""
    record = ended(replies(WHOLE["chat"][0], is_stream=False, extra=extra, status=status), request_bytes)

    assert (record.tokens_in, record.tokens_out) == UNKNOWN


def test_a_header_counts_where_the_body_does_not() -> None:
    """`/embed` of text-embeddings-inference answers with bare numbers."""
    record = ended(replies(b"[[0.1, 0.2]]", is_stream=False, extra=b"x-compute-tokens: 12\r\n"))

    assert (record.tokens_in, record.tokens_out) == (12, None)


def test_a_translated_rerank_is_counted_by_what_the_engine_said() -> None:
    """Although the client is answered in other words."""
    results = [{"index": i, "relevance_score": 0.5} for i in range(2)]
    body = line({"model": "r", "usage": {"prompt_tokens": 20, "total_tokens": 20}, "results": results})
    asked = post(b'{"model":"m","query":"q","documents":["a","b"]}', "/v1/rerank")
    record = ended(replies(body, is_stream=False), asked)

    assert (record.tokens_in, record.tokens_out, record.status) == (20, None, 200)


def test_of_a_stream_that_the_engine_broke_only_the_tokens_in_are_told() -> None:
    """The client saw an error."""
    body = named(MESSAGE_START, *({"type": "x", "delta": "w"} for _ in range(9)))

    async def reply(seen: Seen, side: EngineSide) -> None:
        await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await side.send(b"%x\r\n%b\r\n" % (len(body), body))
        side.rst()

    record = ended(reply)

    assert (record.outcome, record.tokens_in, record.tokens_out) == (Outcome.ENGINE_BROKE, 28, None)


# ----------------------------------------------------------------------------------------------------------- a real engine

HELLO = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 5}
REAL: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HELLO),
    ("/v1/chat/completions", HELLO | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", HELLO | {"stream": True}),
    ("/v1/completions", {"prompt": "hi there", "max_tokens": 5}),
    ("/v1/completions", {"prompt": "hi there", "max_tokens": 5, "stream": True}),
    ("/completion", {"prompt": "hi there", "n_predict": 5}),
    ("/v1/messages", HELLO),
    ("/v1/messages", HELLO | {"stream": True}),
    ("/v1/responses", {"input": "hi there", "max_output_tokens": 5}),
    ("/v1/responses", {"input": "hi there", "max_output_tokens": 5, "stream": True}),
]


@contextmanager
def a_llama_server(binary: Path, arguments: Sequence[str], port: int) -> Any:
    process = subprocess.Popen(
        [binary, *arguments, "--port", str(port)],
        env={**os.environ, "LLAMA_ARG_THREADS": "2"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def read_fully(body: bytes) -> Counts:
    """By reading every word of it: the oracle."""
    values = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")] or [body]
    tokens_in: int | None = None
    tokens_out: int | None = None
    for value in map(json.loads, values):
        holder = value.get("response", value.get("message", value))
        usage = holder.get("usage") or {}
        for name, plus in (("prompt_tokens", 0), ("input_tokens", usage.get("cache_read_input_tokens", 0))):
            tokens_in = usage[name] + plus if name in usage else tokens_in
        tokens_out = usage.get("completion_tokens", usage.get("output_tokens", tokens_out))
        if "tokens_evaluated" in value:
            tokens_in, tokens_out = value["tokens_evaluated"], value["tokens_predicted"]
        elif not usage and "timings" in value and tokens_in is None:
            tokens_in, tokens_out = value["timings"]["prompt_n"] + value["timings"]["cache_n"], value["timings"]["predicted_n"]
    return tokens_in, tokens_out


async def ask_through(world: World, path: str, body: Any) -> tuple[bytes, Counts]:
    async with a_caller(world) as caller:
        answer = await caller.ask(post(line({"model": "m", **body}), path))
    assert answer.status == 200, answer.body
    number = len(world.admissions.tickets)
    await until(lambda: len(world.hooks.records) == number)
    record = world.hooks.records[-1]
    return answer.body, (record.tokens_in, record.tokens_out)


@pytest.mark.engine
def test_counts_equal_those_of_a_real_llama_server(llama_server: Path, tiny_chat: Path, free_port: Callable[[], int]) -> None:
    """On every route that generates, streaming and not."""
    port = free_port()

    async def main() -> list[tuple[str, Counts, Counts]]:
        found = []
        async with a_world() as world:
            world.admissions.address = ("127.0.0.1", port)
            await up(port)
            for path, body in REAL:
                told, counted = await ask_through(world, path, body)
                found.append((path, read_fully(told), counted))
        return found

    with a_llama_server(llama_server, ["-m", str(tiny_chat), "-c", "512"], port):
        found = on_uvloop(main)

    assert [(path, oracle) for path, oracle, _ in found] == [(path, counted) for path, _, counted in found]
    assert all(counted[0] and counted[1] == 5 for _, _, counted in found), found


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["embed", "rerank"])
def test_counts_of_real_embeddings_and_reranks(
    llama_server: Path, tiny_embed: Path, tiny_rerank: Path, free_port: Callable[[], int], kind: str
) -> None:
    """They tell them first, before a body of any length."""
    port = free_port()
    model, flag = (tiny_embed, "--embeddings") if kind == "embed" else (tiny_rerank, "--reranking")
    path, body = ("/v1/embeddings", {"input": ["hi there"] * 60}) if kind == "embed" else ("/upstream/m/v1/rerank", RERANK)

    async def main() -> tuple[bytes, Counts]:
        async with a_world() as world:
            world.admissions.address = ("127.0.0.1", port)
            await up(port)
            return await ask_through(world, path, body)

    with a_llama_server(llama_server, ["-m", str(model), flag], port):
        told, counted = on_uvloop(main)

    assert counted == (read_fully(told)[0], None)
    assert counted[0]


RERANK = {"query": "hi there", "documents": ["a", "b"]}


async def up(port: int) -> None:
    """Until it is healthy."""
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                head = await reader.read(64)
                writer.close()
                if b" 200 " in head:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.05)
