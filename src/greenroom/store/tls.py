"""Which certificates are believed, host by host: the system's, those of an extra file, and those of certs.d folders."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .facts import StoreError


def folders() -> tuple[Path, ...]:
    """Where podman, buildah, skopeo and docker keep certificates: HOST[:PORT]/*.crt, *.cert with *.key."""
    config = os.environ.get("XDG_CONFIG_HOME")
    home = Path(config) if config else Path.home() / ".config"
    return (home / "containers" / "certs.d", Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d"))


@dataclass(slots=True)
class Tls:
    """`ca`: a PEM file believed besides the system's (which SSL_CERT_FILE replaces).  `unverified`: HOST:PORT whose certificate
    is not looked at, because the user said so."""

    ca: Path | None = None
    unverified: frozenset[str] = frozenset()
    certs_d: Sequence[Path] = field(default_factory=folders)
    _contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)

    def context(self, host: str, port: int) -> ssl.SSLContext:
        """Raises StoreError for a file that is no certificate."""
        place = f"{host}:{port}"
        if place not in self._contexts:
            self._contexts[place] = self._made(host, port)
        return self._contexts[place]

    def _made(self, host: str, port: int) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self.ca is not None:
            _believe(context, self.ca)
        names = [f"{host}:{port}", *([host] if port == 443 else [])]
        for folder in [root / name for root in self.certs_d for name in names]:
            for authority in sorted(folder.glob("*.crt")):
                _believe(context, authority)
            for certificate in sorted(folder.glob("*.cert")):
                _show(context, certificate)
        if f"{host}:{port}" in self.unverified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _believe(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=str(path))
    except (OSError, ssl.SSLError) as exc:  # SSLError is an OSError without a useful strerror
        why = "holds no PEM certificate" if isinstance(exc, ssl.SSLError) else f"cannot be read: {exc.strerror}"
        raise StoreError(f"the certificate authority {path} {why}") from None


def _show(context: ssl.SSLContext, certificate: Path) -> None:
    """A client certificate, with its key beside it."""
    try:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    except (OSError, ssl.SSLError):
        raise StoreError(f"the client certificate {certificate}, or the .key beside it, cannot be used") from None
