"""Which model a body names, and how bodies are changed before an engine sees them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.proxy.admission import ModelRoute
from greenroom.proxy.bodies import (
    MODEL_NAME_BYTES_MAX,
    PART_HEAD_BYTES_MAX,
    BadBody,
    FormPeek,
    encoding_refusal,
    form_type,
    is_form,
    needs_rewrite,
    peek,
    peek_json,
    rewrite_json,
)

ODD_NAMES = ("plain", "org/name:tag", "Fam3.5-27B:UD-IQ3_XXS", "modèle 7b", "a+b")
MULTIPART = b"multipart/form-data; boundary=XbX"
URLENCODED = b"application/x-www-form-urlencoded"


# ---------------------------------------------------------------------------------------------------------- JSON, peeked


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_model_of_a_json_body_is_read_as_written(name: str, is_ascii: bool) -> None:
    """Odd names, escaped or as UTF-8, anywhere in the object."""
    body = json.dumps({"messages": [{"model": "not me", "content": "é"}], "model": name, "stream": True}, ensure_ascii=is_ascii).encode()

    found = peek_json(body)

    assert (found.model, found.stream) == (name, True)
    assert peek_json(bytearray(body)) == found


@pytest.mark.parametrize(
    ("stream", "meant"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("True", True),
        ("false", False),
        ("", False),
        (1, True),
        (0, False),
        (None, False),
        ({}, False),
    ],
)
def test_stream_is_read_leniently(stream: Any, meant: bool) -> None:
    """What is not a boolean is no reason to refuse: the engine judges that."""
    assert peek_json(json.dumps({"model": "m", "stream": stream}).encode()).stream is meant


def test_a_body_without_model_is_no_error_here() -> None:
    """A default model, or one in the query, may serve it."""
    assert peek_json(b"{}").model is None
    assert peek_json(b' {"model":null} ').model is None
    assert peek_json(b'{"model":"a","model":"b"}').model == "b"  # as JSON readers have it: the last one


BROKEN = [
    (b"", "empty_body"),
    (b" \r\n\t", "empty_body"),
    (b"[]", "bad_json"),
    (b"null", "bad_json"),
    (b'"m"', "bad_json"),
    (b"7", "bad_json"),
    (b"{", "bad_json"),
    (b'{"model"', "bad_json"),
    (b'{"model":"m"', "bad_json"),
    (b'{"model":"m",}', "bad_json"),
    (b'{"model":"m"}x', "bad_json"),
    (b'{"model":"m"}{"model":"m"}', "bad_json"),
    (b'{"model":"m"}\x00', "bad_json"),
    (b"{'model':'m'}", "bad_json"),
    (b"{model:1}", "bad_json"),
    (b"model=m", "bad_json"),
    (b'// comment\n{"model":"m"}', "bad_json"),
    (b'\xef\xbb\xbf{"model":"m"}', "bad_json"),
    ('{"model":"m"}'.encode("utf-16"), "bad_json"),
    (b'{"model":"m","x":NaN}', "bad_json"),
    (b'{"model":"m","x":Infinity}', "bad_json"),
    (b'{"model":"m","x":01}', "bad_json"),
    (b'{"model":"m","x":"\x01"}', "bad_json"),
    (b'{"model":"m","x":"\xff"}', "bad_json"),
    (b'{"model":"\xff"}', "bad_json"),
    (b'{"model":"\\ud800"}', "bad_json"),
    (b'{"x":' + b"[" * 100_000, "bad_json"),
    (b'{"a":' * 50_000, "bad_json"),
    (b'{"model":1}', "bad_model"),
    (b'{"model":["m"]}', "bad_model"),
    (b'{"model":{"id":"m"}}', "bad_model"),
    (b'{"model":true}', "bad_model"),
    (b'{"model":""}', "bad_model"),
    (b'{"model":"' + b"m" * 5000 + b'"}', "bad_model"),
    (b"\x1f\x8b\x08\x00\x00", "bad_json"),
    (b"\x00" * 100, "bad_json"),
]


@pytest.mark.parametrize(("body", "code"), BROKEN)
def test_a_broken_json_body_is_400_with_one_sentence(body: bytes, code: str) -> None:
    """Each says what is wrong and what to do, and repeats nothing long."""
    with pytest.raises(BadBody) as caught:
        peek_json(body)

    refusal = caught.value.refusal
    assert (refusal.status, refusal.code) == (400, code)
    assert len(refusal.message) < 300
    assert "; " in refusal.message
    assert refusal.message.endswith(".")


@given(st.binary(max_size=60))
def test_any_bytes_are_peeked_or_refused(body: bytes) -> None:
    """Nothing but BadBody ever comes out."""
    try:
        found = peek(body, b"application/json")
    except BadBody:
        return
    assert isinstance(json.loads(body), dict)
    assert found.model is None or found.model


@pytest.mark.parametrize(
    ("encoding", "status"),
    [(b"", None), (b"identity", None), (b" Identity ", None), (b"gzip", 415), (b"gzip, identity", 415), (b"br", 415), (b"\xff", 415)],
)
def test_a_compressed_body_is_415(encoding: bytes, status: int | None) -> None:
    """It could not be read for its model."""
    refusal = encoding_refusal(encoding)

    assert (refusal.status if refusal else None) == status


# -------------------------------------------------------------------------------------------------------- JSON, rewritten


def test_a_model_without_filters_needs_no_rewriting() -> None:
    """The body is then sent on as it came."""
    assert not needs_rewrite(ModelRoute("m"), "m")
    assert not needs_rewrite(ModelRoute("m", use_model_name="m"), "m")
    assert not needs_rewrite(ModelRoute("m", set_params_by_id={"m-hot": {"temperature": 1}}), "m")
    assert needs_rewrite(ModelRoute("m", set_params_by_id={"m-hot": {"temperature": 1}}), "m-hot")
    assert needs_rewrite(ModelRoute("m", use_model_name="real"), "m")
    assert needs_rewrite(ModelRoute("m", strip_params=("seed",)), "m")
    assert needs_rewrite(ModelRoute("m", set_params={"seed": 1}), "m")


def test_only_what_is_asked_for_changes_and_the_rest_keeps_its_bytes_and_order() -> None:
    """useModelName writes `model` where it stands; numbers and blanks inside other values are untouched."""
    body = b'{ "z": 1.0e0, "model" : "m", "a": [1, 2.50,  "\\u00e9"], "n": 12345678901234567890123 }'

    got = rewrite_json(body, ModelRoute("m", use_model_name="real/é"), "m")

    assert got == '{"z":1.0e0,"model":"real/é","a":[1, 2.50,  "\\u00e9"],"n":12345678901234567890123}'.encode()


def test_use_model_name_is_written_even_when_the_body_named_none() -> None:
    """The model came from the query or is the default; the engine still wants its own name."""
    assert rewrite_json(b'{"q":1}', ModelRoute("m", use_model_name="real"), "m") == b'{"q":1,"model":"real"}'


def test_a_rewritten_body_names_one_model_to_any_reader() -> None:
    """To those that take the first of two keys, the last, or do not tell case apart."""
    body = b'{"model":"a","Model":"b","x":{"model":"c"},"MODEL":"d","mod\\u0065l":"e"}'

    assert peek_json(body).model == "e"
    assert rewrite_json(body, ModelRoute("m", use_model_name="real"), "e") == b'{"model":"real","x":{"model":"c"}}'


def test_filters_apply_in_order_and_never_touch_model() -> None:
    """Strip, then set, then set by the name the client used; `model` is protected from all three."""
    model = ModelRoute(
        "m",
        strip_params=("model", "seed", "temperature"),
        set_params={"temperature": 0.5, "model": "x", "top_k": 3},
        set_params_by_id={"m-hot": {"temperature": 1.5, "model": "y"}, "m-cold": {"temperature": 0}},
    )

    got = rewrite_json(b'{"temperature":9,"model":"m-hot","seed":4,"keep":null}', model, "m-hot")

    assert json.loads(got) == {"model": "m-hot", "keep": None, "temperature": 1.5, "top_k": 3}


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [
        ("a.b", {"a": {"b": 1, "c": 2}}, {"a": {"c": 2}}),
        ("a.b.c", {"a": {"b": {"c": 1}}}, {"a": {"b": {}}}),
        ("a.b", {"a.b": 1, "a": {"b": 2}}, {"a": {"b": 2}}),
        ("a.b", {"a": 7}, {"a": 7}),
        ("a.b", {"a": None}, {"a": None}),
        ("a.b", {}, {}),
        ("a.1", {"a": [1, 2, 3]}, {"a": [1, 3]}),
        ("a.1.x", {"a": [1, {"x": 2, "y": 3}]}, {"a": [1, {"y": 3}]}),
        ("a.9", {"a": [1]}, {"a": [1]}),
        ("a.-1", {"a": [1]}, {"a": [1]}),
        ("a.", {"a": {"": 1}}, {"a": {}}),
        (".".join("a" * 100), {"a": {"a": 1}}, {"a": {"a": 1}}),
    ],
)
def test_dotted_paths_strip_inside_objects_and_lists(path: str, body: Any, left: Any) -> None:
    """A key that really holds the dot goes first; a path that leads nowhere changes nothing."""
    assert json.loads(rewrite_json(json.dumps(body).encode(), ModelRoute("m", strip_params=(path,)), "m")) == left


@pytest.mark.parametrize(
    ("path", "body", "got"),
    [
        ("a.b", {}, {"a": {"b": 5}}),
        ("a.b.c", {"a": {"x": 1}}, {"a": {"x": 1, "b": {"c": 5}}}),
        ("a.b", {"a": 7}, {"a": {"b": 5}}),
        ("a.b", {"a.b": 1}, {"a.b": 5}),
        ("a.0", {"a": [1, 2]}, {"a": [5, 2]}),
        ("a.0.b", {"a": [{"c": 1}]}, {"a": [{"c": 1, "b": 5}]}),
    ],
)
def test_dotted_paths_set_inside_objects(path: str, body: Any, got: Any) -> None:
    """`chat_template_kwargs.enable_thinking: false` reaches the inner object and makes it when it is missing."""
    assert json.loads(rewrite_json(json.dumps(body).encode(), ModelRoute("m", set_params={path: 5}), "m")) == got


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), _JSON, max_size=6), st.booleans())
def test_rewriting_preserves_every_other_value(fields: dict[str, Any], is_ascii: bool) -> None:
    """For any document: same keys in the same order, same values, but for `model`."""
    body = json.dumps({**fields, "model": "m"}, ensure_ascii=is_ascii, indent=1).encode("utf-8", "surrogatepass")

    got = json.loads(rewrite_json(body, ModelRoute("m", use_model_name="real"), "m"))

    assert got == {**fields, "model": "real"}
    assert list(got) == list(json.loads(body))


def test_rewriting_refuses_what_is_no_object() -> None:
    """Never anything but BadBody."""
    for body in (b"", b"[]", b"{", b'{"a":' * 50_000):
        with pytest.raises(BadBody):
            rewrite_json(body, ModelRoute("m", use_model_name="x"), "m")


# ------------------------------------------------------------------------------------------------------------- multipart


def a_part(disposition: str, value: bytes, *more: str) -> bytes:
    head = "\r\n".join([f"Content-Disposition: {disposition}", *more])
    return b"--XbX\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"


FILE = a_part('form-data; name="file"; filename="a.wav"', b"\r\n--Xb\r\n--XbXX\r\n-\r\n\x00\xff" * 50, "Content-Type: audio/wav")
MODEL = a_part('form-data; name="model"', b"whisper-1")
END = b"--XbX--\r\n"


def read_whole(body: bytes, content_type: bytes = MULTIPART) -> FormPeek:
    form = FormPeek(content_type)
    form.feed(body)
    form.finish()
    return form


def read_in_pieces(body: bytes, content_type: bytes, size: int) -> FormPeek:
    form = FormPeek(content_type)
    for at in range(0, len(body), size):
        form.feed(body[at : at + size])
    form.finish()
    return form


def patched(body: bytes, form: FormPeek, name: str) -> bytes:
    start, end, put = form.patch(name)
    return body[:start] + put + body[end:]


@pytest.mark.parametrize("parts", [(FILE, MODEL), (MODEL, FILE), (a_part('form-data; name="x"', b""), MODEL), (MODEL,)])
def test_the_model_field_is_found_wherever_it_stands(parts: tuple[bytes, ...]) -> None:
    """Before or after the file; its span are the offsets of its value."""
    body = b"".join(parts) + END

    form = read_whole(body)

    assert form.model == "whisper-1"
    assert form.model_span is not None
    assert body[slice(*form.model_span)] == b"whisper-1"


@given(st.lists(st.integers(1, 40), max_size=80), st.booleans(), st.binary(max_size=20))
def test_split_points_change_nothing(steps: list[int], is_model_first: bool, preamble: bytes) -> None:
    """Fed in pieces of any size, boundary and names cut anywhere: same model, same span."""
    parts = (MODEL, FILE) if is_model_first else (FILE, MODEL)
    body = (preamble + b"\r\n" if preamble else b"") + b"".join(parts) + END + b"epilogue --XbX\r\n"
    form = FormPeek(MULTIPART)

    at = 0
    for step in (*steps, len(body)):
        form.feed(memoryview(body)[at : at + step])
        at += step
    form.finish()

    assert (form.model, form.model_span) == ("whisper-1", read_whole(body).model_span)


def test_every_single_split_and_byte_by_byte_agree() -> None:
    """No offset at which a cut hides the model."""
    body = FILE[:120] + b"\r\n" + a_part('form-data; name="stream"', b"true") + MODEL + END
    whole = read_whole(body)

    for cut in range(len(body)):
        form = FormPeek(MULTIPART)
        form.feed(body[:cut])
        form.feed(body[cut:])
        form.finish()
        assert (form.model, form.model_span, form.stream) == (whole.model, whole.model_span, True)
    form = read_in_pieces(body, MULTIPART, 1)
    assert form.model == whole.model == "whisper-1"


_LOOKALIKES = [b"\r\n", b"--XbX", b"\r\n--Xb", b"X", b"-", b"\r", b"\n", b"a", b"\r\n--XbXy", b" "]
_VALUES = st.lists(st.sampled_from(_LOOKALIKES), max_size=12).map(b"".join)


@given(st.lists(_VALUES, max_size=5), st.integers(0, 5), st.integers(1, 9))
def test_content_that_looks_like_a_boundary_is_content(values: list[bytes], place: int, size: int) -> None:
    """A line is a boundary only when nothing but blanks follows it; fed in small pieces as well."""
    values = [value for value in values if b"\n--XbX" not in (b"\r\n" + value + b"\r\n").replace(b"\n--XbXy", b"")]
    parts = [a_part('form-data; name="x"; filename="x"', value) for value in values]
    parts.insert(min(place, len(parts)), MODEL)
    body = b"".join(parts) + END

    form = read_in_pieces(body, MULTIPART, size)

    assert form.model == "whisper-1"
    assert form.model_span is not None
    assert body[slice(*form.model_span)] == b"whisper-1"


def test_a_model_after_a_40_mb_file_costs_little_memory() -> None:
    """The file is scanned, not kept: under 1 MiB of memory at any time."""
    head, _, tail = FILE.partition(b"\x00")
    chunk = bytes(range(256)) * 256
    form = FormPeek(MULTIPART)
    tracemalloc.start()
    form.feed(head)
    for _ in range(640):
        form.feed(chunk)
    form.feed(tail)
    form.feed(MODEL + END)
    form.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    start = len(head) + 640 * len(chunk) + len(tail) + MODEL.index(b"whisper-1")
    assert (form.model, form.model_span) == ("whisper-1", (start, start + 9))
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("disposition", "expected"),
    [
        ('form-data; name="model"', "v"),
        ("form-data; name=model", "v"),
        ('form-data;name="model"', "v"),
        ('FORM-DATA; Name = "model" ; x="y"', "v"),
        ('form-data; x="; name=stream"; name="model"', "v"),
        ('form-data; name="mod\\"el"', None),
        ('form-data; name="m\\odel"', None),
        ('form-data; name="models"', None),
        ('form-data; filename="model"', None),
        ("form-data", None),
    ],
)
def test_names_are_read_with_their_quotes(disposition: str, expected: str | None) -> None:
    """Quoted or bare, any case of the header; a file is not a field."""
    assert read_whole(a_part(disposition, b"v") + END).model == expected


def test_the_header_of_a_part_may_be_in_any_case_and_company() -> None:
    """Header names are case-insensitive; a part may have none at all."""
    part = b'--XbX \t\r\ncontent-type: text/plain; name="no"\r\nCONTENT-DISPOSITION:form-data; name="model"\r\n\r\nv\r\n'
    part += b"--XbX\r\n\r\nnameless\r\n"

    assert read_whole(part + END).model == "v"


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b'multipart/form-data; boundary="X bX"', b"X bX"),
        (b"Multipart/Form-Data;charset=utf-8; BOUNDARY = XbX", b"XbX"),
        (b'multipart/form-data; boundary="----a\'()+_,-./:=?"', b"----a'()+_,-./:=?"),
    ],
)
def test_boundaries_may_be_quoted(content_type: bytes, boundary: bytes) -> None:
    """The parameter is read as the standard has it."""
    assert read_whole((MODEL + END).replace(b"XbX", boundary), content_type).model == "whisper-1"


BROKEN_FORMS = [
    (b"", "bad_form"),
    (b"no boundary at all", "bad_form"),
    (MODEL, "bad_form"),
    (MODEL + b"--XbX", "bad_form"),
    (MODEL + b"--XbX-", "bad_form"),
    (MODEL[:40], "bad_form"),
    ((MODEL + END).replace(b"\r\n", b"\n"), "bad_form"),
    (MODEL + MODEL + END, "bad_model"),
    (a_part('form-data; name="model"', b"") + END, "bad_model"),
    (a_part('form-data; name="model"', b"\xff\xfe") + END, "bad_model"),
    (a_part('form-data; name="model"', b"m" * (MODEL_NAME_BYTES_MAX + 1)) + END, "bad_model"),
    (a_part('form-data; name="model"', b"m" * 100_000) + END, "bad_model"),
    (b"--XbX\r\nX: " + b"y" * (PART_HEAD_BYTES_MAX + 10) + b"\r\n\r\nv\r\n" + END, "bad_form"),
    (b"--XbX\r\n\r\n\r\n" * 10_001 + END, "bad_form"),
]

OTHER = b"\r\n\r\nother\r\n"
# Each holds a `model` that some reader finds, and ours would not.
AMBIGUOUS_FORMS = [
    (a_part('form-data; name="model"; filename="model.bin"', b"other"), "bad_model"),
    (a_part('form-data; name="model"; filename=""', b"other"), "bad_model"),
    (a_part('form-data; name="Model"', b"other"), "bad_model"),
    (a_part("form-data; name*=utf-8''model", b"other"), "bad_form"),
    (a_part('form-data; name*0="mod"; name*1="el"', b"other"), "bad_form"),
    (a_part('form-data; name="x"; name="model"', b"other"), "bad_form"),
    (a_part('form-data; name="x"', b"other", 'Content-Disposition: form-data; name="model"'), "bad_form"),
    (b'--XbX\r\nContent-Disposition: form-data;\r\n name="model"' + OTHER, "bad_form"),
    (b'--XbX\r\n\tContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (b'--XbX\r\nX: y\nContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (b'--XbX\r\nX: y\rContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (b'--XbX\nContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (b'preamble\n--XbX\r\nContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (b'--XbX y\r\nContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (b'--XbX\r\r\nContent-Disposition: form-data; name="model"' + OTHER, "bad_form"),
    (a_part('form-data; name="x"', b'\n--XbX\r\nContent-Disposition: form-data; name="model"' + OTHER[:-2]), "bad_form"),
    (a_part('form-data; name="x"', b"y\n--XbX--"), "bad_form"),
]


@pytest.mark.parametrize(("part", "code"), AMBIGUOUS_FORMS)
def test_a_form_in_which_others_may_find_another_model_is_refused(part: bytes, code: str) -> None:
    """Before the plain field or after it, whole or in pieces; what stands behind the last boundary is no form to anybody."""
    for body in (part + MODEL + END, MODEL + part + END):
        for size in (len(body), 7, 1):
            with pytest.raises(BadBody) as caught:
                read_in_pieces(body, MULTIPART, size)
            assert (caught.value.refusal.status, caught.value.refusal.code) == (400, code)
    assert read_whole(MODEL + END + part).model == "whisper-1"


@pytest.mark.parametrize(
    ("content_type", "said"),
    [
        (b"multipart/form-data; boundary=XbX; boundary=other", b'multipart/form-data; boundary="XbX"'),
        (b'Multipart/Form-Data; charset=x; boundary="a\\"b c"', b'multipart/form-data; boundary="a\\"b c"'),
        (b"application/x-www-form-urlencoded; charset=utf-16", b"application/x-www-form-urlencoded"),
    ],
)
def test_the_type_of_a_form_is_said_plainly(content_type: bytes, said: bytes) -> None:
    """With the boundary that it was read with, and nothing else."""
    assert form_type(content_type) == said


@pytest.mark.parametrize(("body", "code"), BROKEN_FORMS)
def test_a_broken_form_is_400(body: bytes, code: str) -> None:
    """Whole or in pieces of 7 bytes."""
    for size in (len(body) or 1, 7):
        with pytest.raises(BadBody) as caught:
            read_in_pieces(body, MULTIPART, size)
        assert (caught.value.refusal.status, caught.value.refusal.code) == (400, code)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (b"multipart/form-data", 400),
        (b"multipart/form-data; boundary=", 400),
        (b'multipart/form-data; boundary=""', 400),
        (b"multipart/form-data; boundary=" + b"x" * 300, 400),
        (b"multipart/mixed; boundary=x", 415),
        (b"text/plain", 415),
        (b"", 415),
        (b"\xff", 415),
    ],
)
def test_a_form_without_usable_boundary_is_refused(content_type: bytes, status: int) -> None:
    """Before one byte of it is read."""
    with pytest.raises(BadBody) as caught:
        FormPeek(content_type)

    assert caught.value.refusal.status == status


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\r\n--XbX", b"--XbX\r\n", b"\r\n\r\n", b"--", MODEL]), max_size=12))
def test_any_bytes_as_a_form_are_read_or_refused(pieces: list[bytes]) -> None:
    """Whole and piecewise agree, and nothing but BadBody comes out."""

    def outcome(fed: list[bytes]) -> tuple[str | None, object]:
        form = FormPeek(MULTIPART)
        try:
            for piece in fed:
                form.feed(piece)
            form.finish()
        except BadBody as exc:
            return None, exc.refusal.code
        return form.model, form.model_span

    assert outcome(pieces) == outcome([b"".join(pieces)])


def test_the_model_of_a_form_can_be_spliced() -> None:
    """useModelName: only the value's bytes change; order, types and all other parts stay."""
    body = FILE + MODEL + a_part('form-data; name="language"', b"de", "Content-Type: text/plain") + END
    form = read_whole(body)

    got = patched(body, form, "large-v3/é")

    assert got == body.replace(b"whisper-1", "large-v3/é".encode())
    assert read_whole(got).model == "large-v3/é"


