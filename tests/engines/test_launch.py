"""What is executed, and how readiness is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.model import WarmupConfig
from greenroom.engines.detect import describe
from tests.engines.builders import GPU0, a_model


def test_the_port_is_filled_in_everywhere() -> None:
    """Arguments, environment, stop command and proxy; `${PID}` stays for the one who stops."""
    launch = describe(
        a_model(
            "engine --listen 127.0.0.1:${PORT}",
            env=(("MY_PORT", "${PORT}"),),
            stop_argv=("end", "${PORT}", "${PID}"),
            proxy="http://localhost:${PORT}/base",
        )
    ).launch(5801, [])

    assert launch.argv == ("engine", "--listen", "127.0.0.1:5801")
    assert dict(launch.env) == {"MY_PORT": "5801"}
    assert launch.stop_argv == ("end", "5801", "${PID}")
    assert (launch.host, launch.port) == ("127.0.0.1", 5801)


@pytest.mark.parametrize(
    ("proxy", "address"),
    [("http://127.0.0.1:9000", ("127.0.0.1", 9000)), ("http://10.0.0.5", ("10.0.0.5", 80)), ("http://[::1]:77", ("::1", 77))],
)
def test_a_fixed_address_is_kept(proxy: str, address: tuple[str, int]) -> None:
    """The operator's engine may listen where it likes."""
    launch = describe(a_model("engine", proxy=proxy)).launch(5801, [])

    assert (launch.host, launch.port) == address


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("/x/llama-server -m m", "/x/llama-server -m m --port 5801"),
        ("/x/llama-server -m m --port ${PORT}", "/x/llama-server -m m --port 5801"),
        ("/x/llama-server -m m --port 9000", "/x/llama-server -m m --port 9000"),
        ("vllm serve m --port ${PORT}", "vllm serve m --port 5801 --host 127.0.0.1"),
        ("vllm serve m --port ${PORT} --host 0.0.0.0", "vllm serve m --port 5801 --host 0.0.0.0"),
        ("text-embeddings-router --model-id m", "text-embeddings-router --model-id m --port 5801 --hostname 127.0.0.1"),
        ("sh -c 'vllm serve m'", "sh -c 'vllm serve m'"),
        ("docker run vllm/vllm-openai --model m", "docker run vllm/vllm-openai --model m"),
        ("engine", "engine"),
    ],
)
def test_a_command_gets_what_it_lacks_to_be_reached_and_to_stay_private(command: str, argv: str) -> None:
    """A port when it names none; the loopback address where the engine would listen on every interface."""
    import shlex

    assert list(describe(a_model(command)).launch(5801, []).argv) == shlex.split(argv)


def test_a_container_client_is_known_to_be_detached() -> None:
    """`docker run` as the command: the engine is not our child."""
    assert describe(a_model("docker run --rm x")).launch(1, []).detached
    assert not describe(a_model("vllm serve m")).launch(1, []).detached


def test_secrets_are_named_so_that_they_can_be_masked() -> None:
    """Engine keys on the command line, and variables named like a key; short values would mask everything."""
    engine = describe(
        a_model("llama-server --api-key=first-key,second-key -m x", env=(("HF_TOKEN", "hf_abcdef"), ("A_KEY", "x"), ("HOME", "/home/me")))
    )

    assert set(engine.launch(1, []).secrets) == {"first-key,second-key", "first-key", "second-key", "hf_abcdef"}


@pytest.mark.parametrize(
    "command",
    [
        "llama-server -m x --hf-token hf_abcdef",
        "llama-server -m x -hft hf_abcdef",
        "vllm serve m --api_key hf_abcdef",
        "text-embeddings-router --hf-api-token=hf_abcdef",
        "docker run -e HF_TOKEN=hf_abcdef --env A=b image",
        "docker run --env=HF_TOKEN=hf_abcdef image",
        "env HF_TOKEN=hf_abcdef vllm serve m",
        ["sh", "-c", "export HF_TOKEN='hf_abcdef'; exec llama-server -m x"],
        ["sh", "-c", "cd /x && llama-server --api-key hf_abcdef"],
    ],
)
def test_secrets_are_found_wherever_the_command_holds_them(command: str | list[str]) -> None:
    """B44: every flag the configuration check warns of is masked as well, and variables set on the way."""
    assert "hf_abcdef" in describe(a_model(command)).launch(1, []).secrets


