"""The configuration file's shape: every key, its type and what it accepts.  The only home of pydantic.

Fields carry the spelling of the file as alias; validators raise ValueError with the sentence people read.
Nothing here looks across keys: that is `checks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema, model_validator

from greenroom.core.facts import Policy

from . import commands, secrets, units
from .document import plain
from .errors import did_you_mean, kind, looks_secret, quoted
from .foreign import FILTER_SYNONYMS, PEER_FILTER_SYNONYMS, SYNONYMS
from .model import SCOPES

LEDGER_S_MIN, LEDGER_BYTES_MIN = 3600.0, 16 << 20
NAME_CHARS_MAX = 256
KEYS_MAX = 1000
KEY_CHARS_MAX = 2048
KEY_NAME_CHARS_MAX = 64
PATTERN_CHARS_MAX = 1000
_MACRO = {"type": "string", "pattern": r"\$\{[^}]+\}"}


def _any_of(*shapes: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*shapes, _MACRO]})


# ------------------------------------------------------------------------------------------------------------ scalars


def _text(value: object) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(getattr(value, "text", value))
    raise ValueError(f"is {kind(value)}. Write text.")


_FLAG_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _FLAG_WORDS:  # YAML 1.1 files write yes and no
        return _FLAG_WORDS[value.lower()]
    raise ValueError(f"{quoted(value)} is neither true nor false. Write true or false.")


def _whole_number(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{quoted(value)} is not a whole number.")
    return int(value)


def _whole(low: int, high: int, say: str = "") -> BeforeValidator:
    def validate(value: object) -> int:
        number = _whole_number(value)
        if not low <= number <= high:
            raise ValueError(f"{quoted(value)} is outside {low} to {high}.{say}")
        return number

    return BeforeValidator(validate)


def _choice(*choices: str, also: Mapping[str, str] | None = None) -> BeforeValidator:
    return BeforeValidator(_chosen(*choices, also=also))


def _chosen(*choices: str, also: Mapping[str, str] | None = None) -> Callable[[object], str]:
    meanings = {**{choice: choice for choice in choices}, **(also or {})}

    def validate(value: object) -> str:
        written = str(getattr(value, "text", value)) if isinstance(value, (str, int)) and not isinstance(value, bool) else kind(value)
        if written in meanings:
            return meanings[written]
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ValueError(f"{quoted(value)} is not one of the choices.{_near(written, choices)} Write {listed}.")

    return validate


def _near(written: str, choices: tuple[str, ...]) -> str:
    hint = did_you_mean(written, choices)
    return hint if hint.startswith(" Did") else ""


def _positive_s(value: object) -> float:
    seconds = units.duration_s(value)
    if seconds <= 0:
        raise ValueError(f"{quoted(value)} is no time at all. Write at least 1, such as 120 or 2m.")
    return seconds


def _age_s(value: object) -> float:
    seconds = units.duration_s(value)
    if seconds < LEDGER_S_MIN:
        raise ValueError(f"{quoted(value)} is too short: advice looks back an hour. Write at least 1h, such as 30d.")
    return seconds


def _ledger_bytes(value: object) -> int:
    size = units.limit_bytes(value)
    if size < LEDGER_BYTES_MIN:
        raise ValueError(f"{quoted(value)} is too little for a ledger. Write at least 16MiB, such as 1GiB.")
    return size


def _later(value: object) -> None:
    if value == "auto":
        raise ValueError('"auto" is not supported yet. Write a duration such as 5m, or 0 for never.')


def _ttl_s(value: object) -> float | Literal["auto"] | None:
    """-1 (what the file says globally) is None here."""
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value == -1:
        return None
    return units.duration_s(value)


def _global_ttl_s(value: object) -> float | Literal["auto"]:
    return "auto" if value == "auto" else units.duration_s(value)


def _idle_s(value: object) -> float:
    _later(value)
    return units.duration_s(value)


def _need_mib(value: object) -> int:
    mib = units.size_mib_up(value)
    if mib <= 0:
        raise ValueError(f"{quoted(value)} is no memory at all. Leave it out to have it measured, or write a size such as 6GiB.")
    return mib


def _room_mib(value: object) -> int:
    mib = units.size_mib_down(value)
    if mib <= 0:
        raise ValueError(f"{quoted(value)} is less than 1 MiB. Write a size such as 80GiB.")
    return mib


_DURATION = _any_of({"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^\s*(\d+(\.\d+)?\s*(ms|s|m|h|d)?\s*)+$"})
_SIZE = _any_of({"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KkMmGgTt]i?[Bb]|[Bb])\s*$"})
_TTL = _any_of({"type": "number", "minimum": -1}, {"type": "string", "pattern": r"^\s*((\d+(\.\d+)?\s*(ms|s|m|h|d)?\s*)+|auto)$"})
_WORD = WithJsonSchema({"type": ["string", "number", "boolean"]})

Words: TypeAlias = Annotated[str, BeforeValidator(_text), _WORD]
Flag: TypeAlias = Annotated[bool, BeforeValidator(_flag), _any_of({"type": "boolean"})]
Duration: TypeAlias = Annotated[float, BeforeValidator(units.duration_s), _DURATION]
Positive: TypeAlias = Annotated[float, BeforeValidator(_positive_s), _DURATION]
Idle: TypeAlias = Annotated[float, BeforeValidator(_idle_s), _DURATION]
Ttl: TypeAlias = Annotated[float | Literal["auto"] | None, BeforeValidator(_ttl_s), _TTL]
GlobalTtl: TypeAlias = Annotated[float | Literal["auto"], BeforeValidator(_global_ttl_s), _TTL]
Need: TypeAlias = Annotated[int, BeforeValidator(_need_mib), _SIZE]
Room: TypeAlias = Annotated[int, BeforeValidator(_room_mib), _SIZE]
SizeMax: TypeAlias = Annotated[int, BeforeValidator(units.limit_bytes), _SIZE]
Age: TypeAlias = Annotated[float, BeforeValidator(_age_s), _DURATION]
LedgerSize: TypeAlias = Annotated[int, BeforeValidator(_ledger_bytes), _SIZE]
Spare: TypeAlias = Annotated[int, BeforeValidator(units.size_mib_up), _any_of({"const": 0}, {"type": "string"})]
Anything: TypeAlias = Annotated[Any, WithJsonSchema({})]


def _number(low: int, high: int) -> WithJsonSchema:
    return _any_of({"type": "integer", "minimum": low, "maximum": high})


Parallel: TypeAlias = Annotated[int, _whole(1, 100_000), _number(1, 100_000)]
QueueLimit: TypeAlias = Annotated[int, _whole(0, 1_000_000), _number(0, 1_000_000)]
Concurrency: TypeAlias = Annotated[int, _whole(0, 100_000), _number(0, 100_000)]
DevicesCount: TypeAlias = Annotated[int, _whole(1, 64), _number(1, 64)]
Port: TypeAlias = Annotated[int, _whole(1, 65_535), _number(1, 65_535)]


# ------------------------------------------------------------------------------------------------------- lists, tables


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {kind(value)}, not a list. Write [one, two], or one `- item` a line.")
    for index, item in enumerate(value, start=1):
        if isinstance(item, (Mapping, list)) or item is None:
            raise ValueError(f"item {index} is {kind(item)}. Write text.")
    return tuple(_text(item) for item in value)


def _names(value: object) -> tuple[str, ...]:
    names = _texts(value)
    for name in names:
        if message := name_error(name):
            raise ValueError(message)
    return names


def name_error(name: str) -> str:
    """What is wrong with a model id or alias; "" when nothing is."""
    if not name.strip():
        return "a name is empty. Give it at least one letter."
    if name != name.strip():
        return f"the name {quoted(name)} starts or ends with a space. Remove it."
    if len(name) > NAME_CHARS_MAX:
        return f"the name {quoted(name)} has {len(name)} characters; at most {NAME_CHARS_MAX} are taken."
    if not name.isprintable():
        return f"the name {quoted(name)} holds a character that cannot be printed. Remove it."
    return ""


def _patterns(value: object) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        if len(pattern) > PATTERN_CHARS_MAX:
            raise ValueError(f"{quoted(pattern)} is longer than {PATTERN_CHARS_MAX} characters. Make it shorter.")
        try:
            re.compile(pattern)
        except re.error as exc:
            raise ValueError(f"{quoted(pattern)} is not a regular expression: {exc.msg}. Write one such as \\.css$.") from None
    return patterns


def _keys(value: object) -> tuple[KeySection, ...]:
    """API keys, each as text or as a mapping; no message here may hold one."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("is not a list. Write one `- key` a line.")
    if len(value) > KEYS_MAX:
        raise ValueError(f"has {len(value):,} keys; at most {KEYS_MAX:,} are taken.")
    for index, item in enumerate(value, start=1):
        if not isinstance(item, (Mapping, KeySection)) and (message := _key_error(item)):
            raise ValueError(f"key {index} {message}")
    # What a mapping gets wrong is told with its own place.
    return _KEYS.validate_python([item if isinstance(item, (Mapping, KeySection)) else {"key": item} for item in value])


