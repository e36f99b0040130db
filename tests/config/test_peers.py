"""`peers` of greenroom.yaml: llama-swap's spelling and our additions, what is refused, and that keys are never shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config_text
from greenroom.config.model import Config, FiltersConfig, PeerConfig
from greenroom.config.schema import PeerFiltersSection, PeerSection, PeerTimeoutsSection, json_schema
from tests.config.test_docs import values

LOCAL = 'models: {a: {cmd: "x ${PORT}", aliases: [b]}}\n'
PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text()


def load(peers: str, rest: str = LOCAL, **env: str) -> Config:
    return load_config_text(f"{rest}peers:\n{peers}", "c", env=env)


def one(text: str, rest: str = LOCAL, **env: str) -> PeerConfig:
    return load(f"  box: {{{text}}}", rest, **env).peers[0]


def problem(text: str, rest: str = LOCAL) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, rest)
    assert len(caught.value.problems) == 1, caught.value
    return str(caught.value.problems[0])


def test_a_peer_as_llama_swap_writes_it() -> None:
    """Every key of its documentation."""
    config = load(
        """
  open:
    proxy: https://gate.example/api
    apiKey: ${env.K}
    models:
      - org/model-a
      - m:free
    filters: {stripParams: "temperature, top_k", setParams: {provider: {data: deny}}}
    timeouts: {connect: 30, keepalive: 30, responseHeader: 0, tlsHandshake: 10, expectContinue: 1, idleConn: 90}
""",
        K="sk-123456789",
    )
    assert config.warnings == ()
    assert config.peers == (
        PeerConfig(
            "open",
            "https://gate.example/api",
            (("org/model-a", "org/model-a"), ("m:free", "m:free")),
            "sk-123456789",
            4,
            filters=FiltersConfig(("temperature", "top_k"), {"provider": {"data": "deny"}}),
            connect_s=30.0,
            response_s=None,
        ),
    )


def test_our_additions() -> None:
    """Each with a value that is not its default."""
    peer = one(
        "proxy: 'http://h:81/', models: [x, {y: org/y}], filters: {strip_params: t, set_params: {n: 1}}, stall_timeout: 2m, "
        "priority: 2, weight: 3, overflow: yes, probe: off, timeouts: {connect: 0}"
    )
    assert (peer.url, peer.models) == ("http://h:81", (("x", "x"), ("y", "org/y")))
    assert (peer.stall_s, peer.priority, peer.weight, peer.overflow, peer.probe) == (120.0, 2, 3.0, True, None)
    assert (peer.connect_s, peer.response_s, peer.key) == (5.0, 300.0, None)
    assert peer.filters == FiltersConfig(("t",), {"n": 1})


def test_names_of_there_may_be_a_mapping() -> None:
    """The short form where all differ."""
    assert one("proxy: http://h, models: {x: org/x, y: }").models == (("x", "org/x"), ("y", "y"))


def test_peers_alone_are_a_configuration() -> None:
    """Nothing of this machine is served."""
    config = load("  box: {proxy: http://h, models: [x]}", "")
    assert (config.models, [peer.id for peer in config.peers]) == ((), ["box"])


def test_a_key_and_the_default_may_name_what_peers_serve() -> None:
    """By its bare name and with its peer's."""
    config = load(
        "  box: {proxy: http://h, models: [x]}", f"apiKeys: [{{key: k-1234567, models: [x, box/x, a]}}]\ndefault_model: x\n{LOCAL}"
    )
    assert (config.default_model, config.keys[0].models, config.warnings) == ("x", ("x", "box/x", "a"), ())
    config = load("  box: {proxy: http://h, models: [b]}", f"default_model: b\n{LOCAL}")
    assert config.default_model == "a"  # the machine's own name goes first


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://h:0", "http://h:99999", "http://u:hidden@h", "http://h/?a=1", "http://h/#f", "http://h ü", "h"]
)
def test_addresses_of_other_servers_are_read_by_one_rule(url: str) -> None:
    """What is wrong is said in the same words; only what to write instead differs."""
    peer, collector = problem(f"  box: {{proxy: '{url}', models: [x]}}"), problem("", f"tracing: {{endpoint: '{url}'}}\n{LOCAL}")
    said, write = peer.removeprefix("c:3: peers.box.proxy: ").split(". Write ")
    assert collector == f"c:1: tracing.endpoint: {said.replace('a peer', 'a collector')}. Write http://127.0.0.1:4318."
    assert write == "https://host:8443 or http://host:8080/path, and its key as apiKey."
    assert "hidden" not in peer + collector


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("proxy: ftp://h, models: [x]", 'c:3: peers.box.proxy: "ftp://h" is not the address of a peer. Write https://host:8443'),
        ("proxy: 'http://h:0', models: [x]", "is not the address of a peer"),
        ("proxy: 'http://h:99999', models: [x]", "is not the address of a peer"),
        ("proxy: 'http://u:hidden@h', models: [x]", "c:3: peers.box.proxy: the address of a peer holds no user or password."),
        ("proxy: 'http://h/?a=1', models: [x]", "is more than the address of a peer"),
        ("proxy: 'http://h/a/../b', models: [x]", "is more than the address of a peer"),
        ("proxy: 'http://h a', models: [x]", "is not the address of a peer"),
        ("proxy: [http://a, http://b], models: [x]", "c:3: peers.box.proxy: is a list. Write one address;"),
        ("models: [x]", "c:3: peers.box.proxy: is missing. Add it."),
        ("proxy: http://h", "c:3: peers.box.models: is missing. Add it."),
        ("proxy: http://h, models: []", "c:3: peers.box.models: is empty. Name the models that are served there."),
        ("proxy: http://h, models: x", 'peers.box.models: is the text "x", not a list.'),
        ("proxy: http://h, models: [x, x]", 'peers.box.models: names "x" twice. Remove one.'),
        ("proxy: http://h, models: ['x ']", 'the name "x " starts or ends with a space'),
        ("proxy: http://h, models: [{x: [1]}]", "peers.box.models: holds a list where a name belongs."),
        ("proxy: http://h, models: [x], apiKey: 'two words'", "peers.box.apiKey: holds a space"),
        ("proxy: https://h, models: [x], tls_ca: /no/such.pem", '"/no/such.pem" cannot be read. Name a file of certificates (PEM).'),
        ("proxy: http://h, models: [x], tls_ca: /etc/hosts", "means nothing for an address of plain http."),
        ("proxy: http://h, models: [x], weight: 0", "peers.box.weight: 0 is not a number above 0."),
        ("proxy: http://h, models: [x], priority: 1.5", "peers.box.priority: 1.5 is not a whole number."),
        ("proxy: http://h, models: [x], overflow: maybe", 'peers.box.overflow: "maybe" is neither true nor false.'),
        ("proxy: http://h, models: [x], probe: health", 'peers.box.probe: "health" does not start with a slash.'),
        ("proxy: http://h, models: [x], prox: 1", 'peers.box.prox: "prox" is not a key greenroom knows here. Did you mean "proxy"?'),
        ("proxy: http://h, models: [x], timeouts: {connect: soon}", "peers.box.timeouts.connect: "),
        ("proxy: http://h, models: [x], filters: {strip_params: a, stripParams: b}", "says the same as"),
    ],
)
def test_what_is_wrong_is_named(text: str, sentence: str) -> None:
    """One sentence with its line; never more than one."""
    told = problem(f"  box: {{{text}}}")
    assert sentence in told
    assert "hidden" not in told


