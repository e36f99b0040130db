"""Refusals as HTTP answers and as events of a stream."""

from __future__ import annotations

import json

import h11
import pytest

from greenroom.proxy import errors
from greenroom.proxy.admission import Catalog, ModelRoute, Refusal


def parsed(raw: bytes, method: str = "GET") -> tuple[h11.Response, bytes]:
    """Read by an independent client."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(raw)
    response = client.next_event()
    assert isinstance(response, h11.Response)
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert client.trailing_data[0] == b""
    return response, body


TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error", 500: "server_error", 501: "not_supported_error", 502: "engine_error",
    503: "unavailable_error", 504: "timeout_error", 505: "server_error",
}  # fmt: skip


@pytest.mark.parametrize(("status", "kind"), sorted(TYPES.items()))
def test_an_answer_is_whole_and_openai_shaped(status: int, kind: str) -> None:
    """Status, length, JSON body with message, type, param, code."""
    response, body = parsed(errors.answer(Refusal(status, "some_code", 'what "and" why; é')))

    assert (response.status_code, response.reason) == (status, errors.REASONS[status])
    assert json.loads(body) == {"error": {"message": 'what "and" why; é', "type": kind, "param": None, "code": "some_code"}}
    headers = dict(response.headers)
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"%d" % len(body)


def test_head_gets_the_length_without_the_body() -> None:
    """As HTTP wants it."""
    whole = errors.answer(Refusal(404, "x", "y"))
    response, body = parsed(errors.answer(Refusal(404, "x", "y"), head_only=True), "HEAD")

    assert body == b""
    assert dict(response.headers)[b"content-length"] == dict(parsed(whole)[0].headers)[b"content-length"]


def test_closing_and_extra_lines_are_written() -> None:
    """`Connection: close` when the connection ends; extra lines come complete."""
    response, _ = parsed(errors.answer(Refusal(400, "x", "y"), keep_alive=False, extra=(b"X-One: 1\r\n", b"X-Two: 2\r\n")))

    headers = dict(response.headers)
    assert (headers[b"connection"], headers[b"x-one"], headers[b"x-two"]) == (b"close", b"1", b"2")
    assert b"connection" not in dict(parsed(errors.answer(Refusal(400, "x", "y")))[0].headers)


@pytest.mark.parametrize(
    ("seconds", "written"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (12.0, b"12"), (-5.0, b"1"), (float("inf"), b"86400")]
)
def test_retry_after_is_a_whole_number_of_at_least_one(seconds: float, written: bytes) -> None:
    """Rounded up; never 0, which clients take for `at once`."""
    assert dict(parsed(errors.answer(Refusal(503, "x", "y", seconds)))[0].headers)[b"retry-after"] == written


def test_no_retry_after_without_a_reason() -> None:
    """Absent when nothing is known; a NaN does no harm."""
    assert b"retry-after" not in dict(parsed(errors.answer(Refusal(503, "x", "y")))[0].headers)
    assert errors.retry_after(float("nan")) == 1


def test_401_carries_its_challenges() -> None:
    """So that browsers and clients know how to present a key."""
    response, body = parsed(errors.answer(errors.bad_key()))

    challenges = [value for name, value in response.headers if name == b"www-authenticate"]
    assert [challenge.split(b" ")[0] for challenge in challenges] == [b"Bearer", b"Basic"]
    assert json.loads(body)["error"]["code"] == "bad_key"


def test_an_event_is_one_data_line_between_blank_lines() -> None:
    """The blank line before it ends an event that was cut; a newline in the message cannot end it early."""
    event = errors.event(Refusal(502, "engine_broke", "it\nbroke\r\n\r\ndata: fake"))

    assert event.startswith(b"\n\ndata: {")
    assert event.endswith(b"}\n\n")
    assert event.strip(b"\n").count(b"\n") == 0
    assert json.loads(event.strip(b"\n")[6:])["error"]["message"] == "it\nbroke\r\n\r\ndata: fake"


# ---------------------------------------------------------------------------------------------------- common refusals


def a_catalog(*names: str, hidden: tuple[str, ...] = ()) -> Catalog:
    models = {name: ModelRoute(name, unlisted=name in hidden) for name in names}
    return Catalog(models=models, names={name: name for name in names})


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("qwen3-32", ("qwen3-32b",)),
        ("QWEN3-32B", ("qwen3-32b",)),
        ("gemma", ("gemma3-12b",)),
        ("Gema3-12b", ("gemma3-12b",)),
        ("whisper", ()),
        ("", ()),
        ("hidden-mode", ()),
        ("x" * 10_000, ()),
    ],
)
def test_near_names_are_listed_ones_that_look_alike(asked: str, near: tuple[str, ...]) -> None:
    """Case aside, a part of a name counts; unlisted models are not given away."""
    assert errors.near_names(asked, a_catalog("qwen3-32b", "gemma3-12b", "hidden-model", hidden=("hidden-model",))) == near


def test_an_unknown_model_is_404_and_says_where_to_look() -> None:
    """With near names, or with the way to the list."""
    assert errors.unknown_model("qwne", ("qwen",)).message == "No model is called qwne; did you mean qwen?"
    assert "GET /v1/models" in errors.unknown_model("nothing").message
    body = json.loads(errors.error_body(errors.unknown_model("x")))
    assert (body["error"]["param"], body["error"]["code"]) == ("model", "model_not_found")


def test_what_a_client_wrote_is_shown_short_and_printable() -> None:
    """Neither 10 kB nor control characters come back."""
    message = errors.unknown_model("a\r\nSet-Cookie: x\x00" + "y" * 10_000).message

    assert len(message) < 300
    assert message.isprintable()


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (errors.no_model(), 400),
        (errors.bad_key(), 401),
        (errors.key_not_allowed("m"), 403),
        (errors.engine_control("/sleep"), 403),
        (errors.unknown_model("m"), 404),
        (errors.unknown_route("/x"), 404),
        (errors.method_not_allowed("GET", "/x", ["POST"]), 405),
        (errors.not_ready("m"), 409),
        (errors.body_too_large(1 << 20, "json_mib_max"), 413),
    ],
)
def test_common_refusals_have_their_status_and_one_sentence(refusal: Refusal, status: int) -> None:
    """What, why, what to do."""
    assert refusal.status == status
    assert ";" in refusal.message
    assert refusal.message.endswith((".", "?"))


def test_every_reason_is_ours() -> None:
    """An unknown status still has a phrase."""
    assert errors.reason(200) == b"OK"
    assert errors.reason(299) == b"Unknown"
