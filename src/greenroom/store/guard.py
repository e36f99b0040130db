"""Which hosts may be asked, and which addresses connected to: nobody reaches an inner machine by naming a model.

Every address that a name resolves to is checked, and the checked one is the one connected to; every hop of a redirect is
checked like the first.  Addresses that are not of the public internet are for hosts that the user named himself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from .facts import Refused

HOPS_MAX = 5  # redirects after another
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Asked for by no registry: these tell a machine's secrets to whoever is on it.
METADATA = frozenset(map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192")))
# Where the big ones keep their bytes and hand out their tokens: allowed with them, so that a list of hosts stays short.
COMPANIONS = {
    "docker.io": ("registry-1.docker.io", "*.docker.io", "*.docker.com", "*.r2.cloudflarestorage.com"),
    "ghcr.io": ("*.githubusercontent.com",),
    "quay.io": ("*.quay.io",),
    "huggingface.co": ("*.huggingface.co", "*.hf.co"),
    "registry.ollama.ai": ("ollama.ai", "*.ollama.ai", "ollama.com", "*.ollama.com", "*.r2.cloudflarestorage.com"),
}
DEFAULT_PORTS = {"https": 443, "http": 80}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may be asked.  `hosts` and `named` hold HOST, HOST:PORT or *.DOMAIN; a HOST without a port is its usual one (443, 80).

    `hosts` None: everybody, as a user at a terminal may.  A server that pulls for others has a list.  `named` are the hosts
    whose addresses may be private, because the user, and nobody else, wrote them down; `allow_private` extends that to
    `hosts`, where the operator's list is meant so.
    """

    hosts: frozenset[str] | None = None
    allow_private: bool = False
    named: frozenset[str] = frozenset()

    def naming(self, *hosts: str) -> Policy:
        """The same, with more hosts that the user named himself."""
        return replace(self, named=self.named | {host.lower() for host in hosts if host})

    def allows(self, host: str, port: int) -> bool:
        return self.hosts is None or _listed(host, port, (*self.hosts, *self.named, *_companions(self.hosts)))

    def may_be_private(self, host: str, port: int) -> bool:
        return _listed(host, port, self.named) or (self.allow_private and self.hosts is not None and _listed(host, port, self.hosts))


class Guard(AbstractResolver):
    """Resolves names for the connector; gives only addresses that may be connected to."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def check(self, url: URL, came_from: URL | None = None) -> None:
        """Raises Refused for a URL that must not be asked: its scheme, its host, or a way down from https to http."""
        if url.scheme not in DEFAULT_PORTS or not url.host:
            raise Refused(f"{shown(url)} is no web address: only https and http are followed")
        if came_from is not None and came_from.scheme == "https" and url.scheme == "http":
            raise Refused(f"{came_from.host} redirects from https to plain http ({shown(url)}): that would lose the protection of TLS")
        port = url.port or DEFAULT_PORTS[url.scheme]
        if not self.policy.allows(url.host, port):
            raise Refused(f"{url.host}:{port} is not among the hosts that models may be pulled from" + _hop(came_from))
        try:
            address = ipaddress.ip_address(url.host.split("%", 1)[0])
        except ValueError:
            return  # a name: its addresses are checked when it is resolved
        self.check_address(address, url.host, port, came_from)

    def check_address(self, address: Address, host: str, port: int, came_from: URL | None = None) -> None:
        """Raises Refused for an address that `host` must not lead to."""
        what = why_not(address)
        if what == "":
            return
        if what == "never" or not self.policy.may_be_private(host, port):
            kind = "an address that no model is pulled from" if what == "never" else f"{what} address"
            advice = "" if what == "never" else f"; if you mean it, allow it by name: --allow-host {host_port(host, port)}"
            leads = f"{host} is" if str(address) == host.strip("[]") else f"{host} leads to {address},"
            raise Refused(f"{leads} {kind}{_hop(came_from)}: refused{advice}")

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        """All addresses of `host`.  One that must not be connected to refuses the host altogether."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG)
        results: list[ResolveResult] = []
        for kind, _, protocol, _, place in found:
            address = str(place[0])
            self.check_address(ipaddress.ip_address(address.split("%", 1)[0]), host, port)
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            results.append(ResolveResult(hostname=host, host=address, port=port, family=kind, proto=protocol, flags=flags))
        return results

    async def close(self) -> None:
        """Nothing is kept."""


def why_not(address: Address) -> str:
    """ "" = a public address; "never" = for nobody; otherwise what it is: "a loopback"."""
    inner = _inside(address)
    if inner in METADATA or address in METADATA or inner.is_unspecified or inner.is_multicast:
        return "never"
    if inner.is_loopback:
        return "a loopback"
    if inner.is_link_local:
        return "a link-local"
    return "" if inner.is_global else "a private"


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown(url: URL) -> str:
    """A URL for people: no user, no query (where signed addresses keep their secret)."""
    return str(url.with_user(None).with_query(None).with_fragment(None)) if url.host else url.scheme + ":…"


def _inside(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None) or address


def _listed(host: str, port: int, entries: Iterable[str]) -> bool:
    host = host.lower().strip("[]").rstrip(".")
    return any(_matches(host, port, entry) for entry in entries)


def _matches(host: str, port: int, entry: str) -> bool:
    name, _, wanted = entry.rpartition(":")
    if not name or not wanted.isdecimal() or (":" in name and not name.endswith("]")):
        name, wanted = entry, ""
    if wanted and int(wanted) != port:
        return False
    if not wanted and port not in DEFAULT_PORTS.values():
        return False
    name = name.lower().strip("[]").rstrip(".")
    # Only a leading *. is a pattern; anything else is the very name.
    return fnmatchcase(host, "*." + name.removeprefix("*.").replace("[", "").replace("*", "")) if name.startswith("*.") else host == name


def _companions(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(companion for host in hosts for companion in COMPANIONS.get(host, ()))


def _hop(came_from: URL | None) -> str:
    return f" (redirected there by {came_from.host})" if came_from is not None else ""