def _key(value: object) -> str:
    if message := _key_error(value):
        raise ValueError(message)
    return _text(value)


def _key_error(value: object) -> str:
    """What is wrong with a key; "" when nothing is."""
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return "is not text. Write it in quotes."
    text = _text(value)
    if not text:
        return "is empty. Remove it, or write a key."
    if len(text) > KEY_CHARS_MAX:
        return f"is longer than {KEY_CHARS_MAX:,} characters. Make it shorter."
    if any(c.isspace() or not c.isprintable() or ord(c) > 126 for c in text):
        return "holds a space or a character that HTTP headers cannot carry. Use letters, digits and signs."
    return ""


def _key_name(value: object) -> str:
    name = _text(value)
    if message := name_error(name):
        raise ValueError(message)
    if len(name) > KEY_NAME_CHARS_MAX:
        raise ValueError(f"the name {quoted(name)} has {len(name)} characters; at most {KEY_NAME_CHARS_MAX} are taken.")
    return name


def _scopes(value: object) -> tuple[str, ...]:
    """In the order of SCOPES, each once."""
    names = (value,) if isinstance(value, str) else _texts(value)
    if not names:
        raise ValueError(f"is an empty list. Name {', '.join(SCOPES[:-1])} or {SCOPES[-1]}, or leave it out for all.")
    chosen = {_scope(name) for name in names}
    return tuple(scope for scope in SCOPES if scope in chosen)


def _key_models(value: object) -> tuple[str, ...]:
    names = _names((value,) if isinstance(value, str) else value)
    if not names:
        raise ValueError("is an empty list. Name models, or leave it out for all.")
    return names


def command(value: object) -> tuple[str, ...]:
    """Arguments from text (split, comments left out) or from a list (taken as they are)."""
    if isinstance(value, (list, tuple)):
        argv = _texts(value)
    elif isinstance(value, str):
        try:
            argv = commands.split(value)
        except commands.CommandError as exc:
            raise ValueError(str(exc)) from None
    else:
        raise ValueError(f"is {kind(value)}. Write the command as text, or as a list of its arguments.")
    if not argv or not argv[0]:
        raise ValueError("is an empty command. Write the program and its arguments, such as llama-server --port ${PORT}.")
    return argv


def _arguments(value: object) -> tuple[str, ...]:
    return command(f"x {value}")[1:] if isinstance(value, str) else _texts(value)


