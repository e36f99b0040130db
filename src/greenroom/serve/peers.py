"""Peers of the running server: made from the configuration, shown in the status and the metrics."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from greenroom.config.errors import ConfigError, Problem
from greenroom.config.model import Config, PeerConfig
from greenroom.ledger.metrics import Metric, classes, escaped
from greenroom.proxy.admission import ModelRoute
from greenroom.proxy.peer_door import ENDED, Peer, PeerDoor, Peers
from greenroom.proxy.upstream import Line

from .accounts import Accounts

IDLE_S: Final = 30.0  # an idle connection to a peer is kept so long: opening one costs more than to an engine
PORTS: Final = {"http": 80, "https": 443}

METRICS: Final[Mapping[str, Metric]] = {
    "greenroom_peer_up": Metric("gauge", ("peer",), "1 while a peer answers; 0 after 3 failures in a row, until it answers again."),
    "greenroom_peer_in_flight": Metric("gauge", ("peer",), "Requests that a peer is answering."),
    "greenroom_peer_requests_total": Metric(
        "counter", ("peer", "outcome"), "Requests sent to a peer: ok, client_gone, engine_broke, cut, failed (another one was asked)."
    ),
    "greenroom_peer_failures_total": Metric(
        "counter", ("peer",), "Times a peer gave no answer, broke one off, or answered 502, 503 or 504."
    ),
    "greenroom_peer_answers_total": Metric(
        "counter", ("peer", "status"), "Requests to a peer that ended ok, by class of the status that they were answered with: 1xx to 5xx."
    ),
    "greenroom_peer_tokens_total": Metric("counter", ("peer", "direction"), "Tokens as peers counted them; in: prompt, out: answer."),
}


def peers_of(config: Config) -> tuple[Peer, ...]:
    """Raises ConfigError when certificates cannot be used."""
    return tuple(peer_of(config, peer) for peer in config.peers)


def peer_of(config: Config, peer: PeerConfig) -> Peer:
    parts = urlsplit(peer.url)
    host = parts.hostname or ""
    port = parts.port or PORTS[parts.scheme]
    tls = context_of(config, peer) if parts.scheme == "https" else None
    name = f"[{host}]" if ":" in host else host
    told = name if port == PORTS[parts.scheme] else f"{name}:{port}"
    key = peer.key.encode("ascii") if peer.key else b""
    return Peer(
        id=peer.id,
        host=host,
        port=port,
        base=parts.path,
        shown=f"{parts.scheme}://{told}",
        host_header=told.encode("ascii" if told.isascii() else "idna"),
        line=Line(tls, peer.connect_s, IDLE_S),
        models={here: route_of(peer, here, there) for here, there in peer.models},
        key_headers=((b"authorization", b"Bearer " + key), (b"x-api-key", key)) if key else (),
        response_s=peer.response_s,
        stall_s=peer.stall_s,
        priority=peer.priority,
        weight=peer.weight,
        overflow=peer.overflow,
        prefer=peer.prefer,
        probe=peer.probe,
        identity=hashlib.sha256(repr((peer.url, peer.key, peer.tls_ca)).encode()).hexdigest(),
    )


def route_of(peer: PeerConfig, here: str, there: str) -> ModelRoute:
    """`model` is always written anew: an alias of ours, or peer/model, means nothing there."""
    filters = peer.filters
    return ModelRoute(
        here,
        use_model_name=there,
        strip_params=filters.strip_params,
        set_params=filters.set_params,
        set_params_by_id=filters.set_params_by_id,
    )


def context_of(config: Config, peer: PeerConfig) -> ssl.SSLContext:
    """Certificates are always checked, and the name in them."""
    try:
        context = ssl.create_default_context(cafile=peer.tls_ca)
    except OSError as exc:  # an SSLError as well
        why = exc.strerror or exc.__class__.__name__
        text = f"{peer.tls_ca} cannot be used as certificates ({why}). Name a PEM file of certificate authorities."
        raise ConfigError([Problem(config.path, peer.line, 1, f"peers.{peer.id}.tls_ca", text)]) from None
    context.set_alpn_protocols(["http/1.1"])
    return context


@dataclass(frozen=True, slots=True)
class PeersShown:
    """What is told of them."""

    door: PeerDoor

    def status(self) -> list[dict[str, Any]]:
        """The part `peers` of GET /api/status."""
        now, peers = self.door.clock(), self.door.peers
        return [self._one(peer, peers, now) for peer in peers.all]

    def _one(self, peer: Peer, peers: Peers, now: float) -> dict[str, Any]:
        standing = peers.standings[peer.id]
        unwell = {name: one for name, one in standing.serving.items() if one.circuit(now) != "closed" or one.rests(now)}
        return {
            "id": peer.id,
            "proxy": peer.shown,
            "healthy": standing.is_up,
            "circuit": standing.health.circuit(now).value,
            "since_s": round(now - standing.since, 3),
            "last_error": standing.last_error,
            "last_error_s": None if standing.last_error_at is None else round(now - standing.last_error_at, 3),
            "models": list(peer.models),
            "models_unwell": sorted(unwell),
            "priority": peer.priority,
            "weight": peer.weight,
            "overflow": peer.overflow,
            "prefer": peer.prefer,
            "in_flight": standing.in_flight,
            "requests": standing.requests,
            "failures": standing.failures,
            "outcomes": {outcome: standing.outcomes[outcome] for outcome in ENDED},
        }

    def metrics(self, accounts: Accounts) -> str:
        """Prometheus text; "" without peers."""
        peers = self.door.peers
        if not peers.all:
            return ""
        lines: dict[str, list[str]] = {name: [] for name in METRICS}
        for peer in peers.all:
            standing, label = peers.standings[peer.id], f'peer="{escaped(peer.id)}"'
            lines["greenroom_peer_up"].append(f"{{{label}}} {int(standing.is_up)}")
            lines["greenroom_peer_in_flight"].append(f"{{{label}}} {standing.in_flight}")
            lines["greenroom_peer_failures_total"].append(f"{{{label}}} {standing.failures}")
            for direction, count in zip(("in", "out"), accounts.tokens_of_peer(peer.id), strict=True):
                lines["greenroom_peer_tokens_total"].append(f'{{{label},direction="{direction}"}} {count}')
            for status, count in classes(accounts.answers_of_peer(peer.id)):
                lines["greenroom_peer_answers_total"].append(f'{{{label},status="{status}"}} {count}')
            for outcome in ENDED:
                lines["greenroom_peer_requests_total"].append(f'{{{label},outcome="{outcome}"}} {standing.outcomes[outcome]}')
        return "".join(text_of(name, samples) for name, samples in lines.items())


def text_of(name: str, samples: Sequence[str]) -> str:
    metric = METRICS[name]
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n" + "".join(f"{name}{sample}\n" for sample in samples)
