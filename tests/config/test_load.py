"""What a right file becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.errors import ConfigError
from greenroom.config.load import check, load_config, load_config_text
from greenroom.config.lower import IGNORED_PATHS_DEFAULT
from greenroom.config.model import (
    AsleepConfig,
    CallConfig,
    Config,
    ContainerConfig,
    DeviceConfig,
    FiltersConfig,
    ModelConfig,
    SizeSpec,
    SleepConfig,
    WarmupConfig,
)

MINIMAL = "models: {m: {cmd: 'fe --port ${PORT}'}}"


def one(yaml: str, **kwargs: object) -> ModelConfig:
    """The only model of a file."""
    (model,) = load_config_text(yaml, env={}, **kwargs).models  # type: ignore[arg-type]
    return model


def with_keys(lines: str) -> ModelConfig:
    """A model with these further lines."""
    return one("models:\n  m:\n    cmd: fe --port ${PORT}\n" + "".join(f"    {line}\n" for line in lines.splitlines()))


def test_a_minimal_file_has_the_documented_defaults() -> None:
    """Only what was written differs from the defaults of the plain values."""
    config = load_config_text("models:\n  m: {cmd: 'fe --port ${PORT}'}\n", env={})
    model = ModelConfig(id="m", argv=("fe", "--port", "${PORT}"), line=2)
    assert config == Config(path="greenroom.yaml", models=(model,), upstream_ignore_paths=IGNORED_PATHS_DEFAULT)


def test_a_command_block_keeps_quotes_and_leaves_comments_out() -> None:
    """Samplers, templates, paths and colours arrive whole, in `|` and in `>` blocks."""
    for style in ("|", ">", ">-", "|2"):
        model = one(
            f"""
models:
  m:
    cmd: {style}
      fe --port ${{PORT}}
      --samplers "top_k;dry;min_p"   # order matters
      # --ctx 8192
      --chat-template '{{"a": "b # not a comment"}}'
      --path "C:\\models\\x y.gguf"
      --color=#ff00aa
"""
        )
        assert model.argv == (
            "fe",
            "--port",
            "${PORT}",
            "--samplers",
            "top_k;dry;min_p",
            "--chat-template",
            '{"a": "b # not a comment"}',
            "--path",
            "C:\\models\\x y.gguf",
            "--color=#ff00aa",
        )


def test_a_command_list_is_taken_as_it_is() -> None:
    """No splitting, no comments, no shell; macros are filled in."""
    model = one('macros: {d: /m}\nmodels: {m: {cmd: [fe, "a b", "# c", $(id), "${d}/x", 7, "${PORT}"]}}')
    assert model.argv == ("fe", "a b", "# c", "$(id)", "/m/x", "7", "${PORT}")


def test_every_key_of_a_model_reaches_its_value() -> None:
    """All of a model's keys at once."""
    model = with_keys(
        """cmdStop: stop --pid ${PID} --port ${PORT}
proxy: http://localhost:${PORT}/base/
checkEndpoint: healthz
start_timeout: 5m
stop_timeout: 3
ttl: 2h
aliases: [a, 1.50]
env: [A=1, "B=x=y"]
cwd: /srv
name: N
description: D
unlisted: true
metadata: {n: 1, deep: {x: [1, null]}}
useModelName: other
filters: {stripParams: "b, a ,model,b", setParams: {seed: 1}, setParamsByID: {v: {t: 0.5}}}
memory: 6GB
host_memory: 1GiB
device: [gpu0, gpu1]
devices_count: 2
sleep: 1
sleep_after: 90
sleep_timeout: 30
wake_timeout: 2m
canary: always
pin: true
priority: batch
parallel: 3
queue_limit: 0
on_conflict: wait
stall_timeout: 2m
busy_timeout: 0
warmup: {path: v1/x, body: {a: 1}}
container: {image: i, runtime: docker, args: --a 'b c', volumes: ["/x:/y"]}
engine: llama-server
keepalive: false
progress_counts: true"""
    )
    assert model == ModelConfig(
        id="m",
        argv=("fe", "--port", "${PORT}"),
        line=2,
        aliases=("a", "1.50", "v"),
        name="N",
        description="D",
        unlisted=True,
        metadata={"n": 1, "deep": {"x": [1, None]}},
        engine="llama_server",
        stop_argv=("stop", "--pid", "${PID}", "--port", "${PORT}"),
        env=(("A", "1"), ("B", "x=y")),
        cwd="/srv",
        proxy="http://localhost:${PORT}/base",
        check_path="/healthz",
        check_explicit=True,
        start_s_max=300.0,
        stop_s_max=3.0,
        ttl_s=7200.0,
        sleep_after_s=90.0,
        sleep="1",
        sleep_s_max=30.0,
        wake_s_max=120.0,
        canary="always",
        memory_mib=5723,
        host_memory_mib=1024,
        devices=("gpu0", "gpu1"),
        devices_count=2,
        parallel=3,
        queue_limit=0,
        pin=True,
        on_conflict="wait",
        priority="batch",
        use_model_name="other",
        filters=FiltersConfig(("a", "b"), {"seed": 1}, {"v": {"t": 0.5}}),
        warmup=WarmupConfig("/v1/x", {"a": 1}),
        container=ContainerConfig("docker", "i", ("--a", "b c"), ("/x:/y",)),
        stall_s_max=120.0,
        busy_s_max=None,
        progress_counts=True,
        keepalive=False,
    )


