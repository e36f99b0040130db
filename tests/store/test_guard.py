"""Nobody reaches an inner machine by naming a model: addresses, hops and hosts are checked before anything is connected to."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from yarl import URL

from greenroom.store.facts import Refused
from greenroom.store.guard import METADATA, Guard, Policy, why_not


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("127.0.0.1", "a loopback"),
        ("127.9.9.9", "a loopback"),
        ("::1", "a loopback"),
        ("::ffff:127.0.0.1", "a loopback"),
        ("64:ff9b::7f00:1", "a loopback"),
        ("169.254.10.10", "a link-local"),
        ("fe80::1", "a link-local"),
        ("10.1.2.3", "a private"),
        ("172.16.0.1", "a private"),
        ("192.168.1.1", "a private"),
        ("100.64.0.1", "a private"),
        ("fd12::1", "a private"),
        ("::ffff:10.0.0.1", "a private"),
        ("2002:0a00:0001::", "a private"),
        ("0.0.0.0", "never"),
        ("::", "never"),
        ("224.0.0.1", "never"),
        ("ff02::1", "never"),
        ("169.254.169.254", "never"),
        ("::ffff:169.254.169.254", "never"),
        ("64:ff9b::a9fe:a9fe", "never"),
        ("fd00:ec2::254", "never"),
        ("100.100.100.200", "never"),
        ("8.8.8.8", ""),
        ("2606:4700::1111", ""),
        ("::ffff:8.8.8.8", ""),
    ],
)
def test_what_an_address_is(address: str, what: str) -> None:
    """Every spelling of an inner address is seen through."""
    assert why_not(ipaddress.ip_address(address)) == what


def test_a_user_may_name_his_own_machine_and_only_that_port_of_it() -> None:
    """127.0.0.1:5000 in a reference does not open 127.0.0.1:6379."""
    guard = Guard(Policy(named=frozenset({"127.0.0.1:5000"})))
    guard.check(URL("http://127.0.0.1:5000/v2/"))

    for url in ("http://127.0.0.1:6379/", "http://127.0.0.1/", "http://[::1]:5000/", "https://127.0.0.2:5000/"):
        with pytest.raises(Refused, match="refused"):
            guard.check(URL(url))


def test_not_even_a_user_reaches_what_tells_a_machines_secrets() -> None:
    """Addresses of metadata services are for nobody."""
    for address in METADATA:
        host = f"[{address}]" if address.version == 6 else str(address)
        with pytest.raises(Refused, match="no model is pulled from"):
            Guard(Policy(named=frozenset({f"{host}:80"}))).check(URL(f"http://{host}/latest/meta-data/"))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h.example/x", "gopher://h.example/", "data:,x", "https://"])
def test_only_web_addresses_are_followed(url: str) -> None:
    with pytest.raises(Refused, match="no web address"):
        Guard(Policy()).check(URL(url))


def test_a_redirect_never_leads_from_tls_to_the_clear() -> None:
    with pytest.raises(Refused, match="plain http"):
        Guard(Policy()).check(URL("http://cdn.example/x"), came_from=URL("https://h.example/x"))


def test_a_server_asks_only_whom_its_list_names() -> None:
    """A list of hosts means hosts, ports and sub-domains as written, and the places where the big ones keep their bytes."""
    guard = Guard(Policy(hosts=frozenset({"registry.example", "other.example:5000", "*.corp.example", "ghcr.io"})))
    for url in (
        "https://registry.example/v2/",
        "https://other.example:5000/",
        "https://a.b.corp.example/",
        "https://x.githubusercontent.com/",
    ):
        guard.check(URL(url))
    for url in (
        "https://registry.example.evil.example/",
        "https://evilregistry.example/",
        "https://registry.example:8443/",
        "https://other.example/",
        "https://corp.example/",
        "https://evilcorp.example/",
        "https://example/",
    ):
        with pytest.raises(Refused, match="not among the hosts"):
            guard.check(URL(url))


def test_a_listed_host_is_not_thereby_an_inner_one() -> None:
    """Its name must not lead inside, unless the operator says that his list is meant so."""
    address = ipaddress.ip_address("10.0.0.5")
    listed = frozenset({"registry.example"})
    with pytest.raises(Refused, match="a private address"):
        Guard(Policy(listed)).check_address(address, "registry.example", 443)
    Guard(Policy(listed, allow_private=True)).check_address(address, "registry.example", 443)
    with pytest.raises(Refused, match="a private address"):
        Guard(Policy(listed, allow_private=True)).check_address(address, "elsewhere.example", 443)


async def test_the_checked_address_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with one inner address among outer ones is refused altogether; a good one gives the very addresses that were checked."""
    answers = {"mixed.example": ["93.184.216.34", "127.0.0.1"], "good.example": ["93.184.216.34"]}

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (address, port)) for address in answers[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    guard = Guard(Policy())

    with pytest.raises(Refused, match="a loopback address"):
        await guard.resolve("mixed.example", 443)
    assert [found["host"] for found in await guard.resolve("good.example", 443)] == ["93.184.216.34"]
