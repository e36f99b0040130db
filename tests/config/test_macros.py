"""Macros: text from the environment, typed values, order, escapes, and what is refused."""

from __future__ import annotations

import pytest

from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config_text
from greenroom.config.model import ModelConfig


def one(yaml: str, env: dict[str, str] | None = None) -> ModelConfig:
    (model,) = load_config_text(yaml, env=env or {}).models
    return model


def problems(yaml: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config_text(yaml, "c", env=env or {})
    return [str(problem) for problem in caught.value.problems]


def test_macros_may_be_declared_in_any_order_and_nested() -> None:
    """A macro may use one that is declared after it."""
    model = one("macros: {all: '${bin} ${args}', args: '--n ${n}', n: 4, bin: fe}\nmodels: {m: {cmd: '${all} --port ${PORT}'}}")
    assert model.argv == ("fe", "--n", "4", "--port", "${PORT}")


def test_a_models_macro_wins_inside_global_macros_too_and_stays_its_own() -> None:
    """The other model keeps the global value."""
    config = load_config_text(
        "macros: {n: 1, args: '--n ${n}'}\nmodels:\n  a: {macros: {n: 2}, cmd: 'fe ${args} ${PORT}'}\n  b: {cmd: 'fe ${args} ${PORT}'}",
        env={},
    )
    assert [model.argv[2] for model in config.models] == ["2", "1"]


def test_a_whole_value_keeps_the_macros_type_and_a_part_becomes_text() -> None:
    """Integers, floats and truth values, in lists and mappings."""
    model = one(
        """
macros: {i: 8, f: 1.50, b: true, s: x}
models:
  m:
    cmd: fe ${PORT}
    unlisted: ${b}
    ttl: ${i}
    metadata: {i: "${i}", f: "${f}", b: "${b}", part: "${i}${b}${f}", list: ["${i}", {k: "${s}"}], "${i}": key}
"""
    )
    assert model.metadata == {"i": 8, "f": 1.5, "b": True, "part": "8true1.50", "list": [8, {"k": "x"}], "${i}": "key"}
    assert (model.unlisted, model.ttl_s) == (True, 8.0)


def test_macros_work_in_every_setting() -> None:
    """Also in those that are read before any model."""
    config = load_config_text(
        "macros: {p: 6000, m: a, t: 9}\nstartPort: ${p}\nhealthCheckTimeout: ${t}\nhooks: {on_startup: {preload: ['${m}']}}\n"
        "models: {a: {cmd: 'x ${PORT}', description: 'I am ${MODEL_ID}', aliases: ['${MODEL_ID}-x']}}",
        env={},
    )
    assert (config.start_port, config.preload, config.models[0].start_s_max) == (6000, ("a",), 9.0)
    assert (config.models[0].description, config.models[0].aliases) == ("I am a", ("a-x",))


def test_a_macro_in_a_comment_of_a_command_is_never_looked_at() -> None:
    """Neither unknown macros nor unset variables in comments matter, in no kind of block."""
    for style in ("|", ">"):
        model = one(
            "macros: {evil: '# x\\n--added'}\nmodels:\n  m:\n"
            f"    cmd: {style}\n      fe ${{PORT}}\n      # ${{nope}} ${{env.NOPE}} ${{evil}}\n"
            "      --b   # ${nope} ${env.NOPE}\n"
        )
        assert model.argv == ("fe", "${PORT}", "--b")


def test_a_multi_line_macro_brings_its_lines() -> None:
    """A comment in a folded macro ends with its line."""
    model = one("macros:\n  base: >\n    fe --port ${PORT}\n    # --off\n    --on\nmodels: {m: {cmd: '${base} --last'}}")
    assert model.argv == ("fe", "--port", "${PORT}", "--on", "--last")


def test_an_escaped_macro_is_text() -> None:
    """`$${x}` is `${x}`, and what no macro can be named stays."""
    model = one("models: {m: {cmd: 'fe ${PORT} $${HOME} $${env.X} ${HOME:-x} $HOME $${x}$$', description: 'a $${PORT}'}}")
    assert model.argv == ("fe", "${PORT}", "${HOME}", "${env.X}", "${HOME:-x}", "$HOME", "${x}$$")
    assert model.description == "a ${PORT}"


def test_environment_values_are_escaped_for_their_quotes() -> None:
    """Double quotes, single quotes, plain, flow lists, numbers; no value is taken for a macro."""
    env = {"Q": 'a"b\\c', "S": "it's", "N": "77", "D": "x${y}", "W": "C:\\m"}
    model = one(
        'models: {m: {cmd: ["${env.Q}", \'${env.S}\', ${env.N}, "${PORT}"],'
        ' ttl: ${env.N}, description: ${env.W}, metadata: {d: "${env.D}"}}}',
        env,
    )
    assert model.argv == ('a"b\\c', "it's", "77", "${PORT}")
    assert (model.ttl_s, model.description, model.metadata) == (77.0, "C:\\m", {"d": "x${y}"})


def test_environment_macros_work_everywhere_and_not_in_comments() -> None:
    """Keys, macros, commands; a comment may name what is not set."""
    config = load_config_text(
        "# ${env.NOPE}\napiKeys: [${env.K}]   # ${env.NOPE}\nmacros: {d: '${env.D}'}\n"
        "models: {m: {cmd: '${env.D}/fe ${d} ${PORT} # ${env.NOPE}'}}",
        env={"K": "key-1", "D": "/d"},
    )
    assert (config.api_keys, config.models[0].argv) == (("key-1",), ("/d/fe", "/d", "${PORT}"))


def test_set_params_keys_are_expanded_and_must_stay_different() -> None:
    """Two keys that come out the same are a problem; other keys are never expanded."""
    good = one("models: {m: {cmd: 'x ${PORT}', filters: {setParamsByID: {'${MODEL_ID}-long': {a: 1}}}}}")
    assert good.filters.set_params_by_id == {"m-long": {"a": 1}}
    assert good.aliases == ("m-long",)
    assert problems("models: {m: {cmd: 'x ${PORT}', filters: {setParamsByID: {'${MODEL_ID}-x': {}, m-x: {}}}}}") == [
        "c:1: models.m.filters.setParamsByID.m-x: stands for the same name as another key here. Keep one."
    ]


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("macros: {a: '${b}', b: '${c}', c: '${a}'}", "c:1: macros.a: the macros need each other: a → b → c → a. Break the circle."),
        ("macros: {a: 'x${a}'}", "c:1: macros.a: the macros need each other: a → a. Break the circle."),
        ("macros: {PORT: 1}", "c:1: macros.PORT: PORT is greenroom's own macro. Choose another name."),
        ("macros: {'a b': 1}", 'c:1: macros."a b": "a b" is not a macro name. Use letters, digits, _ and - only.'),
        ("macros: {" + "n" * 64 + ": 1}", "c:1: macros." + "n" * 64 + ": a macro name has at most 63 characters; this one has 64."),
        ("macros: {a: [1]}", "c:1: macros.a: a macro holds one text, number, true or false. Write a single value."),
        ("macros: [a]", "c:1: macros: is not a mapping. Write one `name: value` a line."),
        (
            "macros: {base: 1}\nlogLevel: ${bse}",
            'c:2: logLevel: ${bse} is not a macro. Did you mean "base"? Declare it under macros, or write $${bse} for the text itself.',
        ),
        ("logLevel: ${MODEL_ID}", "c:1: logLevel: ${MODEL_ID} means something only inside a model."),
        (
            "allowed_hosts: ['${env.NOPE}']",
            "c:1: allowed_hosts[0]: ${env.NOPE} is used, but the environment has no NOPE. Set it, or remove the macro.",
        ),
        ("allowed_hosts: [${env.NOPE}]", "c:1: ${env.NOPE} is used, but the environment has no NOPE. Set it, or remove the macro."),
        (
            "allowed_hosts: ['${env.NL}']",
            "c:1: the environment variable NL holds a line end or NUL, which ${env.NL} cannot carry.",
        ),
    ],
)
def test_a_wrong_macro_is_told_where_it_is(yaml: str, expected: str) -> None:
    """One line each, with the chain of a circle."""
    assert problems(f"{yaml}\nmodels: {{m: {{cmd: 'x ${{PORT}}'}}}}", {"NL": "a\nb"})[0] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "cmd: x ${PORT} ${HOME}",
            "cmd: ${HOME} is not a macro. Declare it under macros, or write $${HOME} for the text itself.",
        ),
        ("cmd: x ${PORT} ${PID}", "cmd: ${PID} is known only when the engine is stopped. It can stand in cmdStop alone."),
        ("cmd: x ${PORT} $${PORT}", "cmd: $${PORT} cannot be kept as text here, because ${PORT} is filled in later. Reword it."),
        (
            "aliases: ['a${PORT}']",
            "aliases[0]: ${PORT} is known only when the engine starts. It can stand in cmd, cmdStop, proxy, env and container.",
        ),
        (
            "metadata: {a: {b: ['${nope}']}}",
            "metadata.a.b[0]: ${nope} is not a macro. Declare it under macros, or write $${nope} for the text itself.",
        ),
    ],
)
def test_a_macro_that_cannot_stand_in_a_model_is_refused(line: str, expected: str) -> None:
    """The place is named down to the item."""
    lines = ["cmd: x ${PORT}", line] if not line.startswith("cmd") else [line]
    yaml = "models:\n  m:\n" + "".join(f"    {each}\n" for each in lines)
    assert [each.split(": ", 1)[1] for each in problems(yaml)] == [f"models.m.{expected}"]


