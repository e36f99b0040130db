"""Servers that models come from: one of ours that misbehaves by switch, and the real docker-registry, plain, with TLS, with a password."""

from __future__ import annotations

import asyncio
import datetime
import functools
import http.client
import ipaddress
import json
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from greenroom.store.layouts import OCI_INDEX, OCI_MANIFEST
from tests.validators import tool

from .models import digest as plain_digest
from .models import modelpack, named

digest = functools.cache(plain_digest)  # of the same large bytes, many times
USER, PASSWORD = "piet", "s3cret-pass"
HTPASSWD = f"{USER}:$2b$04$9uA3e8Jq2ZfgObwVb8w.meMAV1oRU0yxax.IHIyEECwLHaJ.4zISG\n"  # bcrypt, as docker-registry wants it
UP_S_MAX = 30.0
PIECE_BYTES = 64 * 1024


@dataclass
class Fake:
    """A registry in memory.  Each switch is one way to misbehave."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_at: int | None = None  # the connection breaks when so many bytes of blobs were sent, once
    pause_at: int | None = None  # after so many bytes nothing more comes, until `go`
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # a blob was asked for
    blob_status: int = 200
    fails: int = 0  # so many answers are 503 first
    retry_after: str = ""
    redirect: str = ""  # where blobs are said to be
    redirect_manifests: str = ""
    endless: bool = False
    truncated: bool = False
    other_bytes: bool = False
    manifest_digest: str = ""  # told in the header
    content_range: str = ""
    gate: asyncio.Event | None = None  # blobs wait for it
    challenge: str = ""
    authorization: str = ""  # wanted
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    seen: list[Mapping[str, str]] = field(default_factory=list)  # headers
    sent: int = 0
    port: int = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self, name: str, *files: tuple[str, bytes], tag: str = "v1") -> str:
        """A model; its manifest's digest."""
        manifest = modelpack(*(named(data, path) for path, data in files))
        self.blobs |= {digest(data): data for _, data in files} | {digest(b"{}"): b"{}"}
        self.manifests[f"{name}:{tag}"] = self.manifests[f"{name}:{digest(manifest)}"] = manifest
        return digest(manifest)

    def blob_requests(self) -> list[tuple[str, str, str]]:
        return [item for item in self.asked if "/blobs/" in item[1] and digest(b"{}") not in item[1]]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path, request.headers.get("Range", "")))
        self.seen.append(dict(request.headers))
        if self.authorization and request.headers.get("Authorization") != self.authorization:
            return web.Response(status=401, headers={"WWW-Authenticate": self.challenge})
        if self.fails:
            self.fails -= 1
            return web.Response(status=503, headers={"Retry-After": self.retry_after} if self.retry_after else {})
        if "/manifests/" in request.path:
            return self._manifest(request)
        if "/blobs/" in request.path:
            return await self._blob(request)
        return web.Response(status=200 if request.path == "/v2/" else 404)

    def _manifest(self, request: web.Request) -> web.Response:
        if self.redirect_manifests:
            return web.Response(status=307, headers={"Location": self.redirect_manifests})
        name, _, which = request.path.removeprefix("/v2/").partition("/manifests/")
        data = self.manifests.get(f"{name}:{which}")
        if data is None:
            return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}, status=404)
        told = OCI_INDEX if b'"manifests":' in data else OCI_MANIFEST
        headers = {"Docker-Content-Digest": self.manifest_digest or digest(data)}
        return web.Response(body=data, content_type=told, headers=headers)

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        wanted = request.path.rpartition("/")[2]
        data = self.blobs.get(wanted)
        if data is None:
            return web.Response(status=404)
        if wanted == digest(b"{}"):
            return web.Response(body=data)
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect})
        if self.blob_status != 200:
            return web.Response(status=self.blob_status)
        self.reached.set()
        if self.gate is not None:
            await self.gate.wait()
        return await self._stream(request, data)

    async def _stream(self, request: web.Request, data: bytes) -> web.StreamResponse:
        first, last, response = 0, len(data) - 1, web.StreamResponse()
        if self.ranges and (asked := request.headers.get("Range")):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
            if first > last:
                return web.Response(status=416)
            response.set_status(206)
            response.headers["Content-Range"] = self.content_range or f"bytes {first}-{last}/{len(data)}"
        body = data[first : last + 1]
        if self.other_bytes:
            body = bytes(255 - byte for byte in body)
        if self.truncated:
            body = body[: len(body) // 2]
        if self.endless:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(body)
        await response.prepare(request)
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            if self.cut_at is not None and self.sent + len(piece) > self.cut_at:
                self.cut_at = None
                request.transport.abort()  # type: ignore[union-attr]
                return response
            if self.pause_at is not None and self.sent + len(piece) > self.pause_at:
                self.paused.set()
                await self.go.wait()
            await response.write(piece)
            self.sent += len(piece)
        while self.endless:
            await response.write(bytes(PIECE_BYTES))
            self.sent += PIECE_BYTES
        await response.write_eof()
        return response


@asynccontextmanager
async def serving(fake: Fake, context: ssl.SSLContext | None = None) -> AsyncIterator[Fake]:
    """`fake` on a loopback port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    fake.port = runner.addresses[0][1]
    try:
        yield fake
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class Real:
    """A docker-registry that runs."""

    host: str
    ca: Path | None = None
    auth_file: Path | None = None


@contextmanager
def docker_registry(folder: Path, port: int, *, tls: bool = False, password: bool = False) -> Iterator[Real]:
    """The real thing, with its storage below `folder`; skipped where it is not installed."""
    program = tool("docker-registry")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "version: 0.1",
        "log: {level: error, accesslog: {disabled: true}}",
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}, delete: {{enabled: true}}}}",
        f"http:\n  addr: 127.0.0.1:{port}",
    ]
    ca = auth_file = None
    if tls:
        ca, certificate, key = certificates(folder)
        lines.append(f"  tls: {{certificate: {certificate}, key: {key}}}")
    if password:
        (folder / "htpasswd").write_text(HTPASSWD)
        lines.append(f"auth: {{htpasswd: {{realm: here, path: {folder / 'htpasswd'}}}}}")
        auth_file = folder / "auth.json"
        auth_file.write_text(json.dumps({"auths": {f"127.0.0.1:{port}": {"auth": "cGlldDpzM2NyZXQtcGFzcw=="}}}))
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    with open(folder / "log", "wb") as log:
        child = subprocess.Popen(
            [program, "serve", folder / "config.yml"], stdout=log, stderr=log, env={**os.environ, "OTEL_SDK_DISABLED": "1"}
        )
    try:
        _wait_up(child, port, ca, folder / "log")
        yield Real(f"127.0.0.1:{port}", ca, auth_file)
    finally:
        child.terminate()
        child.wait()


def _wait_up(child: subprocess.Popen[bytes], port: int, ca: Path | None, log: Path) -> None:
    end = time.monotonic() + UP_S_MAX
    while time.monotonic() < end:
        if child.poll() is not None:
            raise AssertionError(f"docker-registry ended: {log.read_text()[-2000:]}")
        try:
            if ca is not None:
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    "127.0.0.1", port, timeout=5, context=ssl.create_default_context(cafile=str(ca))
                )
            else:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v2/")
            if connection.getresponse().status in (200, 401):
                connection.close()
                return
        except OSError:
            time.sleep(0.02)  # not yet
    raise AssertionError("docker-registry did not come up")


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A private authority, and a certificate of it for 127.0.0.1: (authority, certificate, key)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def made(
        name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey, *, ca: bool
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        if not ca:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
        return builder.sign(signer, hashes.SHA256())

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "our authority")])
    authority = made("our authority", root, root_name, root, ca=True)
    certificate = made("127.0.0.1", leaf, root_name, root, ca=False)
    paths = (folder / "ca.crt", folder / "server.crt", folder / "server.key")
    pem = serialization.Encoding.PEM
    paths[0].write_bytes(authority.public_bytes(pem))
    paths[1].write_bytes(certificate.public_bytes(pem))
    key = leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths[2].write_bytes(key)
    return paths


def run(*words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """A program that has to succeed; what it prints."""
    done = subprocess.run(
        [str(word) for word in words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        timeout=300,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


Port = Callable[[], int]