@pytest.mark.parametrize("preamble", [b"", b"This is a form.\r\n"])
def test_a_form_without_a_model_gets_a_field_of_its_own(preamble: bytes) -> None:
    """Before all others, whose bytes stay."""
    body = preamble + FILE + END

    got = patched(body, read_in_pieces(body, MULTIPART, 7), "n")

    assert got == preamble + a_part('form-data; name="model"', b"n") + FILE + END
    assert read_whole(got).model == "n"
    bare = preamble + END
    assert read_whole(patched(bare, read_whole(bare), "n")).model == "n"
    assert patched(b"a=b", read_whole(b"a=b", URLENCODED), "n &") == b"model=n+%26&a=b"


# ------------------------------------------------------------------------------------------------------------ urlencoded


@pytest.mark.parametrize("name", ODD_NAMES)
def test_urlencoded_names_are_decoded_and_can_be_spliced(name: str) -> None:
    """Percent-escapes and pluses are undone; the replacement is written the same way."""
    body = urlencode({"a": "x=y&z", "model": name, "stream": "true"}).encode()
    form = read_in_pieces(body, URLENCODED, 1)

    assert (form.model, form.stream) == (name, True)
    changed = patched(body, form, "n &=é")
    assert changed == urlencode({"a": "x=y&z", "model": "n &=é", "stream": "true"}).encode()


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"model=m", "m"),
        (b"%6dodel=m&x", "m"),
        (b"&&model=m&&", "m"),
        (b"x=" + b"y" * 3_000_000 + b"&model=m", "m"),
        (b"y" * 3_000_000 + b"&model=m", "m"),
        (b"supermodel=m", None),
        (b"model", None),
        (b"", None),
    ],
)
def test_urlencoded_bodies_of_any_size_are_scanned(body: bytes, model: str | None) -> None:
    """A huge value or name before it does not hide the model; whole and in pieces agree."""
    for size in (len(body) or 1, 1000):
        form = read_in_pieces(body, URLENCODED, size)
        assert form.model == model
        if model:
            assert form.model_span is not None
            assert body[slice(*form.model_span)] == b"m"