def _environment(value: object) -> tuple[tuple[str, str], ...]:
    if isinstance(value, Mapping):
        pairs = [(str(name), _env_text(str(name), item)) for name, item in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [_env_pair(index, item) for index, item in enumerate(value, start=1)]
    else:
        raise ValueError(f"is {_kind_only(value)}. Write one `- NAME=value` a line, or a mapping of NAME: value.")
    for name, _ in pairs:
        if not name or "=" in name or not name.isprintable() or any(c.isspace() for c in name):
            raise ValueError(f"{quoted(name)} is not the name of an environment variable. Use letters, digits and _.")
    return tuple(pairs)


def _kind_only(value: object) -> str:
    return "text" if isinstance(value, str) else kind(value)


def _env_pair(index: int, item: object) -> tuple[str, str]:
    name, equals, text = _text(item).partition("=") if not isinstance(item, (Mapping, list)) and item is not None else ("", "", "")
    if not equals:
        raise ValueError(f"item {index} has no `=`. Write NAME=value.")
    return name.strip(), text


def _env_text(name: str, item: object) -> str:
    if item is None:
        return ""
    if isinstance(item, (Mapping, list)):
        raise ValueError(f"{name} is {kind(item)}. Write text.")
    return _text(item)


def _url(value: object) -> str:
    url = _text(value)
    if "@" in url:  # the message must not show a password
        raise ValueError("the address of an engine holds no user or password. Write http://host:port/path.")
    try:
        parts = urlsplit(url.replace("${PORT}", "1"))
        port = parts.port
    except ValueError:
        raise ValueError(f"{quoted(url)} is not the address of an engine. Write http://127.0.0.1:${{PORT}}.") from None
    if parts.scheme == "https":
        raise ValueError(f"{quoted(url)}: engines are reached over plain http only. Write http://127.0.0.1:${{PORT}}.")
    if parts.scheme != "http" or not parts.hostname or port == 0 or any(c.isspace() for c in url):
        raise ValueError(f"{quoted(url)} is not the address of an engine. Write http://127.0.0.1:${{PORT}} or http://host:8000/path.")
    if parts.query or parts.fragment:
        raise ValueError(f"{quoted(url)} has a query or fragment. Write http://host:port/path.")
    return url.rstrip("/")


def _address(value: object, whose: str, example: str) -> str:
    """Scheme, host, port and base path of a server that greenroom speaks to; `whose` and `example` are for its sentences."""
    url = _text(value)
    if "@" in url:  # the message must not show a password
        raise ValueError(f"the address of {whose} holds no user or password. Write {example}.")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and _can_be_sent(url)
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"{quoted(url)} is not the address of {whose}. Write {example}.")
    if parts.query or parts.fragment:
        raise ValueError(f"{quoted(url)} is more than the address of {whose}. Write {example}.")
    return url.rstrip("/")


_PEER = ("a peer", "https://host:8443 or http://host:8080/path, and its key as apiKey")


def _peer_url(value: object) -> str:
    if isinstance(value, (list, tuple)):
        raise ValueError("is a list. Write one address; give the other server an entry of its own under peers with the same models.")
    url = _address(value, *_PEER)
    if "\\" in url or ".." in urlsplit(url).path.split("/"):  # clients' paths are put behind it
        raise ValueError(f"{quoted(url)} is more than the address of {_PEER[0]}. Write {_PEER[1]}.")
    return url


def _peer_key(value: object) -> str | None:
    return None if value == "" else _key(value)


def _peer_models(value: object) -> tuple[tuple[str, str], ...]:
    """(name here, name there) of each."""
    if isinstance(value, Mapping):
        pairs = [(str(here), there) for here, there in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [pair for item in value for pair in (item.items() if isinstance(item, Mapping) else [(item, item)])]
    else:
        raise ValueError(f"is {kind(value)}, not a list. Write [one, two]; `- name here: name there` where they differ.")
    if not pairs:
        raise ValueError("is empty. Name the models that are served there.")
    out: dict[str, str] = {}
    for here, there in pairs:
        if isinstance(there, (Mapping, list)) or here is None or isinstance(here, (Mapping, list)):
            raise ValueError(f"holds {kind(there)} where a name belongs. Write [one, two]; `- name here: name there` where they differ.")
        name, remote = _text(here), _text(here if there is None else there)
        if message := name_error(name) or name_error(remote):
            raise ValueError(message)
        if name in out:
            raise ValueError(f"names {quoted(name)} twice. Remove one.")
        out[name] = remote
    return tuple(out.items())


def _file_of(what: str) -> BeforeValidator:
    def validate(value: object) -> str:
        path = _text(value)
        if not path.strip() or "\0" in path:
            raise ValueError(f"is no path. Write that of a file of {what}.")
        return path

    return BeforeValidator(validate)


def _hosts(value: object) -> tuple[str, ...]:
    return tuple(map(units.host_of, (value,) if isinstance(value, str) else _texts(value)))


def _platform(value: object) -> str:
    return units.platform_of(_text(value))


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e6:
        raise ValueError(f"{quoted(value)} is not a number above 0. Write 2 for twice the requests of a peer of 1.")
    return float(value)


def _probe_path(value: object) -> str:
    if value is False or (isinstance(value, str) and value.lower() in ("off", "none", "false")):
        return "off"
    return _call_path(value)


def _collector(value: object) -> str:
    return _address(value, "a collector", "http://127.0.0.1:4318")


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{quoted(value)} is not a number from 0 to 1. Write 1 for all, or 0.1 for one in ten.")
    return float(value)


def _check_path(value: object) -> str:
    path = _text(value)
    if path == "none":
        return path
    if "://" in path:
        raise ValueError(f"{quoted(path)} is a whole address. Write the path alone, such as /health, or none.")
    if not _can_be_sent(path):
        raise ValueError(f"{quoted(path)} is not a path. Write one such as /health, or none.")
    return path if path.startswith("/") else f"/{path}"


def _call_path(value: object) -> str:
    """Where a call goes; unlike `checkEndpoint` it may have a query."""
    path = _text(value)
    if "://" in path:
        raise ValueError(f"{quoted(path)} is a whole address. Write the path alone, such as /sleep; the engine's address is in proxy.")
    if not _can_be_sent(path) or "#" in path:
        raise ValueError(f"{quoted(path)} is not a path. Write one such as /sleep, or /sleep?level=1.")
    if not path.startswith("/"):
        raise ValueError(f"{quoted(path)} does not start with a slash. Did you mean {quoted('/' + path)}?")
    return path


def _can_be_sent(path: str) -> bool:
    return bool(path) and not any(c.isspace() or not c.isprintable() or ord(c) > 126 for c in path)


def _level(value: object) -> int:
    if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value) in ("1", "2"):
        return int(value)
    raise ValueError(f"{quoted(value)} is not a sleep level. Write 1 (weights wait in host RAM) or 2 (weights are dropped).")