@pytest.mark.parametrize(
    ("command", "env", "masked"),
    [
        ("llama-server -m x --proxy http://user:hf_abcdef@proxy:3128", (), ("http://user:hf_abcdef@proxy:3128", "hf_abcdef")),
        ("x --at https://h/?api_key=hf_abcdef", (), ("https://h/?api_key=hf_abcdef", "hf_abcdef")),
        ("docker run -e HTTPS_PROXY=http://user:hf_abcdef@proxy image", (), ("http://user:hf_abcdef@proxy", "hf_abcdef")),
        ("x --port 1", (("PGURL", "postgres://user:hf_abcdef@db/x"),), ("postgres://user:hf_abcdef@db/x", "hf_abcdef")),
        (["x", "--header", "Authorization: Bearer hf_abcdef"], (), ("Authorization: Bearer hf_abcdef", "hf_abcdef")),
        (["sh", "-c", "A=1 exec x -H 'X-Api-Key: hf_abcdef'"], (), ("X-Api-Key: hf_abcdef", "hf_abcdef")),
        (["x", "--cfg", '{"url": "redis://:hf_abcdef@h"}'], (), ('{"url": "redis://:hf_abcdef@h"}', "hf_abcdef")),
        ("x --port 1", (("OTEL_HEADERS", "authorization=Basic hf_abcdef"),), ("authorization=Basic hf_abcdef", "hf_abcdef")),
    ],
)
def test_passwords_of_urls_and_headers_that_let_in_are_secrets(
    command: str | list[str], env: tuple[tuple[str, str], ...], masked: tuple[str, ...]
) -> None:
    """The whole value, and what of it somebody would say alone."""
    assert describe(replace(a_model(command), env=env)).launch(1, []).secrets == masked


@pytest.mark.parametrize(
    ("env", "masked"),
    [
        ({"HEADERS": "authorization=Bearer hf_abcdef,x-tenant=main,vllm"}, ["hf_abcdef"]),
        ({"NODES": "redis://:hf_abcdef@h1:6379,localhost,vllm"}, ["hf_abcdef"]),
        ({"ENDPOINTS": "http://u:p@h:1,http://localhost:8000,error"}, []),
        ({"CONFIG": '{"url": "redis://:hf_abcdef@h", "mode": "error"}'}, ["hf_abcdef"]),
        ({"DB_PASSWORD": "hf_abcdef,error"}, []),
        ({"API_KEYS": "key-1, key-2"}, ["key-1", "key-2"]),
        ({"VLLM_API_KEY": "key-1,key-2"}, ["key-1", "key-2"]),
        ({"EXTRA_ARGS": "--api-key hf_abcdef --port 1"}, ["hf_abcdef"]),
        ({"EXTRA_ARGS": "--api-key=hf_abcdef"}, ["hf_abcdef"]),
        ({"URL": "https://h/x?a=b&api_key=hf_abcdef&c=d"}, ["hf_abcdef", "hf_abcdef&c=d"]),
        ({"PORT_KEY": "${PORT}", "EOS_TOKEN": "</end>", "MAX_TOKENS": "4096"}, None),
    ],
)
def test_only_keys_stand_in_lists(env: dict[str, str], masked: list[str] | None) -> None:
    """What stands beside a secret is a word like any other, and masking it would blot every log line; what lets in is masked alone."""
    found = describe(replace(a_model("vllm serve m --port 1"), env=tuple(env.items()))).launch(1, []).secrets
    whole = [] if masked is None else list(env.values())
    assert [text for text in found if text not in whole] == (masked or [])
    assert set(whole) <= set(found)


