"""Peers of the running server: made from the configuration, shown in status and metrics, kept out of logs and environments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config_text
from greenroom.config.model import Config
from greenroom.core.facts import Outcome
from greenroom.proxy.admission import Catalog, Grant, ModelRoute, Refusal, Wish
from greenroom.proxy.peer_door import PeerDoor, Peers
from greenroom.proxy.record import Record
from greenroom.serve.accounts import Accounts
from greenroom.serve.peers import METRICS, PeersShown, peers_of
from greenroom.serve.server import hide_keys
from tests.proxy.peer_world import a_certificate
from tests.proxy.relay_world import FakeAdmissions

ROOT = Path(__file__).parents[2]


def config(text: str) -> Config:
    return load_config_text(f"models: {{a: {{cmd: 'x ${{PORT}}', aliases: [b]}}}}\npeers:\n{text}", "c", env={})


class Waiter:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.request = 0
        self.grants: list[Grant] = []
        self.refusals: list[Refusal] = []

    def admitted(self, grant: Grant) -> None:
        self.grants.append(grant)

    def refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def cut(self, code: str, message: str) -> None:
        """Nobody does."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def a_door(text: str) -> tuple[PeerDoor, Catalog, Clock]:
    clock, numbers = Clock(), iter(range(1, 1000))
    door = PeerDoor(FakeAdmissions(), Peers(peers_of(config(text)), clock.now), lambda: next(numbers), clock)
    catalog = door.peers.catalog(Catalog(models={"a": ModelRoute("a", aliases=("b",))}, names={"a": "a", "b": "a"}))
    return door, catalog, clock


@pytest.mark.parametrize(
    ("url", "host", "port", "base", "told", "shown"),
    [
        ("http://h", "h", 80, "", b"h", "http://h"),
        ("https://h/x/", "h", 443, "/x", b"h", "https://h"),
        ("https://h:80", "h", 80, "", b"h:80", "https://h:80"),
        ("http://[fd00::1]:8080/b", "fd00::1", 8080, "/b", b"[fd00::1]:8080", "http://[fd00::1]:8080"),
    ],
)
def test_addresses(url: str, host: str, port: int, base: str, told: bytes, shown: str) -> None:
    """The Host header has no port where that is the usual one."""
    (peer,) = peers_of(config(f"  p: {{proxy: '{url}', models: [x]}}"))
    assert (peer.host, peer.port, peer.base, peer.host_header, peer.shown) == (host, port, base, told, shown)
    assert (peer.line.tls is not None) == url.startswith("https")


def test_certificates_are_checked_and_a_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    """With the line of the peer."""
    good, _ = a_certificate(tmp_path)
    (peer,) = peers_of(config(f"  p: {{proxy: 'https://h', models: [x], tls_ca: {good}}}"))
    assert peer.line.tls is not None
    assert peer.line.tls.check_hostname
    assert len(peer.line.tls.get_ca_certs()) == 1
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    with pytest.raises(ConfigError, match=r"c:3: peers.p.tls_ca: .*/empty.pem cannot be used as certificates"):
        peers_of(config(f"  p: {{proxy: 'https://h', models: [x], tls_ca: {empty}}}"))


def test_names_of_the_catalog() -> None:
    """Bare names of all peers once, full names beside them; this machine's own go first, aliases as well."""
    door, catalog, _ = a_door("  p: {proxy: http://h, models: [x, a, b, {y: z}]}\n  q: {proxy: http://i, models: [x, b], overflow: true}")
    assert {name: model for name, model in catalog.names.items() if "/" not in name} == {"a": "a", "b": "a", "x": "x", "y": "y"}
    assert {name for name in catalog.names if "/" in name} == {"p/x", "p/a", "p/b", "p/y", "q/x", "q/b"}
    assert [target.peer.id for target in door.peers.targets("x")] == ["p", "q"]
    assert [target.peer.id for target in door.peers.targets("a")] == ["q"]
    assert [target.there for target in door.peers.targets("y")] == ["z"]
    assert (catalog.models["a"].may_travel, catalog.models["a"].is_remote, catalog.models["x"].is_remote) == (True, False, True)


def test_a_local_model_called_as_a_full_name_goes_first() -> None:
    """org/model of this machine, where a peer is called org."""
    peers = Peers(peers_of(config("  org: {proxy: http://h, models: [model]}")))
    catalog = peers.catalog(Catalog(models={"org/model": ModelRoute("org/model")}, names={"org/model": "org/model"}))
    assert not catalog.models["org/model"].is_remote
    assert peers.targets("org/model") == ()
    assert catalog.models["model"].owner == "org"