def _field_path(value: object) -> str:
    field = _text(value)
    if not all(part.strip() for part in field.split(".")):
        raise ValueError(f"{quoted(field)} names no field of a JSON answer. Write one such as is_sleeping; dots go deeper.")
    return field


def _stripped(value: object) -> tuple[str, ...]:
    """A comma list (or a list) of parameter names, sorted and without doubles; `model` cannot be stripped."""
    names = value.split(",") if isinstance(value, str) else _texts(value)
    return tuple(sorted({name.strip() for name in names} - {"", "model"}))


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"is {kind(value)}, not a mapping. Write `name: value` lines.")
    table = plain(value)
    assert isinstance(table, dict)
    return table


def _parameters(value: object) -> dict[str, Any]:
    return {key: item for key, item in _table(value).items() if key != "model"}


def _parameters_by_id(value: object) -> dict[str, dict[str, Any]]:
    return {key: _parameters(item) for key, item in _table(value).items()}


def _devices(value: object) -> tuple[str, ...]:
    """`any` is the empty tuple."""
    names = (value,) if isinstance(value, str) else _texts(value)
    if not names:
        raise ValueError("is an empty list. Name a device, or write any.")
    if "any" in names and len(names) > 1:
        raise ValueError('"any" stands alone. Name the devices, or write any.')
    if len(set(names)) < len(names):
        raise ValueError("names a device twice. Name each once; devices_count says how many are used.")
    return () if tuple(names) == ("any",) else tuple(str(name) for name in names)


_CONSTANTS: Mapping[str, str] = {each.name: str(each.type) for each in fields(Policy)}  # name -> its type, as it is written


def _policy(value: object) -> dict[str, int | float | None]:
    out: dict[str, int | float | None] = {}
    for name, item in _table(value).items():
        if name not in _CONSTANTS:
            raise ValueError(f"{quoted(name)} is no scheduling constant.{did_you_mean(name, _CONSTANTS)}")
        out[name] = _constant(name, item, whole="int" in _CONSTANTS[name], can_be_off="None" in _CONSTANTS[name])
    return out


def _constant(name: str, item: object, whole: bool, can_be_off: bool) -> int | float | None:
    if can_be_off and (item is None or item == "off"):
        return None
    try:
        if name.endswith("_s"):
            return units.duration_s(item)
        if name.endswith("_mib") and isinstance(item, str):
            return units.size_mib_up(item)
    except units.UnitError as exc:
        raise ValueError(f"{name}: {exc}{' Write off to do without.' if can_be_off else ''}") from None
    if isinstance(item, bool) or not isinstance(item, (int, float)) or item < 0 or item != item or item > 1e9:
        raise ValueError(f"{name}: {quoted(item)} is not a number from 0 up.")
    if whole and item != int(item):
        raise ValueError(f"{name}: {quoted(item)} is not a whole number.")
    return int(item) if whole else float(item)


def _limits(value: object) -> dict[str, int | float]:
    return {name: _limit(name, item) for name, item in _table(value).items()}


def _limit(name: str, item: object) -> int | float:
    try:
        scale = re.search(r"_(bytes|kib|mib)(?:_|$)", name)
        if scale is not None and isinstance(item, str):
            return units.size_bytes(item) // {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20}[scale.group(1)]
        if re.search(r"_s(_|$)", name):
            return units.duration_s(item)
    except units.UnitError as exc:
        raise ValueError(f"{name}: {exc}") from None
    if isinstance(item, bool) or not isinstance(item, (int, float)) or not 0 < item <= 1 << 50:
        raise ValueError(f"{name}: {quoted(item)} is not a number above 0.")
    return int(item) if isinstance(item, int) else float(item)


_LIST = WithJsonSchema({"type": "array", "items": {"type": ["string", "number", "boolean"]}})
_OBJECT = WithJsonSchema({"type": "object"})
_COMMAND = WithJsonSchema(
    {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 1}]}
)
_ENV = WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string", "pattern": "="}}, {"type": "object"}]})

