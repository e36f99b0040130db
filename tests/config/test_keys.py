"""`apiKeys`: texts as llama-swap has them, or mappings that say what a key is good for."""

from __future__ import annotations

import pytest

from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config_text
from greenroom.config.model import SCOPES, Config, KeyConfig
from greenroom.config.schema import KEY_NAME_CHARS_MAX, KEYS_MAX

MODELS = "models:\n  chat-7b: {cmd: 'x ${PORT}', aliases: [chat]}\n  'odd[1]': {cmd: 'x ${PORT}'}\n"
SECRET = "sk-0123456789abcdef"


def load(keys: str, **env: str) -> Config:
    return load_config_text(f"apiKeys:\n{keys}\n{MODELS}", "c", env=env)


def problems(keys: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(keys)
    found = [str(problem) for problem in caught.value.problems]
    assert SECRET not in "".join(found)
    assert SECRET[:8] not in "".join(found)
    return found


def test_texts_and_mappings_stand_side_by_side() -> None:
    """Defaults, the place as name, the environment, one word for a list, scopes in our order."""
    config = load(
        "- plain\n- 12345\n- {key: '${env.K}', name: Größe 1, scopes: [admin, view, admin], models: [chat, 'chat-*', 'odd[1]'], limit: 8}\n"
        "- {key: 678, scopes: inference, models: chat}\n- {key: all, name: , scopes: , models: , limit: }\n- plain",
        K="from-env",
    )
    assert config.keys == (
        KeyConfig("plain", "key-1"),
        KeyConfig("12345", "key-2"),
        KeyConfig("from-env", "Größe 1", ("view", "admin"), ("chat", "chat-*", "odd[1]"), 8),
        KeyConfig("678", "key-4", ("inference",), ("chat",)),
        KeyConfig("all", "key-5", SCOPES, None, None),
    )
    assert config.api_keys == ("plain", "12345", "from-env", "678", "all")
    assert config.warnings == ()
    assert "from-env" not in repr(config)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("- {key: sk-0123456789abcdef, scopes: [viw]}", 'apiKeys[0].scopes: "viw" is not one of the choices. Did you mean "view"?'),
        ("- {key: sk-0123456789abcdef, scopes: []}", "apiKeys[0].scopes: is an empty list."),
        ("- a\n- {key: b, scopes: {view: true}}", "apiKeys[1].scopes: is a mapping"),
        ("- {key: k, models: []}", "apiKeys[0].models: is an empty list."),
        ("- {key: k, models: [cht]}", 'apiKeys[0].models[0]: "cht" is not a model. Did you mean "chat"?'),
        ("- {key: k, limit: 0}", "apiKeys[0].limit: 0 is outside 1 to 100000."),
        ("- {key: k, limit: lots}", 'apiKeys[0].limit: "lots" is not a whole number.'),
        ("- {name: team}", "apiKeys[0].key: is missing."),
        ("- {key: ''}", "apiKeys[0].key: is empty."),
        ("- {key: [x]}", "apiKeys[0].key: is not text."),
        ("- {key: sk-0123456789abcdef x}", "apiKeys[0].key: holds a space"),
        ("- {key: sk-0123456789abcdef, nme: x}", 'apiKeys[0].nme: "nme" is not a key greenroom knows here. Did you mean "name"?'),
        ("- {sk-0123456789abcdef: team}", 'apiKeys[0].***: "***" is not a key greenroom knows here.'),
        ("- {sk-0123456789abcdef" + "0" * 80 + ": team}", "apiKeys[0].***"),
        ("- {key: a, scopes: view}\n- {key: a}", "apiKeys[1].key: key 2 is the same as key 1."),
        ("- a\n- {key: a, scopes: view}", "apiKeys[1].key: key 2 is the same as key 1."),
        ("- {key: a, name: x}\n- {key: b, name: x}", "apiKeys[1].name: key 2 has the same name as key 1."),
        ("- {key: a, name: key-2}\n- b", "apiKeys[1].name: key 2 has the same name as key 1."),
        ("- {key: sk-0123456789abcdef, name: of sk-0123456789abcdef}", "apiKeys[0].name: the name of key 1 holds a key"),
        ("- {key: a, name: sk-0123456789abcdef}\n- sk-0123456789abcdef", "apiKeys[0].name: the name of key 1 holds a key"),
        ("- [a]", "apiKeys: key 1 is not text."),
        ("- a\n- true", "apiKeys: key 2 is not text."),
        ("  {key: a}", "apiKeys: is not a list."),
    ],
)
def test_a_wrong_key_is_told_at_its_place_and_never_shown(keys: str, said: str) -> None:
    """One sentence a mistake."""
    assert [line for line in problems(keys) if said in line] != []


@pytest.mark.parametrize("name", ["a\\nb", "a\\0b", " a", "a\\u202eb", "\\u001b[31m", "", "x" * (KEY_NAME_CHARS_MAX + 1)])
def test_a_name_is_one_short_line_of_printable_text(name: str) -> None:
    """Names go into logs, headers and pages."""
    assert "apiKeys[0].name: " in problems(f'- {{key: k, name: "{name}"}}')[0]


def test_keys_behind_macros_are_hidden_too() -> None:
    """From wherever they come."""
    text = f"macros: {{k: {SECRET}}}\napiKeys: [{{key: '${{k}}', scopes: [view]}}]\nlogLevel: {SECRET}\n{MODELS}"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "c", env={})
    assert SECRET not in str(caught.value)


def test_a_pattern_without_a_model_is_a_warning() -> None:
    """Models may come later."""
    assert load("- {key: k, models: ['vision-*', 'chat*']}").warnings == (
        'c:2: apiKeys[0].models[0]: "vision-*" matches no model, so it allows nothing.',
    )


def test_a_broken_key_is_no_open_door_in_lenient_mode() -> None:
    """Keys with a mistake end the start; they are never left out."""
    with pytest.raises(ConfigError):
        load_config_text(f"apiKeys: [{{key: a, scopes: [x]}}]\n{MODELS}", "c", env={}, strict=False)


def test_there_may_be_only_so_many_keys() -> None:
    """Each is compared at every new connection."""
    assert load("\n".join(f"- key{number}" for number in range(KEYS_MAX))).warnings == ()
    assert "at most 1,000 are taken" in problems("\n".join(f"- key{number}" for number in range(KEYS_MAX + 1)))[0]