def test_odd_names_of_peers_are_refused() -> None:
    """They stand in headers, in metrics and before a slash."""
    for name in ("a/b", "ä", "a b", "x" * 65, "a\\nb"):
        assert "cannot name a peer" in problem(f'  "{name}": {{proxy: http://h, models: [x]}}')


def test_no_message_shows_a_peers_key() -> None:
    """Also where the key stands in the wrong place of the same entry."""
    told = problem('  box: {proxy: http://h, apiKey: sk-abcdefghij, models: [x], weight: "sk-abcdefghij"}')
    assert "sk-abcdefghij" not in told
    config = load("  box: {proxy: http://h, apiKey: sk-abcdefghij, models: [x]}")
    assert "sk-abcdefghij" not in repr(config)
    assert config.secrets == ("sk-abcdefghij",)


def test_warnings() -> None:
    """What works, but not as people may think."""
    config = load("  box: {proxy: 'http://far/v1', apiKey: k-1234567, models: [x], overflow: true}")
    assert [warning.split(". ")[0] for warning in config.warnings] == [
        "c:3: peers.box.overflow: has no effect: none of its models is one of this machine.",
        "c:3: peers.box.proxy: ends with /v1, which the paths of requests have as well",
        "c:3: peers.box.proxy: its key, prompts and answers cross the network unprotected",
    ]
    assert len(config.warnings) == 3
    assert load("  box: {proxy: http://h, models: [x], prefer: true}").warnings != ()
    assert "stands beside overflow" in problem("  box: {proxy: http://h, models: [a], prefer: true, overflow: true}")
    assert load("  box: {proxy: 'http://127.0.0.1:1', apiKey: k-1234567, models: [b], overflow: true}").warnings == ()


def test_the_documentation_names_every_key() -> None:
    """In its section about peers."""
    section = PAGE[PAGE.index("## Peers") :].split("\n## ")[0]
    for schema in (PeerSection, PeerTimeoutsSection, PeerFiltersSection):
        for key in schema.model_fields:
            if key not in ("keepalive", "tlsHandshake", "expectContinue", "idleConn"):
                assert f"`{key}`" in section, key


@pytest.mark.parametrize(
    "peer",
    [
        {"proxy": "https://h:1", "models": ["a", {"b": "c"}]},
        {"proxy": "http://h", "models": {"a": "b"}, "filters": {"set_params": {"x": 1}}, "probe": "off", "overflow": True},
    ],
)
def test_the_json_schema_accepts_peers(peer: dict[str, Any]) -> None:
    """An editor marks nothing in a right file."""
    jsonschema.validate({"peers": {"box": peer}}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"peers": {"box": {**peer, "nonsense": 1}}}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values("apiKeys: [x]"), json_schema())