@pytest.mark.parametrize("body", [b"model=", b"model=a&model=b", b"model=%ff", b"model=" + b"m" * 5000])
def test_a_broken_model_in_a_urlencoded_form_is_400(body: bytes) -> None:
    """Empty, twice, not UTF-8, too long."""
    with pytest.raises(BadBody) as caught:
        peek(body, URLENCODED)

    assert (caught.value.refusal.status, caught.value.refusal.code) == (400, "bad_model")


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=8)), max_size=6), st.integers(1, 7))
def test_urlencoded_pieces_agree_with_the_whole(pairs: list[tuple[str, str]], size: int) -> None:
    """Any split: same model, same span."""
    body = urlencode([*[pair for pair in pairs if pair[0] != "model"], ("model", "m/x")], errors="replace").encode()
    form = read_in_pieces(body, URLENCODED, size)

    assert form.model == "m/x"
    assert form.model_span is not None
    assert body[slice(*form.model_span)] == b"m%2Fx"


# ------------------------------------------------------------------------------------------------------------- any of them


@pytest.mark.parametrize(
    ("content_type", "body", "form"),
    [
        (b"application/json", b'{"model":"m"}', False),
        (b"", b'{"model":"m"}', False),
        (b"text/plain", b'{"model":"m"}', False),
        (b"application/json; charset=utf-8", b'{"model":"m"}', False),
        (URLENCODED, b"model=m", True),
        (URLENCODED, b' {"model":"m"}', True),
        (MULTIPART, (MODEL + END).replace(b"whisper-1", b"m"), True),
    ],
)
def test_a_whole_body_is_read_by_what_it_is(content_type: bytes, body: bytes, form: bool) -> None:
    """JSON whatever its label (curl labels it urlencoded unasked); forms as forms."""
    assert (peek(body, content_type).model, is_form(content_type)) == ("m", form)
