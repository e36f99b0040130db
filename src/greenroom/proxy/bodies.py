"""Request bodies: which model they name, and how they are changed before an engine sees them.

Only what routing needs is read.  JSON values that are not ours to change are carried over as the bytes
they were; a form is scanned as it arrives, whatever its size, and only its `model` value is replaced.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any
from urllib.parse import quote_plus, unquote_plus

import msgspec

from greenroom.proxy import errors
from greenroom.proxy.admission import ModelRoute, Refusal

MODEL_NAME_BYTES_MAX = 1024
PART_HEAD_BYTES_MAX = 16 * 1024
PARTS_MAX = 10_000
BOUNDARY_BYTES_MAX = 200  # the standard says 70
PADDING_BYTES_MAX = 64  # blanks between a boundary and its line end
FIELD_NAME_BYTES_MAX = 256
PATH_DEPTH_MAX = 32  # of a dotted filter path


class BadBody(Exception):
    """A body that cannot be served; `refusal` is the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _bad(code: str, message: str) -> BadBody:
    return BadBody(errors.bad_request(code, message))


# --------------------------------------------------------------------------------------------------------------- JSON


class Peek(msgspec.Struct, frozen=True, gc=False):
    """What routing needs of a body."""

    model: str | None = None
    stream: Any = False  # a bool once peeked


_peeker = msgspec.json.Decoder(Peek)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


def peek_json(body: bytes | bytearray) -> Peek:
    """`model` and `stream` of a JSON object.  Raises BadBody (400) for anything else."""
    try:
        peek = _peeker.decode(body)
        if not body.isascii():
            body.decode()  # strings that are skipped are not looked into
    except msgspec.ValidationError as exc:
        raise _wrong_shape(body, exc) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _not_json(body, exc) from exc
    except RecursionError as exc:
        raise _bad("bad_json", "The JSON body is nested too deeply; send it flatter.") from exc
    model = peek.model
    if model is not None and (not model or len(model) > MODEL_NAME_BYTES_MAX):
        raise _bad_name(model)
    stream = peek.stream
    if stream is False or stream is True:
        return peek
    return Peek(model, _is_yes(stream))


