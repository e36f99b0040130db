"""llama-swap files: they run unchanged, what cannot be done is refused by name, and `convert` keeps the meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.errors import ConfigError
from greenroom.config.llama_swap import convert, convert_text, convert_with_notes
from greenroom.config.load import load_config, load_config_text
from greenroom.config.lower import IGNORED_PATHS_DEFAULT
from greenroom.config.model import FiltersConfig, GroupConfig

HERE = Path(__file__).parent
OK = "cmd: 'x ${PORT}'"


def only_problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "c", env={})
    (problem,) = caught.value.problems
    return str(problem)


def test_the_two_rerankers_run_unchanged() -> None:
    """A file written for llama-swap, comments and trailing blanks included."""
    config = load_config(HERE / "two_rerankers.yaml", env={})
    tail = ("--reranking", "--port", "${PORT}", "--n-gpu-layers", "99", "--ctx-size", "8192")
    assert [(model.id, model.argv, model.ttl_s, model.start_s_max) for model in config.models] == [
        ("reranker-multilang", ("/usr/bin/llama-server", "--model", "/models/bge-reranker-v2-m3.Q8_0.gguf", *tail), 300.0, 60.0),
        ("reranker-code", ("/usr/bin/llama-server", "--model", "/models/codereranker.Q8_0.gguf", *tail), 300.0, 60.0),
    ]
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("matrix: {sets: {a: b}}", "c:1: matrix: llama-swap's matrix is not supported."),
        ("routing: {router: {use: matrix}}", "c:1: routing.router.use: only the group router exists here."),
        ("routing: {router: {settings: {matrix: {a: 1}}}}", "c:1: routing.router.settings.matrix: llama-swap's matrix is not supported."),
        (
            "routing: {scheduler: {use: fifo, settings: {fifo: {priority: {a: 2}}}}}",
            "c:1: routing.scheduler.settings: greenroom orders its queue",
        ),
        ("routing: {scheduler: {use: lifo}}", 'c:1: routing.scheduler.use: "lifo" is not one of the choices.'),
        ("routing: {router: {use: ring}}", 'c:1: routing.router.use: "ring" is not one of the choices.'),
        ("selectors: {s: {strategy: pin, targets: [a]}}", "c:1: selectors: llama-swap's selectors are not supported."),
        ("profiles: {p: {pins: {a: a}}}", "c:1: profiles: llama-swap's profiles are not supported."),
        ("captureBuffer: 5", "c:1: captureBuffer: greenroom records no requests or answers."),
        ("sendLoadingState: true", "c:1: sendLoadingState: greenroom does not write into answers;"),
        ("logTimeFormat: rfc3339", "c:1: logTimeFormat: the time format of the log cannot be chosen."),
        (
            "groups: {g: {members: [a]}}\nrouting: {router: {settings: {groups: {h: {members: [b]}}}}}",
            "c:2: routing.router.settings.groups: groups also stand at the top level. Keep them in one place.",
        ),
    ],
)
def test_what_greenroom_does_not_do_is_refused_by_name(text: str, line: str) -> None:
    """One sentence each, with its line; never ignored."""
    assert only_problem(f"{text}\nmodels: {{a: {{{OK}}}, b: {{{OK}}}}}").startswith(line)


def test_a_models_loading_state_is_refused_by_name() -> None:
    """The key exists in both places."""
    assert only_problem(f"models:\n  a: {{{OK}, sendLoadingState: true}}").startswith("c:2: models.a.sendLoadingState: greenroom does not")


def test_values_that_ask_for_nothing_are_fine() -> None:
    """Defaults that people write down."""
    config = load_config_text(
        f"""
matrix:
captureBuffer: 0
sendLoadingState: false
logTimeFormat: ""
selectors: {{}}
profiles: {{}}
peers:
routing: {{router: {{use: group}}, scheduler: {{use: fifo, settings: {{fifo: {{priority: {{}}}}}}}}}}
models: {{a: {{{OK}, sendLoadingState: false, ttl: , aliases: , filters: {{stripParams: }}}}}}
""",
        env={},
    )
    assert (config.warnings, [model.id for model in config.models]) == ((), ["a"])


def test_tuning_without_meaning_here_is_taken_with_a_warning() -> None:
    """Each key by name; the file still runs."""
    config = load_config_text(
        f"""logRequests: true
metricsMaxInMemory: 9
store: {{path: /x}}
ui: {{activity: {{session_id: []}}}}
performance: {{disabled: true}}
models:
  a: {{{OK}, capabilities: {{tools: true}}, timeouts: {{connect: 1}}, compat: {{ignoreWebsockets: true}}}}
