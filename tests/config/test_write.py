"""A configuration that was read can be written again: it loads to the same values, and shows no secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.model import (
    Config,
    ContainerConfig,
    DeviceConfig,
    GroupConfig,
    KeyConfig,
    ModelConfig,
    PeerConfig,
    PullConfig,
    SleepConfig,
)
from greenroom.config.write import text_of

EVERYTHING = r"""
startPort: 6900
logLevel: debug
logToStdout: both
includeAliasesInList: true
default_model: a
allowed_hosts: [box.lan]
cors_origins: ["https://chat.example"]
apiKeys:
  - key-in-plain-text
  - {key: "second#key'\"$nothing", name: ci, scopes: [inference], models: ["a*"], limit: 3}
macros: {common: --ctx-size 512}
devices:
  gpu0: {memory: 24GiB, headroom: 1GiB, uuid: GPU-1}
  ram: {memory: 8GiB, probe: none}
groups:
  pair: {members: [a, "off"], swap: false, exclusive: false, persistent: true}
hooks: {on_startup: {preload: [a]}}
upstream: {ignorePaths: ['\.bin$']}
scheduling: {quantum_factor: 3}
limits: {idle_s: 30}
pull: {plain_http: true, offline: true, max_size: 9GiB}
ledger: {keep: 90d, max_size: 4GiB}
tracing: {endpoint: "http://127.0.0.1:4318", sample: 0.5}
models:
  a:
    cmd: llama-server -m /x/a.gguf --port ${PORT} ${common} --api-key engine-secret
    cmdStop: kill ${PID}
    proxy: http://127.0.0.1:${PORT}/base
    checkEndpoint: /health
    healthCheckTimeout: 333.5
    unloadTimeout: 7
    ttl: auto
    aliases: [b, "c d"]
    env: ["HF_TOKEN=hf_secret_value", "N=line\nline", "D=$${PORTAL} $$ $HOME", "P=${PORT}"]
    cwd: /srv
    name: A name
    description: "yes"
    unlisted: true
    metadata: {x: [1, 2.5, true, null, "no", "0x1f"], "${odd}": {y: z}}
    useModelName: upstream-a
    filters: {stripParams: "b, a", setParams: {t: 1, s: "$${env.X}"}, setParamsByID: {fast: {t: 0}}}
    memory: 9000MiB
    host_memory: 1GiB
    device: [gpu0, ram]
    sleep: {path: /s, body: {token: sleep-secret-value}, level: 2, asleep: {path: /z, field: a.b, value: null}, residue: 10MiB}
    wake: [{path: /w, method: PUT}, {path: /v, body: {k: "v"}}]
    sleep_timeout: 11
    wake_timeout: 12
    canary: always
    sleep_after: 60
    pin: true
    priority: batch
    parallel: 3
    queue_limit: 5
    on_conflict: wait
    stall_timeout: 30
    busy_timeout: 40
    warmup: {path: /v1/x, body: {a: "${MODEL_ID}"}}
    engine: llama_server
    keepalive: false
    progress_counts: true
  "off":
    cmd: [vllm, serve, /m, --port, "${PORT}"]
    sleep: "off"
    checkEndpoint: none
    devices_count: 2
    ttl: 90
    container:
      {runtime: docker, image: "v:1", args: [--ipc=host, -e, "X=${PORT}"], volumes: ["/m:/m"], pull: never, gpus: flag, shm_size: 1GiB,
       pull_timeout: 60}
  stored:
    model: oci://registry.example/team/m:1
    pull: never
    cmd: llama-server -m ${MODEL_PATH} --port ${PORT}
  fetched:
    model: oci://registry.example/team/n:1
    pull: {when: never, tls_verify: false, allow_host: "blobs.lan:9000", platform: linux/arm64, max_size: 1.5GiB}
    cmd: llama-server -m ${MODEL_PATH} --port ${PORT}
