"""Names of this host, origins, CORS (B16, B42)."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.proxy.guards import CORS_NAMES, Guards, is_preflight
from greenroom.proxy.targets import Kind

EVIL = b"http://evil.example"
LOOPBACK = Guards("127.0.0.1", ["my-box.lan", "*.corp.example", ".team.example"], ["*"])
PUBLIC = Guards("0.0.0.0", [], ["*"])
LISTED = Guards("127.0.0.1", [], ["http://notes.example", "app://obsidian.md"])

Headers = list[tuple[bytes, bytes]]


def with_host(host: bytes, *more: tuple[bytes, bytes]) -> Headers:
    return [(b"accept", b"*/*"), (b"host", host), *more]


def code_of(guards: Guards, method: bytes, kind: Kind, headers: Headers, *, changes: bool = False) -> str | None:
    refusal = guards.check(method, kind, headers, changes=changes)
    assert refusal is None or refusal.status == 403
    return refusal.code if refusal else None


FOREIGN = [EVIL, b"null", b"file://", b"http://localhost:3000", b"https://127.0.0.1:8081", b"http://127.0.0.1:8080.evil", b""]
GOOD_HOSTS = [
    b"localhost", b"localhost:8080", b"LOCALHOST:8080", b"localhost.", b"app.localhost:1", b"127.0.0.1", b"127.0.0.1:8080", b"127.8.8.8",
    b"[::1]", b"[::1]:8080", b"my-box.lan", b"My-Box.lan:8080", b"my-box.lan.", b"a.corp.example", b"a.b.team.example:80",
]  # fmt: skip
BAD_HOSTS = [
    b"evil.example", b"evil.example:8080", b"localhost.evil.example", b"127.0.0.1.evil.example", b"notlocalhost", b"corp.example.evil",
    b"evilcorp.example", b"10.0.0.5", b"8.8.8.8:8080", b"[::2]", b"[fe80::1]:80", b"", b":8080", b"[::1", b"[::1]x", b"[]", b"::1:x",
    b"localhost:x", b"localhost:80:80", b"a b", b"\xff", b"0x7f.1", b"2130706433", b"localhost/", b"evil@localhost",
]  # fmt: skip


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_our_own_names_pass_on_every_route(host: bytes, kind: Kind) -> None:
    """Loopback names, the listen address, configured extra names; any port, any case."""
    assert code_of(LOOPBACK, b"GET", kind, with_host(host)) is None


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("host", BAD_HOSTS)
def test_another_name_is_403_on_every_route(host: bytes, kind: Kind) -> None:
    """B42: a page that re-points its name to this address is refused, for GET, POST and upgrades, the UI included."""
    assert code_of(LOOPBACK, b"GET", kind, with_host(host)) == "unknown_host"
    assert code_of(LOOPBACK, b"POST", kind, with_host(host)) == "unknown_host"


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("host", [b"my-box:8080", b"llama-swap:8080", b"evil.example", *GOOD_HOSTS, *BAD_HOSTS])
def test_with_keys_every_name_is_ours_and_origins_are_still_judged(host: bytes, kind: Kind) -> None:
    """Clients of a network call us by names nobody listed; a page that re-points its name has no key.  Foreign pages stay out."""
    keyed = Guards("0.0.0.0", [], [], check_host=False)

    assert code_of(keyed, b"GET", kind, with_host(host)) is None
    assert code_of(keyed, b"POST", kind, with_host(host)) is None
    assert code_of(keyed, b"POST", kind, with_host(host, (b"origin", b"http://page.elsewhere"))) == "foreign_origin"


def test_without_keys_the_host_is_checked_unless_told_otherwise() -> None:
    """B42: the check is on by default."""
    assert code_of(Guards("0.0.0.0", [], []), b"POST", Kind.INFERENCE, with_host(b"my-box:8080")) == "unknown_host"


def test_a_request_without_host_passes() -> None:
    """HTTP/1.0 tools; a browser never leaves it out."""
    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, [(b"accept", b"*/*")]) is None


def test_bound_to_every_address_any_address_is_ours_but_no_name_is() -> None:
    """The check stays on: names still have to be configured."""
    for host in (b"10.0.0.5:8080", b"192.168.1.7", b"[fe80::1]:80", b"localhost"):
        assert code_of(PUBLIC, b"GET", Kind.INFERENCE, with_host(host)) is None
    assert code_of(PUBLIC, b"GET", Kind.INFERENCE, with_host(b"evil.example")) == "unknown_host"
    assert code_of(Guards("10.0.0.5", [], []), b"GET", Kind.INFERENCE, with_host(b"10.0.0.5:80")) is None
    assert code_of(Guards("::1", ["*"], []), b"GET", Kind.INFERENCE, with_host(b"anything.example")) is None


@pytest.mark.parametrize(
    "origin", [EVIL, b"null", b"file://", b"http://localhost:3000", b"https://127.0.0.1:8081", b"http://127.0.0.1:8080.evil", b""]
)
@pytest.mark.parametrize("content_type", [b"text/plain", b"application/json", b"application/x-www-form-urlencoded"])
def test_a_foreign_page_changes_nothing_whatever_the_content_type(origin: bytes, content_type: bytes) -> None:
    """B42: a "simple" cross-site POST to unload, too."""
    headers = with_host(b"127.0.0.1:8080", (b"origin", origin), (b"content-type", content_type))

    for method in (b"POST", b"PUT", b"DELETE"):
        assert code_of(LOOPBACK, method, Kind.CONTROL, headers) == "foreign_origin"
    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, headers, changes=True) == "foreign_origin"


@pytest.mark.parametrize("kind", [Kind.UPSTREAM, Kind.INFERENCE, Kind.CONTROL])
def test_a_foreign_page_opens_no_websocket(kind: Kind) -> None:
    """Upgrades have no CORS of their own, so the origin is judged here even where `*` may read."""
    headers = with_host(b"127.0.0.1:8080", (b"origin", EVIL), (b"upgrade", b"websocket"), (b"connection", b"upgrade"))

    assert code_of(LOOPBACK, b"GET", kind, headers) == "foreign_origin"
    assert code_of(LOOPBACK, b"GET", kind, headers[:2] + headers[3:]) is None  # not a browser
    assert code_of(LOOPBACK, b"GET", kind, [*headers[:2], (b"origin", b"http://127.0.0.1:8080"), *headers[3:]]) is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"127.0.0.1:8080", b"http://127.0.0.1:8080"),
        (b"localhost", b"http://localhost"),
        (b"localhost:80", b"http://LOCALHOST"),
        (b"my-box.lan", b"https://my-box.lan:443"),
        (b"my-box.lan", b"https://my-box.lan"),
        (b"[::1]:8080", b"http://[::1]:8080"),
    ],
)
def test_our_own_page_may_change_things(host: bytes, origin: bytes) -> None:
    """Same origin, default ports aside."""
    assert code_of(LOOPBACK, b"POST", Kind.CONTROL, with_host(host, (b"origin", origin))) is None


@pytest.mark.parametrize(
    ("site", "mode", "changes", "code"),
    [
        (b"cross-site", b"no-cors", False, "foreign_origin"),
        (b"same-site", b"no-cors", False, "foreign_origin"),
        (b"cross-site", b"navigate", False, None),
        (b"cross-site", b"navigate", True, "foreign_origin"),
        (b"same-origin", b"cors", True, None),
        (b"none", b"navigate", True, None),
    ],
)
def test_images_and_links_of_other_sites_change_nothing(site: bytes, mode: bytes, changes: bool, code: str | None) -> None:
    """An <img> or a link to GET /unload carries no Origin but says where it comes from; a link to the UI is fine."""
    headers = with_host(b"localhost", (b"sec-fetch-site", site), (b"sec-fetch-mode", mode))

    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, headers, changes=changes) == code
    assert code_of(LOOPBACK, b"GET", Kind.INFERENCE, headers) is None


def test_pages_may_use_the_inference_api_as_configured() -> None:
    """`*`: any page; a list: those pages and our own, and no other may even make it work."""
    headers = with_host(b"127.0.0.1", (b"origin", EVIL))

    assert code_of(LOOPBACK, b"POST", Kind.INFERENCE, headers) is None
    assert code_of(LISTED, b"POST", Kind.INFERENCE, headers) == "foreign_origin"
    assert code_of(LISTED, b"GET", Kind.MODELS, headers) is None  # it gets no leave to read the answer
    assert code_of(LISTED, b"POST", Kind.INFERENCE, with_host(b"127.0.0.1", (b"origin", b"app://obsidian.md"))) is None
    assert code_of(LISTED, b"POST", Kind.CONTROL, with_host(b"127.0.0.1", (b"origin", b"http://notes.example"))) is None


def test_with_listed_origins_no_other_page_starts_a_model_by_looking() -> None:
    """A GET of /upstream or of an inference route may start one; a link that a person follows may."""
    named = with_host(b"127.0.0.1", (b"origin", EVIL))
    image = with_host(b"127.0.0.1", (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors"))
    link = with_host(b"127.0.0.1", (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate"))
    own = with_host(b"127.0.0.1", (b"sec-fetch-site", b"same-origin"), (b"sec-fetch-mode", b"no-cors"))

    for kind in (Kind.UPSTREAM, Kind.INFERENCE):
        assert code_of(LISTED, b"GET", kind, named) == "foreign_origin"
        assert code_of(LISTED, b"GET", kind, image) == "foreign_origin"
        assert code_of(LISTED, b"OPTIONS", kind, named) is None  # the preflight tells it
        assert code_of(LISTED, b"GET", kind, link) is code_of(LISTED, b"GET", kind, own) is None
        assert code_of(LOOPBACK, b"GET", kind, named) is code_of(LOOPBACK, b"GET", kind, image) is None
    assert code_of(LISTED, b"GET", Kind.MODELS, image) is None


def test_a_browser_that_tells_nothing_changes_nothing_with_get() -> None:
    """On plain http beyond loopback browsers send no Sec-Fetch-Site, but cached Basic credentials; scripts go on as before."""
    browser = with_host(b"localhost", (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64)"))
    script = with_host(b"localhost", (b"user-agent", b"curl/8.5.0"))

    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, browser, changes=True) == "foreign_origin"
    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, browser) is None
    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, script, changes=True) is None
    assert code_of(LOOPBACK, b"GET", Kind.CONTROL, [*browser, (b"sec-fetch-site", b"none")], changes=True) is None


def test_long_host_names_are_not_remembered() -> None:
    """Clients write them, up to 64 KiB each."""
    guards = Guards("127.0.0.1", ["*"], [])
    for host in (b"a" * 1000, b"short"):
        assert code_of(guards, b"GET", Kind.INFERENCE, with_host(host)) is None
    assert list(guards._host_known) == [b"short"]


# --------------------------------------------------------------------------------------------------------------- CORS


def test_cors_lines_are_given_to_pages_only() -> None:
    """Exactly one Allow-Origin; nothing for clients that are no browsers."""
    assert LOOPBACK.cors(with_host(b"x")) == ()
    lines = b"".join(LOOPBACK.cors(with_host(b"x", (b"origin", EVIL))))
    assert lines.count(b"Access-Control-Allow-Origin: *\r\n") == 1
    assert b"X-Greenroom-Model" in lines


def test_a_listed_origin_is_echoed_and_others_get_nothing() -> None:
    """With `Vary: Origin`, so that caches do not mix them up."""
    allowed = b"".join(LISTED.cors([(b"origin", b"http://Notes.example")]))
    assert b"Access-Control-Allow-Origin: http://Notes.example\r\nVary: Origin\r\n" in allowed
    assert LISTED.cors([(b"origin", EVIL)]) == (b"Vary: Origin\r\n",)
    assert Guards("127.0.0.1", [], []).cors([(b"origin", EVIL)]) == ()


def test_the_control_plane_is_never_open_to_everybody() -> None:
    """B16: `*` does not count there; a listed origin does."""
    assert LOOPBACK.cors([(b"origin", EVIL)], control=True) == ()
    assert b"Allow-Origin" in b"".join(LISTED.cors([(b"origin", b"http://notes.example")], control=True))
    assert b"Allow-Origin" not in LOOPBACK.preflight([(b"origin", EVIL), (b"access-control-request-method", b"POST")], control=True)


def preflight(guards: Guards, *headers: tuple[bytes, bytes], control: bool = False) -> dict[bytes, bytes]:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="OPTIONS", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(guards.preflight(list(headers), control=control))
    response = client.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 204
    assert isinstance(client.next_event(), h11.EndOfMessage)
    assert client.trailing_data[0] == b""
    names = [name for name, _ in response.headers]
    assert len(names) == len(set(names))
    return dict(response.headers)


def test_a_preflight_is_answered_with_what_was_asked() -> None:
    """B16: SDKs' x-stainless-* headers and any other are echoed."""
    got = preflight(
        LOOPBACK,
        (b"origin", b"http://notes.example"),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,content-type, x-stainless-os,x-anything"),
    )

    assert got[b"access-control-allow-origin"] == b"*"
    assert got[b"access-control-allow-headers"] == b"authorization, content-type, x-stainless-os, x-anything"
    assert b"POST" in got[b"access-control-allow-methods"]
    assert b"content-length" not in got