Texts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_texts), _LIST]
Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_names), _LIST]
Patterns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_patterns), _LIST]
KeyText: TypeAlias = Annotated[str, BeforeValidator(_key), WithJsonSchema({"type": ["string", "number"]})]
KeyName: TypeAlias = Annotated[str, BeforeValidator(_key_name), _WORD]
Scopes: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_scopes),
    WithJsonSchema({"anyOf": [{"enum": [*SCOPES]}, {"type": "array", "items": {"enum": [*SCOPES]}, "minItems": 1}]}),
]
KeyModels: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_key_models), WithJsonSchema({"type": ["string", "array"]})]
Argv: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(command), _COMMAND]
Arguments: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_arguments), _COMMAND]
Environment: TypeAlias = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_environment), _ENV]
Url: TypeAlias = Annotated[str, BeforeValidator(_url), WithJsonSchema({"type": "string"})]
CheckPath: TypeAlias = Annotated[str, BeforeValidator(_check_path), WithJsonSchema({"type": "string"})]
CollectorUrl: TypeAlias = Annotated[str, BeforeValidator(_collector), WithJsonSchema({"type": "string"})]
PeerUrl: TypeAlias = Annotated[str, BeforeValidator(_peer_url), WithJsonSchema({"type": "string"})]
PeerKey: TypeAlias = Annotated[str | None, BeforeValidator(_peer_key), WithJsonSchema({"type": ["string", "number", "null"]})]
PeerModels: TypeAlias = Annotated[
    tuple[tuple[str, str], ...], BeforeValidator(_peer_models), WithJsonSchema({"type": ["array", "object"], "minItems": 1})
]
CaPath: TypeAlias = Annotated[str, _file_of("certificates (PEM), or leave it out for the system's own"), WithJsonSchema({"type": "string"})]
KeyPath: TypeAlias = Annotated[str, _file_of("one public key (PEM), such as cosign.pub"), WithJsonSchema({"type": "string"})]
Hosts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_hosts), WithJsonSchema({"type": ["string", "array"]})]
Platform: TypeAlias = Annotated[str, BeforeValidator(_platform), WithJsonSchema({"type": "string"})]
PeerPriority: TypeAlias = Annotated[int, _whole(-1000, 1000), _number(-1000, 1000)]
Weight: TypeAlias = Annotated[float, BeforeValidator(_weight), _any_of({"type": "number", "exclusiveMinimum": 0})]
ProbePath: TypeAlias = Annotated[str, BeforeValidator(_probe_path), WithJsonSchema({"type": ["string", "boolean"]})]
Share: TypeAlias = Annotated[float, BeforeValidator(_share), _any_of({"type": "number", "minimum": 0, "maximum": 1})]
CallPath: TypeAlias = Annotated[str, BeforeValidator(_call_path), WithJsonSchema({"type": "string", "pattern": "^/|^\\$\\{"})]
Level: TypeAlias = Annotated[int, BeforeValidator(_level), WithJsonSchema({"enum": [1, 2, "1", "2"]})]
FieldPath: TypeAlias = Annotated[str, BeforeValidator(_field_path), _WORD]
JsonValue: TypeAlias = Annotated[Any, BeforeValidator(plain), WithJsonSchema({})]
Stripped: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_stripped), WithJsonSchema({"type": ["string", "array"]})]
Table: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_table), _OBJECT]
Parameters: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_parameters), _OBJECT]
ParametersById: TypeAlias = Annotated[dict[str, dict[str, Any]], BeforeValidator(_parameters_by_id), _OBJECT]
Devices: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_devices), WithJsonSchema({"type": ["string", "array"]})]
Constants: TypeAlias = Annotated[
    dict[str, Any],  # numbers, or None for those that can be off
    BeforeValidator(_policy),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                name: {"type": ["number", "string", *(["null"] if "None" in written else [])]} for name, written in _CONSTANTS.items()
            },
            "additionalProperties": False,
        }
    ),
]
Limits: TypeAlias = Annotated[
    dict[str, int | float],
    BeforeValidator(_limits),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["number", "string"]}}),
]


# ------------------------------------------------------------------------------------------------------------- tables


class Section(BaseModel):
    """A mapping whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


class DeviceSection(Section):
    memory: Room | None = Field(default=None, description="How much of the device may be used.")
    headroom: Spare | None = Field(default=None, description="How much of that always stays free.")
    probe: Annotated[str, _choice("auto", "none"), WithJsonSchema({"enum": ["auto", "none"]})] = Field(
        default="auto", description="none: the device is booked, not measured."
    )
    uuid: Words | None = Field(default=None, description="The GPU or MIG instance this name stands for.")


class FiltersSection(Section):
    stripParams: Stripped = Field(default=(), description="Request parameters to remove, comma-separated.")
    setParams: Parameters = Field(default_factory=dict, description="Request parameters to set always.")
    setParamsByID: ParametersById = Field(
        default_factory=dict, description="Parameters to set by the name a client used; each name is an alias."
    )


class WarmupSection(Section):
    path: CheckPath = Field(description="Where the request goes.")
    body: Table = Field(default_factory=dict, description="Its JSON body.")


_METHODS = ("POST", "GET", "PUT", "PATCH", "DELETE")
Method: TypeAlias = Annotated[
    str,
    _choice(*_METHODS, also={each.lower(): each for each in _METHODS}),
    WithJsonSchema({"enum": [*_METHODS, *map(str.lower, _METHODS)]}),
]


class _Lean(Section):
    """An empty value counts as not written here too, except where it is one of its own."""

    @model_validator(mode="before")
    @classmethod
    def _written(cls, value: object) -> object:
        return {key: item for key, item in value.items() if item is not None or key == "value"} if isinstance(value, Mapping) else value


class CallSection(_Lean):
    path: CallPath = Field(description="Where the request goes, with its query.")
    method: Method = Field(default="POST", description="Its HTTP method.")
    body: Table | None = Field(default=None, description="Its JSON body.")


class AsleepSection(_Lean):
    path: CallPath = Field(description="Answers a GET with JSON; asking must not wake the engine.")
    field: FieldPath = Field(default="is_sleeping", description="The field of the answer to look at; dots go deeper.")
    value: JsonValue = Field(default=True, description="What the field holds while the engine sleeps.")


_CALLS: TypeAdapter[tuple[CallSection, ...]] = TypeAdapter(tuple[CallSection, ...])


def _calls(value: object) -> tuple[CallSection, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {kind(value)}, not a list. Write one `- path: /...` a call.")
    if not value:
        raise ValueError("is an empty list. Write one `- path: /...` a call.")
    return _CALLS.validate_python(value)  # its errors keep their places


def _call_or_calls(value: object) -> CallSection | tuple[CallSection, ...]:
    if isinstance(value, Mapping):
        return CallSection.model_validate(value)
    if isinstance(value, (list, tuple)):
        return _calls(value)
    meant = f"{{path: {value}}}" if isinstance(value, str) and value.startswith("/") else "{path: /wake_up}, or a list of such"
    raise ValueError(f"is {kind(value)}, not a mapping. Write {meant}.")


Calls: TypeAlias = Annotated[tuple[CallSection, ...], BeforeValidator(_calls)]
CallOrCalls: TypeAlias = Annotated[CallSection | tuple[CallSection, ...], BeforeValidator(_call_or_calls)]


class KeySection(_Lean):
    """One API key with a name, and what it is good for."""

    key: KeyText = Field(description="The key itself, best as ${env.NAME}.", repr=False)
    name: KeyName | None = Field(default=None, description="What it is called in events and logs; default key-1 and so on.")
    scopes: Scopes = Field(default=SCOPES, description="inference, view, admin; default all.")
    models: KeyModels | None = Field(default=None, description="Ids, aliases and patterns of the models it may ask; default all.")
    limit: Parallel | None = Field(default=None, description="Its requests in flight and waiting at once; beyond it 429.")


_KEYS: TypeAdapter[tuple[KeySection, ...]] = TypeAdapter(tuple[KeySection, ...])
_scope = _chosen(*SCOPES)
Keys: TypeAlias = Annotated[
    tuple[KeySection, ...],
    BeforeValidator(_keys),
    WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": ["string", "number"]}, _KEYS.json_schema()["$defs"]["KeySection"]]}}),
]


def key_name(key: KeySection, position: int) -> str:
    """What a key is called; `position` counts from 1 in the list as it is written."""
    return key.name or f"key-{position}"


class SleepSection(_Lean):
    """Sleep routes of an engine that greenroom does not know; the way back is the model's `wake`."""

    path: CallPath | None = Field(default=None, description="Where the request goes that puts the engine to sleep, with its query.")
    method: Method = Field(default="POST", description="Its HTTP method.")
    body: Table | None = Field(default=None, description="Its JSON body.")
    calls: Calls | None = Field(default=None, description="Several requests in order, instead of path, method and body.")
    level: Level = Field(default=1, description="1: the weights wait in host RAM; 2: they are dropped.")
    asleep: AsleepSection | None = Field(default=None, description="How to ask the engine whether it sleeps.")
    residue: Spare = Field(default=1024, description="What it keeps on each device while asleep, until that was measured.")
    host_memory: Spare | None = Field(default=None, description="Host RAM while asleep, until that was measured.")