def test_an_engine_with_sleep_routes_of_its_own_is_told_in_a_mapping() -> None:
    """One call, with the defaults of all the rest."""
    model = with_keys("sleep: {path: /sleep}\nwake: {path: /wake_up}")
    assert model.sleep == "1"
    assert model.sleep_calls == SleepConfig(sleep=(CallConfig("/sleep"),), wake=(CallConfig("/wake_up"),))


def test_every_key_of_a_sleep_mapping_reaches_its_value() -> None:
    """One call with all its keys, and a list of calls to wake."""
    model = with_keys(
        """sleep:
  path: /sleep?tag=weights
  method: put
  body: {deep: [1, {x: null}], e: 1.5}
  level: 2
  asleep: {path: /state, field: engine.sleeps, value: [1]}
  residue: 800MiB
  host_memory: 20GiB
wake:
  - path: /a
  - {path: /b, method: GET}
  - {path: /c, body: {}}"""
    )
    assert (model.sleep, model.canary, model.sleep_s_max, model.wake_s_max) == ("2", "auto", 120.0, 120.0)
    assert model.sleep_calls == SleepConfig(
        sleep=(CallConfig("/sleep?tag=weights", "PUT", {"deep": [1, {"x": None}], "e": 1.5}),),
        wake=(CallConfig("/a"), CallConfig("/b", "GET"), CallConfig("/c", "POST", {})),
        level=2,
        asleep=AsleepConfig("/state", "engine.sleeps", [1]),
        residue_mib=800,
        host_mib=20_480,
    )
    body = model.sleep_calls.sleep[0].body
    assert body is not None
    assert {type(body["deep"][0]), type(body["e"]), type(model.sleep_calls.asleep.value[0])} == {int, float}  # type: ignore[union-attr]


def test_several_calls_may_put_an_engine_to_sleep() -> None:
    """They keep their order; macros are filled in; empty values count as not written."""
    model = one(
        "macros: {r: /two, lv: 2}\nmodels:\n  m:\n    cmd: fe ${PORT}\n    wake: {path: /w, body: }\n    sleep:\n"
        '      calls: [{path: /one, method: , body: {id: "${MODEL_ID}"}}, {path: "${r}"}]\n      level: ${lv}\n      asleep:\n'
    )
    assert model.sleep_calls == SleepConfig(
        sleep=(CallConfig("/one", "POST", {"id": "m"}), CallConfig("/two")), wake=(CallConfig("/w"),), level=2, host_mib=0
    )


@pytest.mark.parametrize(
    ("written", "level", "host_mib"),
    [("level: 1", "1", None), ("level: '2'", "2", 0), ("host_memory: 0", "1", 0), ("residue: 0", "1", None)],
)
def test_weights_that_are_dropped_wait_nowhere(written: str, level: str, host_mib: int | None) -> None:
    """At level 2 host RAM holds nothing unless it is said; at level 1 it holds what the device held, which is known later."""
    model = with_keys(f"sleep: {{path: /s, {written}}}\nwake: {{path: /w}}")
    assert model.sleep_calls is not None
    assert (model.sleep, model.sleep_calls.host_mib) == (level, host_mib)


@pytest.mark.parametrize(("written", "meant"), [("off", "off"), ("'off'", "off"), ("1", "1"), ("'2'", "2"), ("auto", "auto"), ("", "auto")])
def test_a_word_or_a_number_says_how_deep_an_engine_sleeps(written: str, meant: str) -> None:
    """`off` is text in YAML 1.2."""
    model = with_keys(f"sleep: {written}\ncanary: off")
    assert (model.sleep, model.sleep_calls, model.canary) == (meant, None, "off")