def test_what_is_set_in_requests_is_masked() -> None:
    """By its name, or by what it says."""
    text = """models:
  m:
    cmd: x --port ${PORT}
    filters: {setParams: {api_key: hf_abcdef, stop_token: "</end>", n: 4}, setParamsByID: {n: {deep: {url: "http://u:hf_12345@h"}}}}
"""

    (model,) = load_config_text(text, env={}).models
    assert describe(model).launch(1, []).secrets == ("hf_abcdef", "http://u:hf_12345@h", "hf_12345")


def test_addresses_without_a_password_are_no_secrets() -> None:
    """Ports, names of users, brackets and signs behind a path are no passwords; a variable that a shell fills in is none either."""
    words = ["http://[::1]:80/a@b", "http://127.0.0.1:80?x=a@b", "ssh://git@h:22/x", "https://user@h/x", "secret:4b"]
    script = 'exec x -H "Authorization: Bearer $TOKEN" http://u:${PASS}@h --api-key "$KEY" --token $(cat /run/token)'
    script += ' & curl -H "Authorization: Bearer $(cat /run/tok)" -H "X-Api-Key: `cat /run/tok`" h'

    assert describe(a_model(["x", *words])).launch(1, []).secrets == ()
    assert describe(a_model(["sh", "-c", script])).launch(1, []).secrets == ()


def test_a_key_that_a_shell_fills_in_is_the_variables_value() -> None:
    """Probes show the key that the engine asks for, not the name of what holds it."""
    engine = describe(replace(a_model(["sh", "-c", 'exec llama-server -m x --api-key "$KEY"']), env=(("KEY", "sk-12345"),)))

    assert engine.readiness().headers == (("Authorization", "Bearer sk-12345"),)


def test_calls_hold_secrets_as_written_and_as_meant() -> None:
    """In the query of a sleep route, and however deep in the body of a warm-up."""
    text = """models:
  m:
    cmd: x --port ${PORT}
    sleep: {path: "/sleep?token=a%2Bbcdef"}
    wake: {path: /wake}
    warmup: {path: /v1/x, body: {deep: [{api_key: k-12345}]}}
"""

    (model,) = load_config_text(text, env={}).models
    assert describe(model).launch(1, []).secrets == ("a+bcdef", "a%2Bbcdef", "k-12345")


def test_numbers_of_tokens_are_no_secrets() -> None:
    """Masking them would blot every log line."""
    command = "vllm serve m --max-num-batched-tokens 8192 --max-tokens 4096 --ssl-keyfile /k/x.pem --chat-template token=1"

    assert describe(a_model(command)).launch(1, []).secrets == ()


def test_an_engine_key_from_a_file_is_masked(tmp_path: Path) -> None:
    """It travels with every request to the engine."""
    keys = tmp_path / "keys"
    keys.write_text("file-key-9\n")

    assert describe(a_model(f"llama-server -m x --api-key-file {keys}")).launch(1, []).secrets == ("file-key-9",)


def test_a_command_that_begins_with_a_variable_is_refused_without_its_value() -> None:
    """Only a shell would take it; the sentence goes into the status."""
    said = describe(a_model("HF_TOKEN=hf_abcdef llama-server -m x")).missing()

    assert "write HF_TOKEN under `env`" in said
    assert "hf_abcdef" not in said


@pytest.mark.parametrize(
    ("command", "env"),
    [
        ("llama-server -m x --api-key k1,k2", ()),
        ("llama-server -m x", (("LLAMA_API_KEY", "k1"),)),
        ("vllm serve m", (("VLLM_API_KEY", "k1"),)),
        ("vllm serve m --api-key k1", ()),
        ("text-embeddings-router --api-key k1", ()),
        ("engine --api-key k1", ()),
    ],
)
def test_the_probe_carries_the_engines_own_key(command: str, env: tuple[tuple[str, str], ...]) -> None:
    """Without it a locked engine would never look ready (B41)."""
    assert describe(a_model(command, env=env)).readiness().headers == (("Authorization", "Bearer k1"),)


def test_a_key_file_is_read_for_the_probe(tmp_path: Path) -> None:
    """The first line that is not a comment; no file, no key."""
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nk9\nk10\n")

    assert describe(a_model(f"llama-server -m x --api-key-file {keys}")).readiness().headers == (("Authorization", "Bearer k9"),)
    assert describe(a_model("llama-server -m x --api-key-file /nowhere")).readiness().headers == ()