def test_macros_cannot_grow_without_bound() -> None:
    """Thirty doublings are refused quickly."""
    macros = ", ".join(f"m{i}: '${{m{i + 1}}}${{m{i + 1}}}'" for i in range(30))
    found = problems(f"macros: {{{macros}, m30: xxxxxxxx}}\nmodels: {{m: {{cmd: 'x ${{PORT}} ${{m0}}'}}}}")
    assert found == ["c:2: models.m.cmd: grows beyond 1,048,576 characters when its macros are filled in. Make them smaller."]


def test_a_model_from_the_store_has_its_place_as_macro() -> None:
    """It stays in the command until the place is known; a macro of that name elsewhere still means itself."""
    model = one("models: {m: {model: 'oci://reg.example/a:1', cmd: 'fe -m ${MODEL_PATH} --mmproj ${MODEL_DIR}/p.gguf --port ${PORT}'}}")
    assert (model.reference, model.pull, model.argv[2:5]) == (
        "oci://reg.example/a:1",
        "missing",
        ("${MODEL_PATH}", "--mmproj", "${MODEL_DIR}/p.gguf"),
    )
    assert "Add model: oci" in problems("models: {m: {cmd: 'fe -m ${MODEL_PATH} --port ${PORT}'}}")[0]
    assert "has no ${MODEL_PATH}" in problems("models: {m: {model: 'oci://reg.example/a', cmd: 'fe --port ${PORT}'}}")[0]
    assert one("macros: {MODEL_PATH: /m.gguf}\nmodels: {m: {cmd: 'fe -m ${MODEL_PATH} --port ${PORT}'}}").argv[2] == "/m.gguf"