def test_a_model_with_half_a_sleep_mapping_is_kept_misconfigured() -> None:
    """Lenient loading makes no recipe of it."""
    config = load_config_text(
        "models:\n  a: {cmd: 'x ${PORT}', sleep: {path: /s}}\n  b: {cmd: 'x ${PORT}', sleep: {path: s}, wake: {path: /w}}\n",
        env={},
        strict=False,
    )
    assert [(model.sleep_calls, model.misconfigured[:15]) for model in config.models] == [
        (None, "models.a.sleep:"),
        (None, "models.b.sleep."),
    ]


def test_constants_of_sleep_may_be_off_or_sizes() -> None:
    """`off` and an empty value switch off what can be; what cannot keeps its number."""
    policy = load_config_text(
        f"scheduling: {{early_sleep_s: off, drain_timeout_s: ~, ram_floor_mib: 1.5GiB, sleep_faults_max: 0}}\n{MINIMAL}", env={}
    ).policy
    assert policy == {"early_sleep_s": None, "drain_timeout_s": None, "ram_floor_mib": 1536, "sleep_faults_max": 0}
    policy = load_config_text(f"scheduling: {{early_sleep_s: 1m, ram_floor_mib: 512}}\n{MINIMAL}", env={}).policy
    assert policy == {"early_sleep_s": 60.0, "ram_floor_mib": 512}


def test_values_are_of_builtin_types_only() -> None:
    """Nothing of the YAML reader leaks out: consumers may encode what they get."""
    model = with_keys("metadata: {n: 1, f: 1.5, s: x, l: [1]}\naliases: [7]\nenv: {A: 1}\nuseModelName: x")
    values = [*model.metadata.values(), *model.metadata["l"], *model.aliases, *model.argv, model.use_model_name, *model.env[0]]
    assert {type(value) for value in values} == {int, float, str, list}


def test_every_key_at_the_top_reaches_its_value() -> None:
    """All of the file's own keys at once."""
    config = load_config_text(
        """
healthCheckTimeout: 30
globalTTL: 1h
unloadTimeout: 7
startPort: 9000
logLevel: warning
logToStdout: none
includeAliasesInList: true
apiKeys: [k-1, 12345, k-1]
allowed_hosts: [h]
cors_origins: [https://x]
default_model: al
upstream: {ignorePaths: ['x$']}
hooks: {on_startup: {preload: [b, al]}}
groups: {g: {members: [al], swap: false, exclusive: false, persistent: true}}
scheduling: {lanes: 2, patience_s: 1m, hold_cap: 0.5}
limits: {json_mib_max: 2MiB, idle_s_max: 1m, headers_max: 9}
devices:
  gpu0: {memory: 80GiB, headroom: 2GiB}
  ram:
  x: {memory: 1500MiB, probe: none}
  y: {uuid: MIG-1}
models:
  a: {cmd: 'a --port ${PORT}', aliases: [al]}
  b: {cmd: 'b --port ${PORT}', ttl: 0, unloadTimeout: 1, healthCheckTimeout: 2}
  c: {cmd: 'c --port ${PORT}', ttl: -1}
""",
        env={},
    )
    a, b, c = config.models
    assert (a.start_s_max, a.stop_s_max, a.ttl_s) == (30.0, 7.0, 3600.0)
    assert (b.start_s_max, b.stop_s_max, b.ttl_s) == (2.0, 1.0, None)
    assert c.ttl_s == 3600.0
    assert (config.start_port, config.log_level, config.log_to_stdout, config.include_aliases_in_list) == (9000, "warn", "none", True)
    assert (config.api_keys, config.allowed_hosts, config.cors_origins) == (("k-1", "12345"), ("h",), ("https://x",))
    assert (config.default_model, config.preload, config.upstream_ignore_paths) == ("a", ("b", "a"), ("x$",))
    (group,) = config.groups
    assert (group.id, group.members, group.swap, group.exclusive, group.persistent) == ("g", ("a",), False, False, True)
    assert config.policy == {"lanes": 2, "patience_s": 60.0, "hold_cap": 0.5}
    assert config.limits == {"json_mib_max": 2, "idle_s_max": 60.0, "headers_max": 9}
    assert config.devices == (
        DeviceConfig("gpu0", SizeSpec(81_920, 2048)),
        DeviceConfig("ram"),
        DeviceConfig("x", SizeSpec(1500, None, "none")),
        DeviceConfig("y", SizeSpec(), "MIG-1"),
    )