def _is_yes(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in {"true", "1", "yes", "on"}
    return bool(value)


def _wrong_shape(body: bytes | bytearray, exc: msgspec.ValidationError) -> BadBody:
    if "$.model" in str(exc):
        return _bad("bad_model", "`model` must be a string; name one of GET /v1/models.")
    if body.lstrip(b" \t\r\n")[:1] == b"{":
        return _bad("bad_json", f"The body cannot be read ({errors.shown(str(exc))}); send a JSON object with a `model`.")
    return _bad("bad_json", "The body is JSON but not an object; send an object with a `model`.")


def _not_json(body: bytes | bytearray, exc: Exception) -> BadBody:
    if not body.strip():
        return _bad("empty_body", "The body is empty; send a JSON object with a `model`.")
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return _bad("bad_json", "The body begins with a byte order mark; send JSON as plain UTF-8.")
    return _bad("bad_json", f"The body is not valid JSON ({errors.shown(str(exc))}); send a JSON object with a `model`.")


def _bad_name(name: str) -> BadBody:
    if not name:
        return _bad("bad_model", "`model` is empty; name one of GET /v1/models.")
    return _bad("bad_model", f"`model` is longer than {MODEL_NAME_BYTES_MAX} bytes; name one of GET /v1/models.")


def encoding_refusal(content_encoding: bytes) -> Refusal | None:
    """415 unless the body is sent as it is: its model could not be read."""
    value = content_encoding.strip().lower()
    if value in {b"", b"identity"}:
        return None
    shown = errors.shown(value.decode("latin-1"))
    return Refusal(415, "unsupported_encoding", f"A request body in Content-Encoding {shown} is not read here; send it uncompressed.")


def needs_rewrite(route: ModelRoute, asked: str) -> bool:
    """Whether a JSON body for this model differs from what the client sent."""
    return bool(
        (route.use_model_name is not None and route.use_model_name != asked)
        or route.strip_params
        or route.set_params
        or route.set_params_by_id.get(asked)
    )


def rewrite_json(body: bytes | bytearray, route: ModelRoute, asked: str) -> bytes:
    """The body with the model's filters applied: useModelName, strip, set, set by id; `model` is never stripped or set.

    Keys keep their order, untouched values their bytes; of a key that stands there twice the last one stays, which is
    the one that was looked at.  Names of parameters may be dotted paths.
    Raises BadBody when the body is no JSON object.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _bad("bad_json", "The body is not a JSON object; send an object with a `model`.") from exc
    if route.use_model_name is not None:
        for name in [name for name in fields if name != "model" and name.lower() == "model"]:
            del fields[name]  # readers that do not tell case apart would take it for `model`
        fields["model"] = _raw(route.use_model_name)
    for path in route.strip_params:
        if path != "model":
            _strip(fields, path)
    for params in (route.set_params, route.set_params_by_id.get(asked, {})):
        for path, value in params.items():
            if path != "model":
                _set(fields, path, value)
    return msgspec.json.encode(fields)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _strip(fields: dict[str, msgspec.Raw], path: str) -> None:
    if fields.pop(path, None) is not None:
        return
    first, dot, rest = path.partition(".")
    inner = fields.get(first)
    if dot and inner is not None:
        fields[first] = _stripped(inner, rest.split(".", PATH_DEPTH_MAX))


def _stripped(value: msgspec.Raw, steps: list[str]) -> msgspec.Raw:
    """The value without what the steps lead to; itself when they lead nowhere."""
    here, deeper = steps[0], steps[1:]
    opened = _open(value)
    if isinstance(opened, dict) and here in opened:
        if deeper:
            opened[here] = _stripped(opened[here], deeper)
        else:
            del opened[here]
        return _raw(opened)
    if isinstance(opened, list) and here.isdecimal() and int(here) < len(opened):
        if deeper:
            opened[int(here)] = _stripped(opened[int(here)], deeper)
        else:
            del opened[int(here)]
        return _raw(opened)
    return value


def _set(fields: dict[str, msgspec.Raw], path: str, value: Any) -> None:
    first, dot, rest = path.partition(".")
    if not dot or path in fields:
        fields[path] = _raw(value)
    else:
        fields[first] = _with(fields.get(first), rest.split(".", PATH_DEPTH_MAX), value)


def _with(outer: msgspec.Raw | None, steps: list[str], value: Any) -> msgspec.Raw:
    """`outer` with the value put where the steps lead; what is no object on the way becomes one."""
    here, deeper = steps[0], steps[1:]
    opened = _open(outer) if outer is not None else None
    if isinstance(opened, list) and here.isdecimal() and int(here) < len(opened):
        opened[int(here)] = _with(opened[int(here)], deeper, value) if deeper else _raw(value)
        return _raw(opened)
    inner: dict[str, msgspec.Raw] = opened if isinstance(opened, dict) else {}
    inner[here] = _with(inner.get(here), deeper, value) if deeper else _raw(value)
    return _raw(inner)


def _open(value: msgspec.Raw) -> dict[str, msgspec.Raw] | list[msgspec.Raw] | None:
    """One layer of a value; None when it is neither object nor list."""
    first = bytes(value)[:1]
    if first == b"{":
        return _fields.decode(value)
    if first == b"[":
        return _items.decode(value)
    return None


# -------------------------------------------------------------------------------------------------------------- forms

_PARAMETER = re.compile(rb';\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.DOTALL)
_ESCAPED = re.compile(rb"\\([\"\\])")


def is_form(content_type: bytes) -> bool:
    """Whether FormPeek reads it; everything else is taken for JSON."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind in {b"multipart/form-data", b"application/x-www-form-urlencoded"}


def is_form_body(body: bytes | bytearray, content_type: bytes) -> bool:
    """Whether a whole body is a form.

    One that looks like a JSON object is not, even when it is labelled urlencoded, which is what curl does unasked.
    """
    return is_form(content_type) and not (content_type[:1] in b"aA" and body.lstrip(b" \t\r\n")[:1] == b"{")


def peek(body: bytes | bytearray, content_type: bytes) -> Peek:
    """`model` of a whole body held in memory, whatever it is.  Raises BadBody."""
    if not is_form_body(body, content_type):
        return peek_json(body)
    form = FormPeek(content_type)
    form.feed(body)
    form.finish()
    return Peek(form.model, form.stream)


def form_type(content_type: bytes) -> bytes:
    """The Content-Type of a form with nothing in it that two readers may read differently."""
    if content_type[:1] in b"aA":
        return b"application/x-www-form-urlencoded"
    boundary = _parameters(content_type).get(b"boundary", b"")
    return b'multipart/form-data; boundary="%b"' % re.sub(rb"([\"\\])", rb"\\\1", boundary)


def _parameters(value: bytes) -> dict[bytes, bytes]:
    """`; name=value` parameters of a header, names lower-case, quotes undone; the first of a name counts."""
    found: dict[bytes, bytes] = {}
    for name, quoted, token in _PARAMETER.findall(value):
        found.setdefault(name.lower(), _ESCAPED.sub(rb"\1", quoted) or token)
    return found


class _At(Enum):
    BODY = auto()  # inside a part, or before the first boundary
    HEAD = auto()
    END = auto()


class FormPeek:
    """Reads a form as it arrives and remembers its `model`; memory stays bounded whatever the size.

    `feed` every piece in order, then `finish`.  `model` is known as soon as its field has passed;
    `model_span` are the offsets of its value in the whole body.
    """

    __slots__ = ("_reader", "is_multipart")

    def __init__(self, content_type: bytes) -> None:
        """Raises BadBody when it is neither multipart/form-data with a boundary nor urlencoded."""
        kind = content_type.partition(b";")[0].strip().lower()
        self.is_multipart = kind == b"multipart/form-data"
        if not self.is_multipart and kind != b"application/x-www-form-urlencoded":
            shown = errors.shown(content_type.decode("latin-1"))
            raise BadBody(Refusal(415, "unsupported_type", f"{shown} is not a form; send JSON, multipart/form-data or urlencoded."))
        self._reader: _Multipart | _Urlencoded = _Multipart(content_type) if self.is_multipart else _Urlencoded()

    @property
    def model(self) -> str | None:
        return self._reader.fields.get(b"model")

    @property
    def stream(self) -> bool:
        return _is_yes(self._reader.fields.get(b"stream", ""))

    @property
    def model_span(self) -> tuple[int, int] | None:
        """(start, end) of the model's value, as byte offsets into the whole body."""
        return self._reader.model_span

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._reader.feed(data)

    def finish(self) -> None:
        """The body is whole.  Raises BadBody when the form is not."""
        self._reader.finish()

    def patch(self, name: str) -> tuple[int, int, bytes]:
        """(start, end, bytes to put there), so that the form names this model; a field of its own where it has none."""
        value = name.encode() if self.is_multipart else quote_plus(name).encode()
        span = self._reader.model_span
        if span is not None:
            return (*span, value)
        start = self._reader.starts_at
        return start, start, self._reader.field(value)


class _Fields:
    """The two fields we remember."""

    __slots__ = ("fields", "model_span", "starts_at")

    wanted = frozenset({b"model", b"stream"})

    def __init__(self) -> None:
        self.fields: dict[bytes, str] = {}
        self.model_span: tuple[int, int] | None = None
        self.starts_at = 0  # where a field may be put in

    def known(self, name: bytes) -> bytes | None:
        """The name, when it is one we remember."""
        if name != b"model" and name.lower() == b"model":  # some readers do not tell case apart
            raise _bad("bad_model", f"The form has a field `{name.decode()}`; write it `model`.")
        return name if name in self.wanted else None

    def keep(self, name: bytes, value: bytes, start: int, end: int) -> None:
        try:
            text = value.decode()
        except UnicodeDecodeError as exc:
            raise _bad("bad_model", f"The form's `{name.decode()}` is not UTF-8.") from exc
        if name == b"stream":
            self.fields.setdefault(name, text)
            return
        if not text or len(value) > MODEL_NAME_BYTES_MAX:
            raise _bad_name(text)
        if name in self.fields:
            raise _bad("bad_model", "The form has two `model` fields; send one.")
        self.fields[name] = text
        self.model_span = (start, end)


class _Multipart(_Fields):
    __slots__ = ("_at", "_base", "_buffer", "_line", "_name", "_parts", "_scanned")

    def __init__(self, content_type: bytes) -> None:
        super().__init__()
        boundary = _parameters(content_type).get(b"boundary", b"")
        if not boundary or len(boundary) > BOUNDARY_BYTES_MAX:
            raise _bad("bad_form", f"multipart/form-data needs a boundary of 1 to {BOUNDARY_BYTES_MAX} bytes in Content-Type.")
        self._line = b"\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that a boundary at the very start is like any other
        self._base = -2  # offset of the buffer's first byte in the body
        self._scanned = 0  # of the buffer: known to hold no boundary
        self._at = _At.BODY
        self._name: bytes | None = None  # of the part under way, when it is one we remember
        self._parts = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if self._at is _At.END:
            return  # an epilogue says nothing
        self._buffer += data
        while self._step():
            pass

    def finish(self) -> None:
        if self._at is not _At.END:
            raise _bad("bad_form", "The multipart body ends before its last boundary; send it whole, with the boundary of Content-Type.")

    def field(self, value: bytes) -> bytes:
        """A part that names a model."""
        return b'%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % (self._line[1:], value)

    def _step(self) -> bool:
        """Go on by one boundary or one head; False: more bytes are needed."""
        if self._at is _At.HEAD:
            return self._read_head()
        return self._at is _At.BODY and self._read_body()

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._base += count
        self._scanned = max(0, self._scanned - count)

    def _read_body(self) -> bool:
        buffer = self._buffer
        found = buffer.find(self._line, self._scanned)
        if found < 0:
            self._scanned = max(0, len(buffer) - len(self._line))  # with what may be before such a line
            if self._name is None:
                self._drop(self._scanned)
            elif len(buffer) > MODEL_NAME_BYTES_MAX + len(self._line) + 3:
                raise _too_long(self._name)
            return False
        line = found + len(self._line)
        rest = bytes(buffer[line : line + PADDING_BYTES_MAX + 2])
        ending = rest.lstrip(b" \t")[:2]
        if ending in {b"", b"\r", b"-"} and len(rest) < PADDING_BYTES_MAX + 2:
            self._scanned = found
            return False  # cannot be told yet
        if buffer[found - 1 : found] != b"\r" or (ending != b"\r\n" and rest[:2] != b"--"):
            if rest[:1] in _ENDS_A_BOUNDARY:
                message = "A line of the multipart body may be its boundary, or not; end boundaries with CR LF, or choose another one."
                raise _bad("bad_form", message)
            self._scanned = found + 1  # a longer line that begins alike is content
            return True
        self._end_part(found - 1)
        if ending != b"\r\n":
            self._at = _At.END
            self._buffer.clear()
            return False
        self._drop(line + rest.index(b"\r\n") + 2)
        self._scanned = 0
        self._at = _At.HEAD
        return True

    def _end_part(self, found: int) -> None:
        if not self._parts:
            self.starts_at = self._base + found + 2
        if self._name is not None:
            end = max(2, found)  # the buffer still begins with the line end of the head
            self.keep(self._name, bytes(self._buffer[2:end]), self._base + 2, self._base + end)
        self._name = None

    def _read_head(self) -> bool:
        buffer = self._buffer
        end = 0 if buffer.startswith(b"\r\n") else buffer.find(b"\r\n\r\n", 0, PART_HEAD_BYTES_MAX + 4)
        if end < 0:
            if len(buffer) > PART_HEAD_BYTES_MAX:
                raise _bad("bad_form", f"A part's header is longer than {PART_HEAD_BYTES_MAX:,} bytes; is this a multipart body at all?")
            return False
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise _bad("bad_form", f"The form has more than {PARTS_MAX:,} parts; send fewer.")
        name = _field_name(bytes(buffer[:end]))
        self._name = self.known(name) if name is not None else None
        # One line end stays: it may be the one before a boundary (a part with nothing in it).
        self._drop(end + 2 if end else 0)
        self._scanned = 0
        self._at = _At.BODY
        return True


def _too_long(name: bytes) -> BadBody:
    return _bad("bad_model", f"The form's `{name.decode()}` is longer than {MODEL_NAME_BYTES_MAX} bytes; name one of GET /v1/models.")


_ENDS_A_BOUNDARY = b" \t\r\n-"  # a line that goes on otherwise is none, to any reader
_ODD_HEAD = re.compile(rb"(?:\A|\n)[ \t]|\r(?!\n)|(?<!\r)\n|\0")  # folded lines, other line ends


def _field_name(head: bytes) -> bytes | None:
    """The name of a part that is a plain field; None for files and for parts without a name.

    Raises BadBody for a head in which other readers may find another name.
    """
    if _ODD_HEAD.search(head):
        raise _bad("bad_form", "A part's header has a folded line or one that does not end with CR LF; write one header a line.")
    lines = [line.partition(b":") for line in head.split(b"\r\n")]
    told = [value for name, colon, value in lines if colon and name.strip().lower() == b"content-disposition"]
    names = [name.lower() for value in told for name, _, _ in _PARAMETER.findall(value)]
    if len(told) > 1 or names.count(b"name") > 1 or any(name.startswith(b"name*") for name in names):
        raise _bad("bad_form", "A part of the form has several names, or one that is encoded; give it one plain `name`.")
    parameters = _parameters(told[0]) if told else {}
    field = parameters.get(b"name")
    if b"filename" not in parameters and b"filename*" not in parameters:
        return field
    if field is not None and field.lower() == b"model":  # a field to readers that look at what the file is called
        raise _bad("bad_model", "The form's `model` is a file; send it as a plain field.")
    return None


_FIRST_LETTERS = frozenset({b"m", b"M", b"s", b"%"})  # of a wanted name, as it may be written


class _Urlencoded(_Fields):
    """`name=value&...`; only one pair at a time is kept, and none that is too long to matter."""

    __slots__ = ("_base", "_is_skipping", "_pair")

    def __init__(self) -> None:
        super().__init__()
        self._pair = bytearray()
        self._base = 0  # offset of the pair under way
        self._is_skipping = False  # up to the next &

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        *ended, last = bytes(data).split(b"&")
        for piece in ended:
            if not self._pair and not self._is_skipping and piece[:1] not in _FIRST_LETTERS:
                self._base += len(piece) + 1  # a form may be a million pairs
                continue
            self._extend(piece)
            self._end_pair()
        self._extend(last)

    def finish(self) -> None:
        self._end_pair()

    def _extend(self, piece: bytes) -> None:
        self._pair += piece
        if self._is_skipping:
            self._base += len(self._pair)
            self._pair.clear()
            return
        name, equals, value = self._pair.partition(b"=")
        if not equals and len(name) <= FIELD_NAME_BYTES_MAX:
            return
        if not equals or self._named(bytes(name)) is None:
            self._is_skipping = True
            self._extend(b"")
        elif len(value) > 3 * MODEL_NAME_BYTES_MAX:
            raise _too_long(b"model")

    def _named(self, name: bytes) -> bytes | None:
        if len(name) > FIELD_NAME_BYTES_MAX:
            return None
        decoded = unquote_plus(name.decode("latin-1"), encoding="latin-1").encode("latin-1")
        return self.known(decoded)

    def field(self, value: bytes) -> bytes:
        return b"model=" + value + b"&"

    def _end_pair(self) -> None:
        name, equals, value = bytes(self._pair).partition(b"=")
        if equals and (field := self._named(name)) is not None:
            decoded = unquote_plus(value.decode("latin-1"), encoding="latin-1").encode("latin-1")
            start = self._base + len(name) + 1
            self.keep(field, decoded, start, start + len(value))
        self._base += len(self._pair) + 1
        self._pair.clear()
        self._is_skipping = False