def test_what_is_told_of_peers() -> None:
    """Each figure, as outcomes change it; never a key."""
    door, _, clock = a_door("  p: {proxy: 'https://h:1/base', models: [x], apiKey: sk-abcdefghij}\n  q: {proxy: http://i, models: [x]}")
    shown = PeersShown(door)
    clock.now = 107.5
    waiter = Waiter()
    door.ask(Wish("x", "x", "/v1/x"), waiter).lost("it takes no connection")
    (first, second), one = waiter.grants, shown.status()
    assert (first.far.peer, second.far.peer) == ("p", "q")  # type: ignore[union-attr]
    assert "sk-abcdefghij" not in repr(one) + shown.metrics(Accounts())
    assert one[0] == {
        "id": "p",
        "proxy": "https://h:1",
        "healthy": True,
        "circuit": "closed",
        "since_s": 7.5,
        "last_error": "it takes no connection",
        "last_error_s": 0.0,
        "models": ["x"],
        "models_unwell": [],
        "priority": 0,
        "weight": 1.0,
        "overflow": False,
        "prefer": False,
        "in_flight": 0,
        "requests": 1,
        "failures": 1,
        "outcomes": {"ok": 0, "client_gone": 0, "engine_broke": 0, "cut": 0, "failed": 1},
    }
    assert (one[1]["in_flight"], one[1]["requests"], one[1]["failures"]) == (1, 1, 0)


def test_a_model_that_a_peer_cannot_serve_is_told_apart() -> None:
    """The peer itself stays healthy."""
    door, _, clock = a_door("  p: {proxy: http://h, models: [x, y]}")
    for _ in range(3):
        waiter = Waiter()
        ticket = door.ask(Wish("x", "x", "/v1/x"), waiter)
        assert ticket.answered(503, b"") == ""  # type: ignore[attr-defined]
        ticket.finish(Outcome.OK, 503, 0, 0.1)
    (one,) = PeersShown(door).status()
    assert (one["healthy"], one["circuit"], one["models_unwell"], one["failures"]) == (True, "closed", ["x"], 3)
    waiter = Waiter()
    door.ask(Wish("x", "x", "/v1/x"), waiter)
    assert (waiter.refusals[0].code, waiter.refusals[0].retry_after_s) == ("peers_down", 5.0)
    door.ask(Wish("y", "y", "/v1/x"), waiter).finish(Outcome.OK, 200, 0, 0.1)
    assert len(waiter.grants) == 1
    clock.now += 5
    door.ask(Wish("x", "x", "/v1/x"), waiter).cancel()
    assert len(waiter.grants) == 2


def test_metrics_are_what_is_documented() -> None:
    """Every name with its labels; nothing without peers."""
    door, _, _ = a_door("  p: {proxy: http://h, models: [x]}")
    families = list(text_string_to_metric_families(PeersShown(door).metrics(Accounts())))
    found = {sample.name: tuple(sample.labels) for family in families for sample in family.samples}
    assert found == {name: metric.labels for name, metric in METRICS.items()}
    page = (ROOT / "docs/metrics.md").read_text()
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |" in page
    door.peers = Peers()
    assert PeersShown(door).metrics(Accounts()) == ""


def test_how_a_peer_answered_is_counted_by_class_of_status() -> None:
    """Of what ended ok; what engines here answered is not among them."""
    door, _, _ = a_door("  p: {proxy: http://h, models: [x]}\n  q: {proxy: http://i, models: [x]}")
    accounts = Accounts()
    for peer, status, outcome in (("p", 200, "ok"), ("p", 404, "ok"), ("p", 500, "ok"), ("p", 200, "engine_broke"), ("", 500, "ok")):
        accounts.on_request_end(
            Record("x", "inference", "POST", "/v1/x", "k", status, outcome, "hot", 1, 2, 0, 0.1, 0.2, None, None, 1, peer)
        )
    found = {
        (sample.labels["peer"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(PeersShown(door).metrics(accounts))
        for sample in family.samples
        if sample.name == "greenroom_peer_answers_total"
    }
    assert found == {**{("p", status): 1 for status in ("2xx", "4xx", "5xx")}, **{("q", status): 0 for status in ("2xx", "4xx", "5xx")}}


def test_tokens_that_went_through_a_peer_are_counted() -> None:
    """By the peer that answered, in both directions; what engines here answered is not among them."""
    door, _, _ = a_door("  p: {proxy: http://h, models: [x]}\n  q: {proxy: http://i, models: [x]}")
    accounts = Accounts()
    for peer, told in (("p", (7, 30)), ("p", (None, 12)), ("", (100, 100))):
        accounts.on_request_end(Record("x", "inference", "POST", "/v1/x", "k", 200, "ok", "hot", 1, 2, 0, 0.1, 0.2, *told, 1, peer))
    found = {
        (sample.labels["peer"], sample.labels["direction"]): sample.value
        for family in text_string_to_metric_families(PeersShown(door).metrics(accounts))
        for sample in family.samples
        if sample.name == "greenroom_peer_tokens_total"
    }
    assert found == {("p", "in"): 7, ("p", "out"): 42, ("q", "in"): 0, ("q", "out"): 0}


def test_engines_do_not_inherit_a_peers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that held it is gone from our environment once it was read."""
    monkeypatch.setenv("BIG_BOX_KEY", "sk-abcdefghij")
    text = "models: {}\npeers: {p: {proxy: http://127.0.0.1:1, models: [x], apiKey: '${env.BIG_BOX_KEY}'}}"
    hide_keys(load_config_text(text, "c"))
    assert "BIG_BOX_KEY" not in os.environ