_sleep_word = _chosen("off", "1", "2", "auto")
SleepWord: TypeAlias = Annotated[str, WithJsonSchema({"enum": ["off", 1, 2, "auto", "1", "2"]})]


def _sleep(value: object) -> str | SleepSection:
    if isinstance(value, Mapping):
        return SleepSection.model_validate(value)  # its errors keep their places
    if isinstance(value, (list, tuple)):
        raise ValueError("is a list. Write off, 1, 2 or auto, or {path: /sleep}; several calls go under calls in such a mapping.")
    if isinstance(value, str) and value.startswith("/"):
        raise ValueError(f"{quoted(value)} is not one of the choices. Did you mean {{path: {value}}}?")
    return _sleep_word(value)


Sleep: TypeAlias = Annotated[SleepWord | SleepSection, BeforeValidator(_sleep)]


class PullSection(_Lean):
    """How models are fetched: what `greenroom pull` can be told, in the same words."""

    plain_http: Flag = Field(default=False, description="The registry has no TLS; on this machine that is found out.")
    tls_ca: CaPath | None = Field(default=None, description="An authority (PEM) that is believed, too.")
    tls_verify: Flag = Field(default=True, description="false: believe any certificate of the registry.")
    allow_host: Hosts = Field(default=(), description="Hosts inside your network that a registry may redirect to.")
    platform: Platform = Field(default="linux/amd64", description="Which manifest of a list is taken.")
    verify_key: KeyPath | None = Field(default=None, description="Only models that this key (cosign.pub) has signed are served.")
    max_size: SizeMax | None = Field(default=None, description="A larger model is not fetched.")
    offline: Flag = Field(default=False, description="Nobody is asked; models have to be here.")


_pull_word = _chosen("missing", "never")
PullWord: TypeAlias = Annotated[str, WithJsonSchema({"enum": ["missing", "never"]})]


class ModelPullSection(PullSection):
    """Of one model; what is not written here is as in `pull` at the top level."""

    when: Annotated[str, BeforeValidator(_pull_word), WithJsonSchema({"enum": ["missing", "never"]})] = Field(
        default="missing", description="Whether the first request fetches the model."
    )


def _pull(value: object) -> str | ModelPullSection:
    return ModelPullSection.model_validate(value) if isinstance(value, Mapping) else _pull_word(value)


Pull: TypeAlias = Annotated[PullWord | ModelPullSection, BeforeValidator(_pull)]


class ContainerSection(Section):
    image: Words = Field(description="The image to run.")
    runtime: Annotated[str, _choice("podman", "docker"), WithJsonSchema({"enum": ["podman", "docker"]})] = Field(
        default="podman", description="The program that runs it."
    )
    args: Arguments = Field(default=(), description="More arguments for `run`.")
    volumes: Texts = Field(default=(), description="Mounts, as host:container[:options]; read-only unless the options say rw.")
    pull: Annotated[str, _choice("missing", "always", "never"), WithJsonSchema({"enum": ["missing", "always", "never"]})] = Field(
        default="missing", description="When the image is pulled before a start."
    )
    pull_timeout: Positive = Field(default=1800.0, description="Longest pull; it does not count as start.")
    gpus: Annotated[str, _choice("auto", "cdi", "flag", "none"), WithJsonSchema({"enum": ["auto", "cdi", "flag", "none"]})] = Field(
        default="auto", description="How NVIDIA GPUs are handed in: by CDI name, by docker's --gpus, or not at all; auto fits the runtime."
    )
    shm_size: Need | None = Field(default=None, description="Size of /dev/shm; default what the engine is known to need.")


_ENGINES = ("llama_server", "vllm", "sglang", "tei", "generic")
Engine: TypeAlias = Annotated[
    str, _choice(*_ENGINES, also={"llama-server": "llama_server"}), WithJsonSchema({"enum": [*_ENGINES, "llama-server"]})
]
CanaryWhen: TypeAlias = Annotated[str, _choice("auto", "always", "off"), WithJsonSchema({"enum": ["auto", "always", "off"]})]
PriorityName: TypeAlias = Annotated[str, _choice("interactive", "batch"), WithJsonSchema({"enum": ["interactive", "batch"]})]
Conflict: TypeAlias = Annotated[str, _choice("refuse", "wait"), WithJsonSchema({"enum": ["refuse", "wait"]})]
LogLevel: TypeAlias = Annotated[
    str,
    _choice("debug", "info", "warn", "error", also={"warning": "warn"}),
    WithJsonSchema({"enum": ["debug", "info", "warn", "error"]}),
]
LogTarget: TypeAlias = Annotated[
    str, _choice("proxy", "upstream", "both", "none"), WithJsonSchema({"enum": ["proxy", "upstream", "both", "none"]})
]
NoEffect: TypeAlias = Annotated[Any, WithJsonSchema({"description": "Accepted; has no effect."})]


