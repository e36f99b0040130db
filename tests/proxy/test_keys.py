"""Who is asking, told from the key presented."""

from __future__ import annotations

import base64
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config.model import KeyConfig
from greenroom.proxy import keys as module
from greenroom.proxy.keys import ANY, ANYONE, CREDENTIAL_BYTES_MAX, NOBODY, STRIPPED, Holder, Keys, Scope, mask_of, words_of

KEYS = Keys(["sk-first", "sk-second", "pässword:with:colons"])


def asker(keys: Keys, *headers: tuple[bytes, bytes]) -> str | None:
    holder = keys.check(headers)
    return None if holder is None else holder.name


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize(
    ("name", "value", "who"),
    [
        (b"authorization", b"Bearer sk-first", "key-1"),
        (b"authorization", b"bearer   sk-second  ", "key-2"),
        (b"authorization", b"BEARER sk-first", "key-1"),
        (b"authorization", basic("anyone:sk-first"), "key-1"),
        (b"authorization", basic(":sk-second"), "key-2"),
        (b"authorization", basic("user:pässword:with:colons"), "key-3"),
        (b"x-api-key", b"sk-first", "key-1"),
        (b"x-api-key", b" sk-second ", "key-2"),
        (b"authorization", "Bearer pässword:with:colons".encode(), "key-3"),
    ],
)
def test_a_key_opens_in_every_accepted_form(name: bytes, value: bytes, who: str) -> None:
    """Bearer, Basic (the password) and x-api-key; the name told says nothing of the key."""
    assert asker(KEYS, (b"host", b"x"), (name, value), (b"accept", b"*/*")) == who


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer sk-firs")],
        [(b"authorization", b"Bearer sk-firstt")],
        [(b"authorization", b"Bearer SK-FIRST")],
        [(b"authorization", b"sk-first")],
        [(b"authorization", b"Token sk-first")],
        [(b"authorization", b"Basic sk-first")],
        [(b"authorization", b"Basic !!!!")],
        [(b"authorization", b"Basic \xff\xfe")],
        [(b"authorization", basic("sk-first"))],
        [(b"authorization", basic("sk-first:"))],
        [(b"authorization", basic("u:sk-wrong"))],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer sk-first")],
        [(b"api-key", b"sk-first")],
        [(b"proxy-authorization", b"Bearer sk-first")],
        [(b"cookie", b"sk-first")],
        [(b"authorization", b"Bearer " + b"x" * (CREDENTIAL_BYTES_MAX + 1))],
        [(b"authorization", b"Basic " + b"A" * 1_000_000)],
    ],
)
def test_anything_else_does_not_open(headers: list[tuple[bytes, bytes]]) -> None:
    """Missing, wrong, cut, in another case, in another header, malformed, huge."""
    assert KEYS.check(headers) is None


def test_one_right_key_among_two_is_enough_but_not_among_many() -> None:
    """Clients send the same key in two headers, or a dummy in one; nobody may try a list in one request."""
    right = (b"x-api-key", b"sk-first")
    wrong = (b"authorization", b"Bearer dummy")

    assert asker(KEYS, wrong, right) == "key-1"
    assert asker(KEYS, right, wrong) == "key-1"
    assert KEYS.check([*[(b"x-api-key", b"guess")] * 10, right]) is None


def test_without_keys_everybody_is_nobody() -> None:
    """Nothing is required then, whatever is presented."""
    assert not Keys([]).required
    assert Keys([]).check([(b"authorization", b"Bearer anything")]) is ANYONE
    assert KEYS.required


def test_a_key_listed_twice_has_its_first_name() -> None:
    """Names stay those of the first mention."""
    assert asker(Keys(["a", "b", "a"]), (b"x-api-key", b"a")) == "key-1"


def test_the_object_does_not_hold_the_keys() -> None:
    """Nothing that a dump or a repr of it shows is a key."""
    held = repr([getattr(KEYS, name) for name in KEYS.__slots__])

    assert "sk-first" not in held
    assert "sk-first" not in repr(KEYS)
    assert "sk-first" not in repr(KeyConfig("sk-first", "a"))


@pytest.mark.parametrize("secret", [b"sk-first", b"sk-third", b"sk-wrong", b"x"])
def test_every_key_is_compared_each_time_in_constant_time(secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one fits; digests of one length, never the keys."""
    keys = Keys(["sk-first", "sk-second", "sk-third"])
    compared: list[tuple[bytes, bytes]] = []
    real = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda one, other: bool(compared.append((one, other))) or real(one, other))

    keys.check([(b"x-api-key", secret)])

    assert len(compared) == 3
    assert {len(each) for pair in compared for each in pair} == {16}
    assert len({other for _, other in compared}) == 1


def test_a_scoped_key_tells_what_it_is_good_for() -> None:
    """Its name, its scopes, its models, its limit; a plain text may do everything."""
    keys = Keys(["plain", KeyConfig("sk-a", "team", ("view", "inference"), ("chat",), 3)])
    plain, team = (keys.check([(b"x-api-key", key)]) for key in (b"plain", b"sk-a"))

    assert plain is not None
    assert (plain.name, plain.scopes, plain.models, plain.limit) == ("key-1", ANY, None, None)
    assert team is not None
    assert (team.name, team.scopes, team.models, team.limit) == ("team", Scope.INFERENCE | Scope.VIEW, ("chat",), 3)
    assert team.told == [(b"X-Greenroom-Key-Name", b"team"), (b"X-Greenroom-Scopes", b"inference,view")]
    assert (NOBODY.told, ANYONE.told) == ([], [(b"X-Greenroom-Scopes", b"inference,view,admin")])
    assert [words_of(mask_of(words)) for words in ((), ("admin", "view"), ("view", "view"))] == [(), ("view", "admin"), ("view",)]


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "a\0b", "ü€", "\ud800", "a: b", "%0d%0a", "\x7f", "\u202eb"])
def test_no_name_breaks_out_of_its_header(name: str) -> None:
    """Names are checked when they are read; should one come through all the same, it stays one line of ASCII."""
    value = dict(Holder(name).told)[b"X-Greenroom-Key-Name"]

    assert value.isascii()
    assert value.decode().isprintable()
    assert unquote_to_bytes(value) == name.encode("utf-8", "surrogatepass")


def test_running_requests_of_a_key_are_known_after_a_reload() -> None:
    """By the key, not by its place or its name."""
    before = Keys([KeyConfig("a", "one"), KeyConfig("b", "two")])
    then = before.check([(b"x-api-key", b"b")])
    assert then is not None
    then.load.now = 2
    after = Keys(["c", KeyConfig("b", "one", limit=2), KeyConfig("a", "two")], before)

    assert [holder.load.now for holder in (after.check([(b"x-api-key", key)]) for key in (b"c", b"b", b"a")) if holder] == [0, 2, 0]


def test_every_header_that_may_hold_a_key_is_stripped() -> None:
    """The engine never sees a client's key."""
    assert {b"authorization", b"x-api-key", b"proxy-authorization"} <= STRIPPED


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key"]), st.binary(max_size=40)), max_size=5))
def test_no_bytes_make_it_raise_or_open(headers: list[tuple[bytes, bytes]]) -> None:
    """Random credentials are refused."""
    assert KEYS.check(headers) is None