@pytest.mark.parametrize("model_id", ["org/model:8b", "Größe XL", "a b.c", "模型", "x" * 256, "8080", "true", "~"])
def test_any_printable_text_can_be_a_model_id(model_id: str) -> None:
    """Slashes, colons, spaces, other alphabets, and what YAML takes for a number."""
    key = model_id if model_id in ("8080", "true", "~") else f'"{model_id}"'
    assert one(f"models: {{{key}: {{cmd: 'x ${{PORT}}', name: '${{MODEL_ID}}'}}}}").name == model_id


def test_yaml_anchors_and_merges_work_and_each_model_gets_its_own_macros() -> None:
    """A shared block, with `${MODEL_ID}` and a macro that differ by model."""
    config = load_config_text(
        """
models:
  a: &base
    macros: {n: 1}
    cmd: fe --model ${MODEL_ID} --n ${n} --port ${PORT}
    ttl: 5
  b:
    <<: *base
    ttl: 6
  c: {<<: *base, macros: {n: 2}}
""",
        env={},
    )
    assert [(m.argv[2], m.argv[4], m.ttl_s, m.line) for m in config.models] == [("a", "1", 5.0, 3), ("b", "1", 6.0, 7), ("c", "2", 5.0, 10)]


def test_yaml_1_2_is_read() -> None:
    """`no` and dates are text, an octal needs 0o."""
    model = with_keys("metadata: {a: no, b: 2024-01-02, c: 0o17, d: 1e3, e: 010}\nname: off\nsleep: off")
    assert model.metadata == {"a": "no", "b": "2024-01-02", "c": 15, "d": 1000.0, "e": 10}
    assert (model.name, model.sleep) == ("off", "off")


def test_a_file_is_read_from_disk_with_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    """Both are common, and neither changes anything."""
    path = tmp_path / "greenroom.yaml"
    path.write_bytes("\ufeffmodels:\r\n  m:\r\n    cmd: |\r\n      fe --a # x\r\n      --port ${PORT}\r\n".encode())
    (model,) = load_config(path, env={}).models
    assert (model.argv, model.line) == (("fe", "--a", "--port", "${PORT}"), 2)


def test_lenient_loading_keeps_good_models_and_marks_bad_ones() -> None:
    """Each bad model says why; the good one is untouched; the problems are warnings."""
    config = load_config_text(
        """
models:
  good: {cmd: 'fe --port ${PORT}', aliases: [g]}
  empty: {}
  nothing:
  typo: {modle: /x.gguf}
  number: 5
  thief: {cmd: 'fe --port ${PORT}', aliases: [g, mine]}
  late: {cmd: 'fe --port ${PORT}', ttl: 5mins}
groups: {all: {members: [good, empty, late]}}
""",
        env={},
        strict=False,
    )
    marks = {model.id: model.misconfigured for model in config.models}
    no_cmd = "has no cmd. Add the engine's command, such as cmd: llama-server --model /models/x.gguf --port ${PORT}"
    assert marks == {
        "good": "",
        "empty": f"models.empty: {no_cmd}",
        "nothing": f"models.nothing: {no_cmd}",
        "typo": 'models.typo.modle: "modle" is not a key greenroom knows here. Did you mean "model"?',
        "number": "models.number: is 5, not a mapping. Write `cmd: ...` under it.",
        "thief": 'models.thief.aliases[0]: "g" is already a name of model "good". Choose another name.',
        "late": 'models.late.ttl: "5mins" is not a duration. Write 300, "300s" or "5m".',
    }
    assert {model.id: model.aliases for model in config.models}["thief"] == ("mine",)
    assert len(config.warnings) == 7


@pytest.mark.parametrize("text", ["- a", "a: [", "models: {a: {cmd: x}}\nbogus: 1", "models: {'': {cmd: 'x ${PORT}'}}", "models: 3"])
def test_lenient_loading_still_refuses_what_is_wrong_outside_models(text: str) -> None:
    """There is no half of a file."""
    with pytest.raises(ConfigError):
        load_config_text(text, env={}, strict=False)


@pytest.mark.parametrize("word", ["--proxy=http://u:hunter2hunter2@p", "'Authorization: Bearer hunter2hunter2'"])
def test_a_password_in_a_url_and_a_header_are_warned_of_in_arguments(tmp_path: Path, word: str) -> None:
    """As a key is; what a shell takes from a variable is not told."""
    path = tmp_path / "c.yaml"
    path.write_text(f"models:\n  m:\n    cmd: >\n      fe --port ${{PORT}} -x {word}\n")
    (said,) = check(path)
    assert said.startswith(f"{path}:3: models.m.cmd: a password in a URL, or an Authorization header, puts a secret on the command line")
    path.write_text("models:\n  m:\n    cmd: [sh, -c, 'fe --port ${PORT} -H \"Authorization: Bearer $T\" http://u:$P@h']\n")
    assert check(path) == []