def test_readiness_is_read_from_health_and_503_means_loading() -> None:
    """`/v1/models` is only asked where `/health` does not exist (B50)."""
    ready = describe(a_model("llama-server -m x")).readiness()

    assert (ready.path, ready.fallback_paths, ready.loading_statuses) == ("/health", ("/v1/models",), frozenset({503}))


def test_an_explicit_check_path_has_no_fallback_and_none_is_an_open_port() -> None:
    """What the operator wrote is what is asked."""
    explicit = describe(a_model("engine", check_path="/up", check_explicit=True)).readiness()
    port_only = describe(a_model("engine", check_path=None)).readiness()

    assert (explicit.path, explicit.fallback_paths) == ("/up", ())
    assert (port_only.path, port_only.fallback_paths) == (None, ())


def test_probes_go_below_the_engines_prefix() -> None:
    """From the proxy URL, or from llama-server's own flag."""
    assert describe(a_model("engine", proxy="http://127.0.0.1:${PORT}/a/b/")).readiness().base_path == "/a/b"
    assert describe(a_model("llama-server -m x --api-prefix /api/")).readiness().base_path == "/api"


def test_a_warm_up_request_is_part_of_readiness() -> None:
    """Sent once after a start."""
    ready = describe(a_model("engine", warmup=WarmupConfig("/v1/x", {"a": 1}))).readiness()

    assert (ready.warmup_path, json.loads(ready.warmup_body)) == ("/v1/x", {"a": 1})


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("llama-server -m x", "0.02.302.401 I srv  llama_server: listening on http://127.0.0.1:18655"),
        ("vllm serve m", "INFO:     Application startup complete."),
        ("python -m sglang.launch_server", "The server is fired up and ready to roll!"),
        ("text-embeddings-router", "2026-01-01T00:00:00Z  INFO text_embeddings_router: router/src/lib.rs:1: Ready"),
        ("engine", "Listening on port 5801"),
    ],
)
def test_a_telling_log_line_asks_for_a_probe_at_once(command: str, line: str) -> None:
    """And an ordinary one does not."""
    engine = describe(a_model(command))

    assert engine.is_ready_hint(line)
    assert not engine.is_ready_hint("loading weights 3/7")


@pytest.mark.parametrize(
    ("command", "parallel", "lone"),
    [
        ("llama-server -m x", 4, False),
        ("llama-server -m x -np 9", 9, False),
        ("llama-server -m x -np -1", 4, False),
        ("vllm serve m", 256, True),
        ("vllm serve m --max_num_seqs=32", 32, True),
        ("python -m sglang.launch_server --max-running-requests 12", 12, True),
        ("text-embeddings-router", 512, False),
        ("text-embeddings-router --max-concurrent-requests 64", 64, False),
        ("engine", 8, False),
    ],
)
def test_parallel_requests_and_lone_starts(command: str, parallel: int, lone: bool) -> None:
    """From the flags, else the engine's own default; engines that measure the device start alone."""
    engine = describe(a_model(command))

    assert (engine.parallel(), engine.lone_start()) == (parallel, lone)
    assert describe(a_model(command, parallel=3)).parallel() == 3


def test_sglang_is_not_made_to_generate_a_token_by_every_probe() -> None:
    """Unless the operator wants that."""
    command = "python -m sglang.launch_server --port ${PORT}"
    name = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"

    assert describe(a_model(command)).launch(1, [GPU0]).env[name] == "0"
    assert describe(a_model(command, env=((name, "1"),))).launch(1, [GPU0]).env[name] == "1"


def test_cost_priors_are_those_of_the_engine() -> None:
    """None sleeps unless it is told to."""
    for command, up_s in (
        ("vllm serve m", 60.0),
        ("python -m sglang.launch_server", 60.0),
        ("text-embeddings-router", 5.0),
        ("engine", 2.0),
    ):
        engine = describe(a_model(command))
        costs = engine.costs(engine.estimate([]))

        assert (costs.up_s, costs.tiers) == (up_s, ())
