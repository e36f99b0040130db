"""A data plane whose models are served by scripted peers; optionally with TLS by a certificate made here."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import itertools
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.proxy.admission import ModelRoute
from greenroom.proxy.peer_door import Peer, PeerDoor, Peers, Standing
from greenroom.proxy.upstream import Line
from tests.proxy.relay_world import Engine, EngineSide, Reply, Seen, World, a_world

CHAT = b'{"model":"far","messages":[]}'


def a_peer(
    id: str,
    port: int,
    models: Mapping[str, str] | Sequence[str] = ("far",),
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    connect_s: float = 5.0,
    route: Mapping[str, Any] | None = None,
    **more: Any,
) -> Peer:
    names = dict(models) if isinstance(models, Mapping) else {name: name for name in models}
    return Peer(
        id,
        host,
        port,
        more.pop("base", ""),
        f"http://{host}:{port}",
        f"{host}:{port}".encode(),
        Line(tls, connect_s, 30.0),
        {here: ModelRoute(here, use_model_name=there, **(route or {})) for here, there in names.items()},
        identity=f"{id}{port}",
        **more,
    )


@dataclass
class FarWorld:
    world: World
    door: PeerDoor
    engines: list[Engine]

    def standing(self, peer: str = "p0") -> Standing:
        return self.door.peers.standings[peer]

    def take(self, *peers: Peer) -> None:
        """As a reload does."""
        self.door.peers, before = Peers(peers, self.door.clock(), self.door.peers), self.local
        self.world.plane.catalog = self.door.peers.catalog(before)

    @property
    def local(self) -> Any:
        return self._local

    _local: Any = None


@contextlib.asynccontextmanager
async def a_far_world(*replies: Reply, peers: Sequence[Mapping[str, Any]] = (), **world: Any) -> AsyncIterator[FarWorld]:
    """One peer (p0, p1 ...) for each reply, all serving `far`; `peers` says more about each.

    At the end nothing of a request may be left at any of them.
    """
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(reply)) for reply in replies]
        made = await stack.enter_async_context(a_world(**world))
        loop = asyncio.get_running_loop()
        door = PeerDoor(made.admissions, Peers(), itertools.count(1).__next__, loop.time)
        found = FarWorld(made, door, engines)
        found._local = made.plane.catalog
        more = [*peers, *[{}] * (len(engines) - len(peers))]
        found.take(*(a_peer(f"p{place}", engine.port, **dict(more[place])) for place, engine in enumerate(engines)))
        made.plane.admissions = door
        yield found
        await made.server.close(0.0)
        assert not door.open
        for standing in door.peers.standings.values():
            assert standing.in_flight == 0
            assert sum(standing.outcomes.values()) == standing.requests
            assert not standing.health.trying
            assert not any(one.trying for one in standing.serving.values())
        assert not any(engine.faults for engine in engines)


def told(status: int, *, body: bytes = b'{"error":{"message":"not now"}}', extra: str = "") -> Reply:
    """A whole answer."""

    async def reply(seen: Seen, side: EngineSide) -> None:
        phrase = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        await side.send(phrase.encode() + body)

    return reply


def by(name: str) -> Reply:
    return told(200, body=b'{"by":"%b"}' % name.encode())


async def dies(seen: Seen, side: EngineSide) -> None:
    """Without one byte."""
    side.rst()


async def dies_in_its_head(seen: Seen, side: EngineSide) -> None:
    await side.send(b"HTTP/1.1 200 OK\r\nContent-Ty")
    side.fin()


async def dies_after_its_head(seen: Seen, side: EngineSide) -> None:
    await side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
    side.fin()


async def dies_in_its_stream(seen: Seen, side: EngineSide) -> None:
    await side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    await side.send(b"b\r\ndata: one\n\n\r\n")
    side.rst()


async def hangs(seen: Seen, side: EngineSide) -> None:
    await side.wait_gone()


async def never_ends_its_head(seen: Seen, side: EngineSide) -> None:
    await side.send(b"HTTP/1.1 200 OK\r\n")
    with contextlib.suppress(ConnectionError):
        while not side.writer.is_closing():
            await side.send(b"X-More: %b\r\n" % (b"a" * 1000))
            await asyncio.sleep(0)


def a_certificate(folder: Path, *, name: str = "localhost", days: int = 30) -> tuple[Path, Path]:
    """(certificate, key) files of a self-signed certificate for `name` and 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    begun = now - datetime.timedelta(days=60 if days < 0 else 1)
    alternative = [x509.DNSName(name), *([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if name == "localhost" else [])]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begun)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, serialization.NoEncryption()))
    return paths


class TlsEngine(Engine):
    """An Engine behind TLS."""

    def __init__(self, reply: Reply, certificate: tuple[Path, Path]) -> None:
        super().__init__(reply)
        self._certificate = certificate

    async def __aenter__(self) -> TlsEngine:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._certificate)
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20, ssl=context)
        self.port = self.server.sockets[0].getsockname()[1]
        return self