""",
        "c",
        env={},
    )
    assert [warning.split(" has no effect")[0] for warning in config.warnings] == [
        "c:1: logRequests:",
        "c:2: metricsMaxInMemory:",
        "c:3: store:",
        "c:4: ui:",
        "c:5: performance:",
        "c:7: models.a.capabilities:",
        "c:7: models.a.compat:",
        "c:7: models.a.timeouts:",
    ]


def test_groups_are_read_from_their_newer_place() -> None:
    """The defaults are llama-swap's; aliases stand for their model."""
    config = load_config_text(
        f"""
routing: {{router: {{settings: {{groups: {{g: {{members: [a, bee], swap: no}}, h: {{members: [c], persistent: yes}}}}}}}}}}
models: {{a: {{{OK}}}, b: {{{OK}, aliases: [bee]}}, c: {{{OK}}}}}
""",
        env={},
    )
    assert config.groups == (GroupConfig("g", ("a", "b"), False, True, False), GroupConfig("h", ("c",), True, True, True))


def test_filters_are_normalised_and_never_touch_the_model() -> None:
    """Sorted, trimmed, without doubles; the older spelling too; a variant's name is an alias."""
    for key in ("stripParams", "strip_params"):
        config = load_config_text(
            f"models: {{a: {{{OK}, filters: {{{key}: ' top_p, model,temperature ,top_p', "
            "setParams: {model: x, n: 1}, setParamsByID: {a: {n: 2}, a-high: {model: y, n: 3}}}}}",
            env={},
        )
        (model,) = config.models
        assert model.filters == FiltersConfig(("temperature", "top_p"), {"n": 1}, {"a": {"n": 2}, "a-high": {"n": 3}})
        assert model.aliases == ("a-high",)
        assert len(config.warnings) == 3


def test_a_variants_name_cannot_be_another_models() -> None:
    """Names of setParamsByID are aliases, with their rules."""
    assert only_problem(f"models: {{a: {{{OK}, filters: {{setParamsByID: {{b: {{}}}}}}}}, b: {{{OK}}}}}") == (
        'c:1: models.a.filters.setParamsByID.b: "b" is the id of another model. Choose another name.'
    )


def test_times_inherit_as_in_llama_swap() -> None:
    """ttl -1 and unloadTimeout 0 mean the global value; ttl 0 means never; a global unloadTimeout of 0 is 10 s."""
    config = load_config_text(
        "globalTTL: 60\nunloadTimeout: 0\n"
        f"models: {{a: {{{OK}}}, b: {{{OK}, ttl: -1, unloadTimeout: 0}}, c: {{{OK}, ttl: 0, unloadTimeout: 4}}}}",
        env={},
    )
    assert [(model.ttl_s, model.stop_s_max) for model in config.models] == [(60.0, 10.0), (60.0, 10.0), (None, 4.0)]


def test_a_ttl_may_be_found_by_greenroom() -> None:
    """`auto`, for one model or for all."""
    config = load_config_text(f"globalTTL: auto\nmodels: {{a: {{{OK}}}, b: {{{OK}, ttl: 60}}, c: {{{OK}, ttl: 0}}}}", env={})
    assert [(model.ttl_s, model.ttl_auto) for model in config.models] == [(None, True), (60.0, False), (None, False)]
    assert load_config_text(f"models: {{a: {{{OK}, ttl: auto}}}}", env={}).models[0].ttl_auto


@pytest.mark.parametrize("keys", ["['']", "['a b']", '["a\\tb"]', "['ü']", "[[x]]", "[true]", "x"])
def test_api_keys_that_no_header_can_carry_are_refused(keys: str) -> None:
    """Empty ones, blanks, other alphabets, other kinds."""
    assert only_problem(f"apiKeys: {keys}\nmodels: {{a: {{{OK}}}}}").startswith("c:1: apiKeys: ")


@pytest.mark.parametrize("patterns", ["", "upstream: {}\n", "upstream: {ignorePaths: []}\n"])
def test_ignored_paths_have_a_default_when_absent_or_empty(patterns: str) -> None:
    """What pages fetch is worth no start."""
    config = load_config_text(f"{patterns}models: {{a: {{{OK}}}}}", env={})
    assert config.upstream_ignore_paths == IGNORED_PATHS_DEFAULT


def test_pid_is_kept_for_the_stop_command() -> None:
    """With the port, in text and in lists."""
    config = load_config_text(
        f"models: {{a: {{{OK}, cmdStop: 'docker stop x-${{PID}} ${{PORT}} # y'}}, b: {{{OK}, cmdStop: [k, '${{PID}}']}}}}", env={}
    )
    assert [model.stop_argv for model in config.models] == [("docker", "stop", "x-${PID}", "${PORT}"), ("k", "${PID}")]