class ModelSection(Section):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False, json_schema_extra={"required": ["cmd"]})

    cmd: Argv = Field(default=(), description="The engine's command: text split without a shell, or a list of arguments.")
    model: Words | None = Field(
        default=None, description="Where the model comes from: oci://…, hf://…, ollama://…, https://…; ${MODEL_PATH} in cmd is its place."
    )
    pull: Pull = Field(default="missing", description="Whether the first request fetches `model` when it is not in the store, and how.")
    cmdStop: Argv | None = Field(default=None, description="Command that stops the engine; may use ${PID}.")
    proxy: Url | None = Field(default=None, description="Address of the engine; default http://127.0.0.1:${PORT}.")
    checkEndpoint: CheckPath | None = Field(default=None, description="Path that answers 200 when ready; `none`: an open port is enough.")
    healthCheckTimeout: Positive | None = Field(default=None, description="Longest start; `start_timeout` is the same key.")
    unloadTimeout: Duration | None = Field(default=None, description="Grace between TERM and KILL; `stop_timeout` is the same key.")
    ttl: Ttl = Field(default=None, description="Idle time after which it is stopped; auto = by its own gaps, 0 = never, -1 = globalTTL.")
    aliases: Names = Field(default=(), description="Other names clients may use.")
    env: Environment = Field(default=(), description="Environment of the engine: NAME=value list, or a mapping.")
    cwd: Words | None = Field(default=None, description="Working directory of the engine.")
    name: Words = Field(default="", description="Display name.")
    description: Words = Field(default="", description="For listings.")
    unlisted: Flag = Field(default=False, description="Callable, but not listed.")
    metadata: Table = Field(default_factory=dict, description="Passed through to listings.")
    useModelName: Words | None = Field(default=None, description="Written over `model` before forwarding.")
    filters: FiltersSection = Field(default_factory=FiltersSection, description="What to change in JSON requests.")
    concurrencyLimit: Concurrency = Field(default=0, description="llama-swap's spelling of `parallel`; 0 = not set.")
    macros: Anything = Field(default=None, description="Macros of this model; they win over the global ones.")
    memory: Need | None = Field(default=None, description="Memory it needs on each of its devices.")
    host_memory: Need | None = Field(default=None, description="Host RAM it needs beside that.")
    device: Devices = Field(default=(), description="A device, a list of candidates, or any.")
    devices_count: DevicesCount = Field(default=1, description="Devices used at once (tensor parallel).")
    sleep: Sleep = Field(default="auto", description="Sleep level when memory is wanted, or the engine's own sleep routes.")
    wake: CallOrCalls | None = Field(default=None, description="What wakes an engine whose sleep routes are written out: a call or a list.")
    sleep_timeout: Positive | None = Field(default=None, description="Longest sleep; default the longest start (healthCheckTimeout).")
    wake_timeout: Positive | None = Field(
        default=None, description="Longest wake, all its calls together; default the longest start (healthCheckTimeout)."
    )
    canary: CanaryWhen = Field(default="auto", description="After which wakes a fixed question is asked and compared.")
    sleep_after: Idle | None = Field(default=None, description="Idle time after which it sleeps.")
    pin: Flag = Field(default=False, description="Loaded at start, never evicted.")
    priority: PriorityName = Field(default="interactive", description="Its place in the queue.")
    parallel: Parallel | None = Field(default=None, description="Requests in flight at once.")
    queue_limit: QueueLimit = Field(default=256, description="Waiting requests; beyond it 429.")
    on_conflict: Conflict = Field(default="refuse", description="What happens when pinned models leave no room.")
    stall_timeout: Duration | None = Field(default=None, description="No byte and no health for this long: the engine is ended.")
    busy_timeout: Duration | None = Field(default=None, description="No byte on a request for this long: the engine is ended.")
    warmup: WarmupSection | None = Field(default=None, description="One request sent after a start or a wake, before the model is ready.")
    container: ContainerSection | None = Field(default=None, description="Run the command in a container.")
    engine: Engine | None = Field(default=None, description="The engine's dialect; default: told from the command.")
    keepalive: Flag = Field(default=True, description="SSE comments to streaming clients while it loads.")
    progress_counts: Flag = Field(default=False, description="A log line during the start restarts the start clock.")
    capabilities: NoEffect = None
    timeouts: NoEffect = None
    compat: NoEffect = None


class GroupSection(Section):
    members: Names = Field(description="The models of the group.")
    swap: Flag = Field(default=True, description="One member at a time.")
    exclusive: Flag = Field(default=True, description="Starting a member stops other groups.")
    persistent: Flag = Field(default=False, description="Other groups never stop it.")


class StartupSection(Section):
    preload: Names = Field(default=(), description="Models to load at start.")


class HooksSection(Section):
    on_startup: StartupSection = Field(default_factory=StartupSection)


class UpstreamSection(Section):
    ignorePaths: Patterns = Field(default=(), description="Paths under /upstream that never start a model.")


class RouterSettings(Section):
    groups: dict[str, GroupSection] = Field(default_factory=dict)


class RouterSection(Section):
    use: Annotated[str, _choice("group", also={"groups": "group"}), WithJsonSchema({"enum": ["group", "groups"]})] = "group"
    settings: RouterSettings = Field(default_factory=RouterSettings)


class RoutingScheduler(Section):
    use: Annotated[str, _choice("fifo"), WithJsonSchema({"const": "fifo"})] = "fifo"


class RoutingSection(Section):
    router: RouterSection = Field(default_factory=RouterSection)
    scheduler: RoutingScheduler = Field(default_factory=RoutingScheduler)


class TracingSection(_Lean):
    """Where traces of requests are sent; needs the packages of greenroom[otel]."""

    endpoint: CollectorUrl = Field(default="http://127.0.0.1:4318", description="Address of an OTLP collector (HTTP); /v1/traces is added.")
    service_name: KeyName = Field(default="greenroom", description="What this server is called in traces.")
    sample: Share = Field(default=1.0, description="Share of the requests that are traced, 0 to 1.")