@given(st.binary(max_size=120))
def test_only_header_names_are_echoed(asked: bytes) -> None:
    """No bytes in the question put a line of their own into the answer."""
    got = preflight(LOOPBACK, (b"origin", EVIL), (b"access-control-request-headers", asked))

    assert set(got) <= CORS_NAMES | {b"vary"}


def test_a_listed_origin_may_reach_the_private_network() -> None:
    """Only one that was named; `*` does not open a loopback service to public pages' private-network requests."""
    asked = ((b"origin", b"http://notes.example"), (b"access-control-request-private-network", b"true"))

    assert preflight(LISTED, *asked)[b"access-control-allow-private-network"] == b"true"
    assert b"access-control-allow-private-network" not in preflight(LOOPBACK, *asked)


def test_an_options_that_no_page_asks_is_told_the_methods() -> None:
    """Plain OPTIONS, or one of a page that is not allowed."""
    assert b"POST" in preflight(LOOPBACK)[b"allow"]
    assert b"access-control-allow-origin" not in preflight(LISTED, (b"origin", EVIL))


def test_what_a_preflight_is() -> None:
    """OPTIONS with Access-Control-Request-Method."""
    assert is_preflight(b"OPTIONS", [(b"access-control-request-method", b"POST")])
    assert not is_preflight(b"OPTIONS", [])
    assert not is_preflight(b"POST", [(b"access-control-request-method", b"POST")])


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_no_host_or_origin_makes_it_raise(host: bytes, origin: bytes) -> None:
    """Whatever bytes they are."""
    for guards in (LOOPBACK, PUBLIC, LISTED):
        guards.check(b"POST", Kind.CONTROL, with_host(host, (b"origin", origin)))
        guards.cors([(b"origin", origin)])
