"""What must hold of `peers`: names, addresses, and how they meet the models of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from .errors import Path, Report, quoted
from .schema import PeerSection

PEERS_MAX: Final = 100
_PEER_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # stands in headers, in metrics and before the `/` of peer/model
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def check_peers(peers: Mapping[str, PeerSection], names: Mapping[str, str], report: Report) -> dict[str, str]:
    """Every name that a peer serves -> itself; `names` are those of this machine's models."""
    if len(peers) > PEERS_MAX:
        report.add(("peers",), f"has {len(peers)} peers; at most {PEERS_MAX} are taken.")
    far: dict[str, str] = {}
    for peer_id, peer in peers.items():
        path: Path = ("peers", peer_id)
        if not _PEER_ID.fullmatch(peer_id):
            report.add(path, f"{quoted(peer_id)} cannot name a peer. Use up to 64 letters, digits, _ . and -.")
        _check_address(peer, path, report)
        for key, is_set in (("overflow", peer.overflow), ("prefer", peer.prefer)):
            if is_set and not any(name in names for name, _ in peer.models):
                report.warn((*path, key), "has no effect: none of its models is one of this machine.")
        if peer.overflow and peer.prefer:
            report.add((*path, "prefer"), "stands beside overflow. Keep one: prefer asks it before this machine, overflow after it.")
        for name, _ in peer.models:
            far[name] = name
            far[full_name(peer_id, name)] = full_name(peer_id, name)
    return far


def full_name(peer: str, model: str) -> str:
    """What a model of just this peer is called."""
    return f"{peer}/{model}"


def _check_address(peer: PeerSection, path: Path, report: Report) -> None:
    parts = urlsplit(peer.proxy)
    if peer.tls_ca is not None and parts.scheme == "http":
        report.add((*path, "tls_ca"), "means nothing for an address of plain http. Write https, or remove it.")
    elif peer.tls_ca is not None and not os.access(peer.tls_ca, os.R_OK):
        report.add((*path, "tls_ca"), f"{quoted(peer.tls_ca)} cannot be read. Name a file of certificates (PEM).")
    if parts.scheme == "http" and peer.apiKey and parts.hostname not in _LOOPBACK:
        report.warn((*path, "proxy"), "its key, prompts and answers cross the network unprotected. Use https, or a tunnel.")
    if re.search(r"/v\d+$", parts.path):
        said = f"ends with {parts.path[parts.path.rindex('/') :]}, which the paths of requests have as well"
        report.warn((*path, "proxy"), f"{said}. Remove it, unless the server really wants it twice.")