peers:
  west:
    proxy: https://west.example:8443/base
    models: [far, {near: other/name}]
    apiKey: peer-secret
    filters: {setParams: {x: 1}}
    timeouts: {connect: 2, responseHeader: 0}
    stall_timeout: 0
    priority: 2
    weight: 0.5
    overflow: true
    probe: "off"
  east: {proxy: "http://127.0.0.1:9", models: [afar], prefer: true}
"""
SECRETS = {
    "key-in-plain-text": "GREENROOM_API_KEY_1",
    "second#key'\"$nothing": "GREENROOM_API_KEY_CI",
    "engine-secret": "A_SECRET",
    "hf_secret_value": "HF_TOKEN",
    "peer-secret": "PEER_KEY",
    "sleep-secret-value": "A_SECRET_2",
}


def comparable(config: Config) -> Config:
    models, peers = (tuple(replace(one, line=0) for one in some) for some in (config.models, config.peers))
    return replace(config, path="", warnings=(), models=models, peers=peers)


def test_every_key_survives() -> None:
    """What is written loads to what was loaded."""
    first = load_config_text(EVERYTHING, env={})
    assert comparable(load_config_text(text_of(first), env={})) == comparable(first)


def test_secrets_stay_in_the_environment() -> None:
    """No secret is in the text, and with the variables set it loads to the same values."""
    first = load_config_text(EVERYTHING, env={})
    text = text_of(first, SECRETS)
    assert [secret for secret in SECRETS if secret in text] == []
    env = {name: value for value, name in SECRETS.items()}
    assert comparable(load_config_text(text, env=env)) == comparable(first)


def test_the_text_is_the_same_each_time() -> None:
    """Written, read and written again it is the same text."""
    once = text_of(load_config_text(EVERYTHING, env={}))
    assert text_of(load_config_text(once, env={})) == once


def test_a_short_secret_is_not_found_inside_other_words() -> None:
    """A key of two letters is replaced where it stands alone."""
    first = load_config_text("models: {m: {cmd: 'llama-server -m /abc/ab.gguf --port ${PORT} --api-key ab'}}", env={})
    text = text_of(first, {"ab": "KEY"})
    assert "/abc/ab.gguf" in text
    assert comparable(load_config_text(text, env={"KEY": "ab"})) == comparable(first)


@pytest.mark.parametrize("value", ["$$${PORTAL}", "a$${env.HOME}b", "${no macro}", "$", "$$", "$${MODEL_ID}", "${", "\\${x"])
def test_dollars_are_kept_as_text(value: str) -> None:
    """Text that looks like a macro stays text, however many dollars stand before it."""
    text = f"models: {{m: {{cmd: 'x --port ${{PORT}}', description: {value!r}}}}}".replace("\\\\", "\\")
    first = load_config_text(text, env={"HOME": "/"})
    assert comparable(load_config_text(text_of(first), env={"HOME": "/"})) == comparable(first)


@pytest.mark.parametrize(
    "kind", [Config, ModelConfig, PullConfig, ContainerConfig, PeerConfig, SleepConfig, KeyConfig, DeviceConfig, GroupConfig]
)
def test_the_example_says_everything(kind: type) -> None:
    """Whatever a configuration can hold differs from its default somewhere in it, so that nothing is forgotten in writing."""
    config = load_config_text(EVERYTHING, env={})
    models, peers = config.models, config.peers
    containers = [model.container for model in models if model.container is not None]
    sleeps = [model.sleep_calls for model in models if model.sleep_calls is not None]
    found: dict[type, Sequence[object]] = {
        Config: [config],
        ModelConfig: models,
        PullConfig: [model.pull_options for model in models],
        ContainerConfig: containers,
        PeerConfig: peers,
        SleepConfig: sleeps,
        KeyConfig: config.keys,
        DeviceConfig: config.devices,
        GroupConfig: config.groups,
    }
    # tls_ca and verify_key must be files that are there; times of a sleep are measured, never configured.
    unsaid = {"misconfigured", "model_folder", "warnings", "tls_ca", "verify_key", "sleep_s", "wake_s"}
    said = {each.name for each in fields(kind) if any(getattr(one, each.name) != each.default for one in found[kind])}
    assert {each.name for each in fields(kind)} - said - unsaid == set()