class LedgerSection(_Lean):
    """How much of the past is kept on disk; what is older, or too much, goes, the oldest first."""

    keep: Age = Field(default=30 * 86400.0, description="How long requests, events and samples are kept.")
    max_size: LedgerSize = Field(default=1 << 30, description="How large the file may become.")


class PeerFiltersSection(FiltersSection):
    """As those of a model; both spellings of each key are taken."""

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        out: dict[str, object] = {}
        for key, item in value.items():
            name = PEER_FILTER_SYNONYMS.get(str(key), str(key))
            if name in out:
                raise ValueError(f"{quoted(str(key))} says the same as {quoted(name)}. Keep one of them.")
            if item is not None:
                out[name] = item
        return out


class PeerTimeoutsSection(_Lean):
    """llama-swap's timeouts of a peer; 0 = none."""

    connect: Duration = Field(default=5.0, description="Longest opening of a connection, TLS included; 0 = the default.")
    responseHeader: Duration = Field(default=300.0, description="Longest wait for the head of an answer; 0 = no end.")
    keepalive: NoEffect = None
    tlsHandshake: NoEffect = None
    expectContinue: NoEffect = None
    idleConn: NoEffect = None


class PeerSection(_Lean):
    """Another server that speaks OpenAI's API, and what it serves."""

    proxy: PeerUrl = Field(description="Its address: http or https, with a base path where it has one.")
    models: PeerModels = Field(description="Names served there; `name here: name there` where they differ.")
    apiKey: PeerKey = Field(default=None, description="Sent to it as Bearer and x-api-key, best as ${env.NAME}.", repr=False)
    tls_ca: CaPath | None = Field(default=None, description="Certificates (PEM) that its own must come from; default: the system's.")
    filters: PeerFiltersSection = Field(default_factory=PeerFiltersSection, description="What to change in JSON requests to it.")
    timeouts: PeerTimeoutsSection = Field(default_factory=PeerTimeoutsSection)
    stall_timeout: Duration = Field(default=300.0, description="No byte for this long within an answer: it is ended; 0 = no end.")
    priority: PeerPriority = Field(default=0, description="Of several peers with a model, higher ones are asked first.")
    weight: Weight = Field(default=1.0, description="Its share of the requests in flight, among peers of one priority.")
    overflow: Flag = Field(default=False, description="It also serves models of this machine, when that refuses a request.")
    prefer: Flag = Field(default=False, description="It is asked before this machine for models that both have.")
    probe: ProbePath = Field(default="/health", description="Asked every 15 s whether it is there; off: never.")


class ConfigFile(Section):
    """greenroom.yaml: which models there are, how their engines are started, and what memory they may use."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=False,
        json_schema_extra={"anyOf": [{"required": ["models"]}, {"required": ["peers"]}]},
    )

    models: dict[str, ModelSection] = Field(default_factory=dict, description="Model id -> how to serve it.")
    devices: dict[str, DeviceSection] = Field(default_factory=dict, description="Memory budgets; found by itself when left out.")
    groups: dict[str, GroupSection] = Field(default_factory=dict, description="Which models may be loaded together.")
    peers: dict[str, PeerSection] = Field(default_factory=dict, description="Other servers, and the models they serve.")
    pull: PullSection = Field(default_factory=PullSection, description="How models are fetched that are not in the store.")
    routing: RoutingSection = Field(default_factory=RoutingSection, description="llama-swap's newer place for groups.")
    hooks: HooksSection = Field(default_factory=HooksSection)
    macros: Anything = Field(default=None, description="name: value, used as ${name}.")
    healthCheckTimeout: Positive = Field(default=120.0, description="Longest start of an engine.")
    globalTTL: GlobalTtl = Field(default=0.0, description="Idle time after which engines are stopped; auto = by their own gaps, 0 = never.")
    unloadTimeout: Duration = Field(default=10.0, description="Grace between TERM and KILL; 0 = the default.")
    startPort: Port = Field(default=5800, description="First port given to engines.")
    logLevel: LogLevel = "info"
    logToStdout: LogTarget = "proxy"
    includeAliasesInList: Flag = Field(default=False, description="Aliases are listed as models of their own.")
    apiKeys: Keys = Field(default=(), description="Keys clients must show one of: texts, or mappings with scopes.")
    upstream: UpstreamSection = Field(default_factory=UpstreamSection)
    default_model: Words | None = Field(default=None, description="Serves requests that name no model.")
    allowed_hosts: Texts = Field(default=(), description="Host names accepted besides loopback and the listen address.")
    cors_origins: Texts = Field(default=("*",), description="Origins allowed to read the inference API from a browser.")
    scheduling: Constants = Field(default_factory=dict, description="Constants of the scheduling rules, by name.")
    limits: Limits = Field(default_factory=dict, description="Limits of the data plane, by name.")
    ledger: LedgerSection = Field(default_factory=LedgerSection)
    tracing: TracingSection | None = Field(default=None, description="Send OpenTelemetry traces; nothing is sent without it.")
    logRequests: NoEffect = None
    metricsMaxInMemory: NoEffect = None
    store: NoEffect = None
    ui: NoEffect = None
    performance: NoEffect = None


def secret_values(raw: object) -> list[object]:
    """Values of `env` entries that are secret, as their names or they themselves say."""
    pairs = [(str(name), item) for name, item in raw.items()] if isinstance(raw, Mapping) else []
    if isinstance(raw, list):
        pairs = [(name, text) for name, _, text in (item.partition("=") for item in raw if isinstance(item, str))]
    return [item for name, item in pairs if looks_secret(name) or secrets.in_variable(name, str(item))]


def json_schema() -> dict[str, Any]:
    """The JSON schema of greenroom.yaml, for editors."""
    out = ConfigFile.model_json_schema(by_alias=True)
    for section, synonyms in (
        ("ModelSection", SYNONYMS),
        ("FiltersSection", FILTER_SYNONYMS),
        ("PeerFiltersSection", PEER_FILTER_SYNONYMS),
    ):
        properties = out["$defs"][section]["properties"]
        properties.update({synonym: properties[key] for synonym, key in synonyms.items()})
    out["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    out["title"] = "greenroom.yaml"
    return out
