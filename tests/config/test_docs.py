"""docs/config.md: its examples load, it names every key, and the schema for editors agrees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from greenroom.config.document import parse, plain
from greenroom.config.errors import ConfigError, Report
from greenroom.config.foreign import NO_EFFECT, REFUSED, SYNONYMS
from greenroom.config.load import load_config_text
from greenroom.config.macros import fill_env
from greenroom.config.schema import (
    AsleepSection,
    CallSection,
    ConfigFile,
    ContainerSection,
    DeviceSection,
    FiltersSection,
    GroupSection,
    KeySection,
    ModelPullSection,
    ModelSection,
    SleepSection,
    TracingSection,
    WarmupSection,
    json_schema,
)
from greenroom.core.facts import Policy

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ENV = {"GREENROOM_KEY": "a-key-of-mine", "MODELS_DIR": "/models"}
RERANKERS = (Path(__file__).parent / "two_rerankers.yaml").read_text()


def values(text: str) -> Any:
    return plain(parse(fill_env(text, ENV, Report("c")), Report("c")))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_documentation_loads_without_warnings(example: str) -> None:
    """Each is a whole file."""
    assert load_config_text(example, env=ENV).warnings == ()


@pytest.mark.parametrize("example", [*EXAMPLES, RERANKERS])
def test_the_json_schema_accepts_what_loads(example: str) -> None:
    """An editor marks nothing in a right file."""
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(values(example), schema)


@pytest.mark.parametrize(
    "text",
    [
        "models: {a: {cmd: 'x ${PORT}', nope: 1}}",
        "models: {a: {cmd: 'x ${PORT}', ttl: 5mins}}",
        "models: {a: {cmd: 'x ${PORT}', memory: 80}}",
        "models: {a: {cmd: 'x ${PORT}', memory: 75%}}",
        "models: {a: {cmd: 'x ${PORT}', pin: maybe}}",
        "models: {a: {cmd: 'x ${PORT}', priority: high}}",
        "models: {a: {cmd: 'x ${PORT}', sleep: 3}}",
        "models: {a: {cmd: 'x ${PORT}', sleep: {path: sleep}, wake: {path: /w}}}",
        "models: {a: {cmd: 'x ${PORT}', sleep: {path: /s, level: 3}, wake: {path: /w}}}",
        "models: {a: {cmd: 'x ${PORT}', sleep: {path: /s}, wake: [{pth: /w}]}}",
        "models: {a: {ttl: 5}}",
        "apiKeys: [{key: k, scopes: [all]}]\nmodels: {a: {cmd: 'x ${PORT}'}}",
        "apiKeys: [{name: k}]\nmodels: {a: {cmd: 'x ${PORT}'}}",
        "apiKeys: [{key: k, limits: 1}]\nmodels: {a: {cmd: 'x ${PORT}'}}",
        "nope: 1\nmodels: {}",
        "scheduling: {nope: 1}\nmodels: {}",
        "tracing: {nope: 1}\nmodels: {}",
        "pull: {max_size: 20G}\nmodels: {a: {cmd: 'x ${PORT}'}}",
        "pull: missing\nmodels: {a: {cmd: 'x ${PORT}'}}",
        "models: {a: {cmd: 'x ${PORT} ${MODEL_PATH}', model: 'hf://o/r', pull: always}}",
        "tracing: {sample: 2}\nmodels: {}",
        "logLevel: info",
    ],
)
def test_the_json_schema_refuses_what_does_not_load(text: str) -> None:
    """Unknown keys, wrong units, wrong choices, missing commands."""
    with pytest.raises(ConfigError):
        load_config_text(text, env={})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values(text), json_schema())


def test_macros_may_stand_for_numbers_in_the_json_schema() -> None:
    """An editor knows that ${x} may be a number."""
    jsonschema.validate(
        values("models: {a: {cmd: 'x ${PORT}', ttl: '${t}', parallel: '${p}', memory: '${m}', pin: '${b}'}}"), json_schema()
    )


def test_every_key_is_documented() -> None:
    """Nothing can be added to the schema without a word about it."""
    sections = (ConfigFile, ModelSection, DeviceSection, GroupSection, FiltersSection, WarmupSection, ContainerSection, KeySection)
    more = (SleepSection, CallSection, AsleepSection, ModelPullSection, TracingSection)
    keys = {key for section in (*sections, *more) for key in section.model_fields} | set(SYNONYMS)
    keys |= {foreign.place[-1] for foreign in (*REFUSED, *NO_EFFECT)}
    words = set(re.findall(r"[A-Za-z_]+", PAGE))
    assert keys - words == set()


def test_the_documented_defaults_of_scheduling_constants_are_the_real_ones() -> None:
    """All that concern sleep and idle models are listed."""
    tables = [part.split("\n\n")[0] for part in PAGE.split("| constant | default | meaning |")[1:]]
    rows = [row for table in tables for row in re.findall(r"^\| `(\w+)` \| `([\d.]+)` \|", table, re.MULTILINE)]
    documented = {name: float(default) for name, default in rows}
    assert {"sleep_faults_max", "early_sleep_s", "ram_floor_mib", "ttl_worth"} <= documented.keys()
    assert documented == {name: getattr(Policy(), name) for name in documented}


def test_the_documentation_shows_messages_as_they_are() -> None:
    """The two lines at the head of the page come out of such a file."""
    text = "\n" * 10 + "models:\n  qwen3:\n    cmd: x ${PORT}\n    ttl: 5mins\n\n\n    memroy: 1GiB\n"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, env={})
    assert str(caught.value) in PAGE