LLAMA_SWAP = """# my file
healthCheckTimeout: 5   # short
logTimeFormat: rfc3339
peers:
  other:
    proxy: http://127.0.0.1:9
    apiKey: ${env.K}
    models: [a, b]

# models come here
models:
  a:
    cmd: |
      fe --port ${PORT}  # go
      # --off
    concurrencyLimit: 5
    healthCheckTimeout: 30
    capabilities:
      in: [text]
      # inner
    # about ttl
    ttl: 60
    filters: {strip_params: "temperature, top_p", x: 1}
  b: {cmd: "b --port ${PORT}", timeouts: {connect: 3}, sendLoadingState: true}
  c: {sendLoadingState: true, cmd: "b --port ${PORT}", keyy: [${env.A}, b], concurrencyLimit: 0}
apiKeys: [${env.A}]
routing:
  router:
    use: group
    settings:
      groups:
        g: {members: [a, b]}
  scheduler:
    settings: {fifo: {priority: {a: 1}}}
captureBuffer: 15"""

CONVERTED = """# my file
healthCheckTimeout: 15   # short
# logTimeFormat: rfc3339
peers:
  other:
    proxy: http://127.0.0.1:9
    apiKey: ${env.K}
    models: [a, b]

# models come here
models:
  a:
    cmd: |
      fe --port ${PORT}  # go
      # --off
    parallel: 5
    healthCheckTimeout: 30
    # capabilities:
    #   in: [text]
    #   # inner
    # about ttl
    ttl: 60
    filters: {stripParams: "temperature, top_p"}
  b: {cmd: "b --port ${PORT}"}
  c: {cmd: "b --port ${PORT}"}
apiKeys: [${env.A}]
routing:
  router:
    use: group
    settings:
      groups:
        g: {members: [a, b]}
  scheduler:
    # settings: {fifo: {priority: {a: 1}}}
# captureBuffer: 15"""


def converted_body(text: str) -> str:
    return convert_text(text)[0].split("\n\n", 1)[1]


def test_convert_keeps_the_text_and_takes_out_what_cannot_be_carried() -> None:
    """Comments and layout stay; foreign keys are commented out; three keys are rewritten."""
    body = converted_body(LLAMA_SWAP).replace('"b --port ${PORT}", }', '"b --port ${PORT}"}')
    assert body == CONVERTED


def test_convert_names_all_it_changed() -> None:
    """In the head of the file, and as notes."""
    text, notes = convert_text(LLAMA_SWAP)
    assert [note.split(": ")[0] for note in notes] == [
        "healthCheckTimeout",
        "logTimeFormat",
        "models.a.concurrencyLimit",
        "models.a.healthCheckTimeout",
        "models.a.capabilities",
        "models.a.filters.x",
        "models.b.timeouts",
        "models.b.sendLoadingState",
        "models.c.sendLoadingState",
        "models.c.keyy",
        "models.c.concurrencyLimit",
        "routing.scheduler.settings",
        "captureBuffer",
    ]
    assert all(f"# - {note}\n" in text for note in notes)


def test_a_converted_file_loads_without_warnings() -> None:
    """And means what the first one meant."""
    config = load_config_text(convert_text(LLAMA_SWAP)[0], env={"A": "key-a", "K": "key-k"})
    a = config.models[0]
    assert config.warnings == ()
    assert (a.argv, a.parallel, a.ttl_s, a.start_s_max) == (("fe", "--port", "${PORT}"), 5, 60.0, 30.0)
    assert (a.filters.strip_params, config.models[1].start_s_max) == (("temperature", "top_p"), 15.0)


def test_converting_what_needs_no_change_adds_a_head_only(tmp_path: Path) -> None:
    """The two rerankers stay as they are, and converting twice changes nothing more."""
    source = (HERE / "two_rerankers.yaml").read_text()
    text, notes = convert_with_notes(HERE / "two_rerankers.yaml")
    assert (text.split("\n\n", 1)[1], notes) == (source, ())
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert convert(path).split("\n\n", 1)[1] == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a", "c:1: is not a mapping of keys."),
        ("a: [", "c:1: is not valid YAML"),
        ("", "c:1: is not a mapping of keys."),
        ("a: ${env.X}\nb: c: d", "c:2: is not valid YAML"),
    ],
)
def test_a_file_that_is_no_yaml_is_not_converted(text: str, line: str) -> None:
    """It is told like by check."""
    with pytest.raises(ConfigError) as caught:
        convert_text(text, "c")
    assert str(caught.value).startswith(line)