def test_warnings_name_keys_without_effect_and_secrets_in_arguments(tmp_path: Path) -> None:
    """Each once, by line; the secret itself is not shown."""
    path = tmp_path / "c.yaml"
    path.write_text(
        """logRequests: true
models:
  m:
    cmd: fe --port ${PORT} --api-key hunter2hunter2 --hf-token=abcdefgh
    timeouts: {connect: 3}
    concurrencyLimit: 2
    filters: {setParams: {model: x}}
"""
    )
    secret = "puts a secret on the command line, where every user of this machine can read it. Put it in env instead."
    assert check(path) == [
        f"{path}:1: logRequests: has no effect: requests are never logged whole.",
        f"{path}:4: models.m.cmd: --api-key {secret}",
        f"{path}:4: models.m.cmd: --hf-token {secret}",
        f"{path}:5: models.m.timeouts: has no effect: use start_timeout, stall_timeout and busy_timeout.",
        f"{path}:6: models.m.concurrencyLimit: is read as parallel: 2; further requests wait (up to queue_limit) "
        "where llama-swap refuses them.",
        f"{path}:7: models.m.filters.setParams.model: `model` cannot be set here; it is left alone. Use useModelName.",
    ]


OFF = "has no effect with sleep: off."
PINNED = "has no effect with pin: true, because a pinned model never sleeps."
LATE = "so the engine is stopped before it sleeps. Make it shorter, or"
KNOWN = "greenroom knows how sglang sleeps, and these calls are made instead."
ROUTES = "sleep: {path: /s}\nwake: {path: /w}"


@pytest.mark.parametrize(
    ("lines", "warnings"),
    [
        ("sleep: off\nsleep_after: 5", [f"5: models.m.sleep_after: {OFF}"]),
        ("sleep: off\nsleep_timeout: 5\nwake_timeout: 5", [f"5: models.m.sleep_timeout: {OFF}", f"6: models.m.wake_timeout: {OFF}"]),
        ("sleep: off\ncanary: always", [f"5: models.m.canary: {OFF}"]),
        ("sleep: off\nsleep_after: 0\ncanary: off", []),
        ("sleep: 2\npin: true", [f"4: models.m.sleep: {PINNED}"]),
        (f"{ROUTES}\npin: true", [f"4: models.m.sleep: {PINNED}"]),
        ("sleep_after: 5m\nttl: 5m\npin: true", [f"4: models.m.sleep_after: {PINNED}"]),
        ("sleep: auto\npin: true", []),
        ("sleep_after: 5m\nttl: 300", [f"4: models.m.sleep_after: is not shorter than ttl (300 s), {LATE} ttl longer."]),
        ("sleep_after: 2h", [f"4: models.m.sleep_after: is not shorter than globalTTL (3600 s), {LATE} globalTTL longer."]),
        ("sleep_after: 2h\nttl: 0", []),
        ("sleep_after: 5m\nttl: -1", []),
        (
            f"{ROUTES}\nengine: sglang",
            [f"4: models.m.sleep: {KNOWN} Write sleep: auto, 1 or 2 and no wake, unless that is what you want."],
        ),
        (f"{ROUTES}\nengine: generic", []),
        ("sleep: 1\nengine: vllm", []),
    ],
)
def test_warnings_name_what_is_written_about_sleep_and_never_happens(lines: str, warnings: list[str]) -> None:
    """Switched off, pinned, stopped earlier, or known already."""
    text = "models:\n  m:\n    cmd: fe ${PORT}\n" + "".join(f"    {line}\n" for line in lines.splitlines()) + "globalTTL: 1h\n"
    assert load_config_text(text, "c", env={}).warnings == tuple(f"c:{warning}" for warning in warnings)


def test_names_of_limits_are_checked_when_they_are_known() -> None:
    """The data plane says which there are."""
    text = "limits: {json_mib_mx: 1}\nmodels: {a: {cmd: 'x ${PORT}'}}"
    assert load_config_text(text, env={}).limits == {"json_mib_mx": 1}
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, env={}, limit_names=["json_mib_max"])
    assert str(caught.value) == (
        'greenroom.yaml:1: limits.json_mib_mx: "json_mib_mx" is no limit of the data plane. Did you mean "json_mib_max"?'
    )
