"""Broken files: one line a problem, with file and line, all of them at once, and never a secret."""

# ruff: noqa: E501 -- a row of the table is easiest to read on one line

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.config import load
from greenroom.config.errors import PROBLEMS_MAX, ConfigError, Problem
from greenroom.config.load import load_config, load_config_text
from greenroom.config.schema import (
    AsleepSection,
    CallSection,
    ConfigFile,
    ContainerSection,
    DeviceSection,
    FiltersSection,
    GroupSection,
    KeySection,
    ModelSection,
    SleepSection,
)

OK = "cmd: 'x ${PORT}'"
MINIMAL = 'A minimal configuration is: models: {tiny: {cmd: "llama-server --model /models/tiny.gguf --port ${PORT}"}}'


def problems(text: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "c", env=env or {})
    lines = [str(problem) for problem in caught.value.problems]
    assert str(caught.value).splitlines() == lines
    assert all(re.match(r"c:\d+: ", line) and line.isprintable() and "Traceback" not in line for line in lines)
    return lines


# fmt: off
# Each row: what is broken, the file, its only problem.
TABLE: list[tuple[str, str, str]] = [
    ("empty file", "", f"c:1: is empty. {MINIMAL}"),
    ("only comments", "# nothing\n\n", f"c:1: is empty. {MINIMAL}"),
    ("a list", "\n- a\n- b\n", f"c:2: is a list, not a mapping of keys. {MINIMAL}"),
    ("one text", "hello", f'c:1: is the text "hello", not a mapping of keys. {MINIMAL}'),
    ("no models", "logLevel: info\n", f"c:1: has no models, so there is nothing to serve. {MINIMAL}"),
    ("models is a list", "models: [a]\n", "c:1: models: is a list, not a mapping. Write one `id:` a line under it, each with a cmd."),
    (
        "bracket never closed",
        "models:\n  a: {cmd: x\n",
        "c:3: is not valid YAML: a list [..] or mapping {..} is not closed, or lacks a comma.",
    ),
    ("quote never closed", "models:\n  a:\n    cmd: 'x\n", "c:3: is not valid YAML: a quote or bracket opened here is never closed."),
    (
        "macro without quotes in a flow mapping",
        "models: {a: {cmd: x ${PORT}}}\n",
        "c:1: is not valid YAML: inside [..] and {..} a value with ${..} needs quotes around it.",
    ),
    ("tab", "models:\n\ta: 1\n", "c:2: has a tab where YAML wants spaces. Indent with spaces."),
    (
        "colon in a value",
        f"models:\n  a: {{{OK}}}\nlogLevel: a: b\n",
        "c:3: is not valid YAML: a `:` where none can be. Check the indentation, or put the value in quotes.",
    ),
    ("unknown anchor", "models: *x\n", "c:1: uses a YAML alias (*name) that no anchor (&name) defines before it."),
    ("two documents", f"models: {{a: {{{OK}}}}}\n---\nx: 1\n", "c:2: holds more than one YAML document. Keep one and remove the `---` between them."),
    ("a tag", f"models:\n  a: {{{OK}, name: !ruby/x y}}\n", 'c:2: models.a.name: has the YAML tag "!ruby/x", which means nothing here. Remove it.'),
    ("NUL", "models:\n  a: 1\0\n", "c:2: holds a NUL character, so it is not a text file. Remove it."),
    ("escaped NUL", 'models:\n  a: {cmd: "x ${PORT} \\0"}\n', "c:2: models.a.cmd: holds a NUL character, which no program can be given. Remove it."),
    ("anchor in itself", f"models:\n  a: {{{OK}, metadata: &x {{y: *x}}}}\n", "c:2: models.a.metadata.y: is an anchor that contains itself. Write the value out."),
    ("a key that is a list", f"models:\n  a: {{{OK}}}\n  ? [x]\n  : 1\n", "c:3: models: has a key that is a list or a mapping. Keys are plain words."),
    ("duplicate model id", f"models:\n  a: {{{OK}}}\n  b: {{{OK}}}\n  a: {{{OK}}}\n", 'c:4: models.a: the key "a" is written twice, on lines 2 and 4. Keep one.'),
    ("duplicate key", f"models:\n  a:\n    {OK}\n    ttl: 1\n    ttl: 2\n", 'c:5: models.a.ttl: the key "ttl" is written twice, on lines 4 and 5. Keep one.'),
    ("empty id", f"models:\n  '': {{{OK}}}\n", 'c:2: models."": a name is empty. Give it at least one letter.'),
    ("id with a line end", f'models:\n  "a\\nb": {{{OK}}}\n', 'c:2: models."a b": the name "a b" holds a character that cannot be printed. Remove it.'),
    ("id too long", f"models:\n  {'x' * 257}: {{{OK}}}\n", f"c:2: models.{'x' * 257}: the name \"{'x' * 59}…\" has 257 characters; at most 256 are taken."),
    ("model is text", "models:\n  a: x\n", 'c:2: models.a: is the text "x", not a mapping. Write `cmd: ...` under it.'),
    ("no cmd", "models:\n  a: {ttl: 1}\n", "c:2: models.a: has no cmd. Add the engine's command, such as cmd: llama-server --model /models/x.gguf --port ${PORT}"),
    ("empty cmd", "models:\n  a: {cmd: '  # x'}\n", "c:2: models.a.cmd: is an empty command. Write the program and its arguments, such as llama-server --port ${PORT}."),
    ("cmd is a mapping", "models:\n  a: {cmd: {x: 1}}\n", "c:2: models.a.cmd: is a mapping. Write the command as text, or as a list of its arguments."),
    ("cmd holds a list", "models:\n  a: {cmd: [x, [y], '${PORT}']}\n", "c:2: models.a.cmd: item 2 is a list. Write text."),
    (
        "unbalanced quote",
        "models:\n  a:\n    cmd: >\n      x ${PORT}\n      # it's a comment\n      --y 'z\n",
        "c:6: models.a.cmd: the quote ' after --y is never closed. Close it, or put a backslash before it to mean the character.",
    ),
    ("unknown key of a model", f"models:\n  a:\n    {OK}\n    memroy: 1GiB\n", 'c:4: models.a.memroy: "memroy" is not a key greenroom knows here. Did you mean "memory"?'),
    ("habit of another program", f"models:\n  a: {{{OK}, vram: 1GiB}}\n", 'c:2: models.a.vram: "vram" is not a key greenroom knows here. Did you mean "memory"?'),
    ("snake case", f"health_check_timeout: 5\nmodels: {{a: {{{OK}}}}}\n", 'c:1: health_check_timeout: "health_check_timeout" is not a key greenroom knows here. Did you mean "healthCheckTimeout"?'),
    ("a model's key at the top", f"sleep_after: 5\nmodels: {{a: {{{OK}}}}}\n", 'c:1: sleep_after: "sleep_after" is not a key greenroom knows here. It belongs under a model.'),
    ("a top key in a model", f"models:\n  a: {{{OK}, apiKeys: [x]}}\n", 'c:2: models.a.apiKeys: "apiKeys" is not a key greenroom knows here. It belongs at the top level.'),
    ("unknown key of a group", f"groups:\n  g: {{members: [a], swop: true}}\nmodels: {{a: {{{OK}}}}}\n", 'c:2: groups.g.swop: "swop" is not a key greenroom knows here. Did you mean "swap"?'),
    ("unknown key of a device", f"devices: {{gpu0: {{memry: 1GiB}}}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: devices.gpu0.memry: "memry" is not a key greenroom knows here. Did you mean "memory"?'),
    ("unknown hook", f"hooks: {{on_start: {{}}}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: hooks.on_start: "on_start" is not a key greenroom knows here. Did you mean "on_startup"?'),
    ("unknown scheduling constant", f"scheduling: {{patience: 5}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: scheduling: "patience" is no scheduling constant. Did you mean "patience_s"?'),
    ("bad scheduling constant", f"scheduling: {{lanes: 1.5}}\nmodels: {{a: {{{OK}}}}}\n", "c:1: scheduling: lanes: 1.5 is not a whole number."),
    ("bad scheduling duration", f"scheduling: {{patience_s: off}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: scheduling: patience_s: "off" is not a duration. Write 300, "300s" or "5m".'),
    ("bad scheduling duration that can be off", f"scheduling: {{early_sleep_s: never}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: scheduling: early_sleep_s: "never" is not a duration. Write 300, "300s" or "5m". Write off to do without.'),
    ("bad scheduling size", f"scheduling: {{ram_floor_mib: 2G}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: scheduling: ram_floor_mib: "2G" has no full unit. Write 2GiB (or 2GB for the decimal one).'),
    ("bad limit", f"limits: {{idle_s_max: soon}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: limits: idle_s_max: "soon" is not a duration. Write 300, "300s" or "5m".'),
    ("unknown key of tracing", f"tracing: {{endpont: x}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: tracing.endpont: "endpont" is not a key greenroom knows here. Did you mean "endpoint"?'),
    ("a ledger of minutes", f"ledger: {{keep: 5m}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: ledger.keep: "5m" is too short: advice looks back an hour. Write at least 1h, such as 30d.'),
    ("a ledger of kilobytes", f"ledger: {{max_size: 64KiB}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: ledger.max_size: "64KiB" is too little for a ledger. Write at least 16MiB, such as 1GiB.'),
    ("a ledger without a unit", f"ledger: {{max_size: 2}}\nmodels: {{a: {{{OK}}}}}\n", "c:1: ledger.max_size: 2 has no unit. Write 2GiB or 2MiB."),
    ("tracing to nowhere", f"tracing: {{endpoint: collector}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: tracing.endpoint: "collector" is not the address of a collector. Write http://127.0.0.1:4318.'),
    ("a password in tracing", f"tracing: {{endpoint: http://me:hush@h}}\nmodels: {{a: {{{OK}}}}}\n", "c:1: tracing.endpoint: the address of a collector holds no user or password. Write http://127.0.0.1:4318."),
    ("more than all traces", f"tracing: {{sample: 50}}\nmodels: {{a: {{{OK}}}}}\n", "c:1: tracing.sample: 50 is not a number from 0 to 1. Write 1 for all, or 0.1 for one in ten."),
    ("wrong duration", f"models:\n  qwen3:\n    {OK}\n    ttl: 5mins\n", 'c:4: models.qwen3.ttl: "5mins" is not a duration. Write 300, "300s" or "5m".'),
    ("sleep_after auto", f"models: {{a: {{{OK}, sleep_after: auto}}}}\n", 'c:1: models.a.sleep_after: "auto" is not supported yet. Write a duration such as 5m, or 0 for never.'),
    ("ttl -2", f"models: {{a: {{{OK}, ttl: -2}}}}\n", 'c:1: models.a.ttl: -2 is negative, and a duration cannot be. Write 300, "300s" or "5m".'),
    ("start timeout 0", f"models: {{a: {{{OK}, start_timeout: 0}}}}\n", "c:1: models.a.start_timeout: 0 is no time at all. Write at least 1, such as 120 or 2m."),
    ("size without unit", f"models: {{a: {{{OK}, memory: 80}}}}\n", "c:1: models.a.memory: 80 has no unit. Write 80GiB or 80MiB."),
    ("share", f"devices: {{gpu0: {{memory: 75%}}}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: devices.gpu0.memory: "75%" is a share, and a budget needs a size. Write the size itself, such as 60GiB.'),
    ("memory 0", f"models: {{a: {{{OK}, memory: 0GiB}}}}\n", 'c:1: models.a.memory: "0GiB" is no memory at all. Leave it out to have it measured, or write a size such as 6GiB.'),
    ("headroom too large", f"devices: {{gpu0: {{memory: 1GiB, headroom: 2GiB}}}}\nmodels: {{a: {{{OK}}}}}\n", "c:1: devices.gpu0.headroom: 2048 MiB of headroom leave nothing of 1024 MiB. Make it smaller."),
    ("device that cannot be found", f"devices: {{big: {{memory: 1GiB}}}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: devices.big: "big" is no GPU that can be found. Name it gpu0 or ram, add its uuid, or write probe: none and memory.'),
    ("unmeasured device without size", f"devices: {{big: {{probe: none}}}}\nmodels: {{a: {{{OK}}}}}\n", "c:1: devices.big: is not measured (probe: none), so its size must be told. Add memory: 24GiB or the like."),
    ("unknown device", f"devices: {{bench0: {{probe: none, memory: 1GiB}}}}\nmodels: {{a: {{{OK}, device: bench1}}}}\n", 'c:2: models.a.device: "bench1" is not a device. Did you mean "bench0"? Declare it under devices.'),
    ("too few devices", f"models: {{a: {{{OK}, device: [gpu0], devices_count: 2}}}}\n", "c:1: models.a.devices_count: 2 devices are wanted, but device names 1. Name more devices, or write device: any."),
    ("not a number", f"models: {{a: {{{OK}, parallel: many}}}}\n", 'c:1: models.a.parallel: "many" is not a whole number.'),
    ("number out of range", f"startPort: 70000\nmodels: {{a: {{{OK}}}}}\n", "c:1: startPort: 70000 is outside 1 to 65535."),
    ("not a truth value", f"models: {{a: {{{OK}, pin: maybe}}}}\n", 'c:1: models.a.pin: "maybe" is neither true nor false. Write true or false.'),
    ("unknown choice", f"models: {{a: {{{OK}, priority: interactiv}}}}\n", 'c:1: models.a.priority: "interactiv" is not one of the choices. Did you mean "interactive"? Write interactive or batch.'),
    ("aliases is text", f"models: {{a: {{{OK}, aliases: b}}}}\n", 'c:1: models.a.aliases: is the text "b", not a list. Write [one, two], or one `- item` a line.'),
    ("alias is an id", f"models:\n  a:\n    {OK}\n    aliases:\n      - x\n      - b\n  b: {{{OK}}}\n", 'c:6: models.a.aliases[1]: "b" is the id of another model. Choose another name.'),
    ("duplicate alias", f"models:\n  a: {{{OK}, aliases: [x]}}\n  b: {{{OK}, aliases: [x]}}\n", 'c:3: models.b.aliases[0]: "x" is already a name of model "a". Choose another name.'),
    ("env without =", f"models: {{a: {{{OK}, env: [A=1, B]}}}}\n", "c:1: models.a.env: item 2 has no `=`. Write NAME=value."),
    ("env name with a space", f"models: {{a: {{{OK}, env: {{A B: 1}}}}}}\n", 'c:1: models.a.env: "A B" is not the name of an environment variable. Use letters, digits and _.'),
    ("env is text", f"models: {{a: {{{OK}, env: A=1}}}}\n", "c:1: models.a.env: is text. Write one `- NAME=value` a line, or a mapping of NAME: value."),
    ("https engine", f"models: {{a: {{{OK}, proxy: 'https://x:1'}}}}\n", 'c:1: models.a.proxy: "https://x:1": engines are reached over plain http only. Write http://127.0.0.1:${PORT}.'),
    ("not an address", f"models: {{a: {{{OK}, proxy: 'localhost:1'}}}}\n", 'c:1: models.a.proxy: "localhost:1" is not the address of an engine. Write http://127.0.0.1:${PORT} or http://host:8000/path.'),
    ("no port for the engine", "models: {a: {cmd: x}}\n", "c:1: models.a.cmd: has no ${PORT}, so the engine cannot be told where to listen. Add --port ${PORT}, or set proxy to its own address."),
    ("port in proxy only", "models: {a: {cmd: x, proxy: 'http://h:${PORT}'}}\n", "c:1: models.a.proxy: uses ${PORT}, but cmd does not. Add --port ${PORT} to cmd, or write the engine's own port here."),
    (
        "port clash",
        "models:\n  a: {cmd: x, proxy: 'http://localhost:9000'}\n  b: {cmd: x, proxy: 'http://127.0.0.1:9000/v'}\n",
        'c:3: models.b.proxy: port clash: 9000 on 127.0.0.1 is also the port of model "a". Use ${PORT}, or another port.',
    ),
    ("check endpoint is an address", f"models: {{a: {{{OK}, checkEndpoint: 'http://x/h'}}}}\n", 'c:1: models.a.checkEndpoint: "http://x/h" is a whole address. Write the path alone, such as /health, or none.'),
    ("group of an unknown model", f"groups:\n  g:\n    members:\n    - a\n    - qwen4\nmodels: {{a: {{{OK}}}, qwen3: {{{OK}}}}}\n", 'c:5: groups.g.members[1]: "qwen4" is not a model. Did you mean "qwen3"?'),
    ("model in two groups", f"groups:\n  g: {{members: [a]}}\n  h: {{members: [a]}}\nmodels: {{a: {{{OK}}}}}\n", 'c:3: groups.h.members[0]: "a" is already in group "g". A model can be in one group only.'),
    ("model twice in a group", f"groups: {{g: {{members: [a, b]}}}}\nmodels: {{a: {{{OK}, aliases: [b]}}}}\n", 'c:1: groups.g.members[1]: "b" is already in this group. A model can be in one group only.'),
    ("group without members", f"groups:\n  g:\nmodels: {{a: {{{OK}}}}}\n", "c:2: groups.g.members: is missing. Add it."),
    ("groups is a list", f"groups: [a]\nmodels: {{a: {{{OK}}}}}\n", "c:1: groups: is a list, not a mapping. Write `key: value` lines under it."),
    ("preload of an unknown model", f"hooks: {{on_startup: {{preload: [qwen4]}}}}\nmodels: {{qwen3: {{{OK}}}}}\n", 'c:1: hooks.on_startup.preload[0]: "qwen4" is not a model. Did you mean "qwen3"?'),
    ("unknown default model", f"default_model: b\nmodels: {{a: {{{OK}}}}}\n", 'c:1: default_model: "b" is not a model. Known here: a.'),
    ("bad pattern", f"upstream: {{ignorePaths: ['(x']}}\nmodels: {{a: {{{OK}}}}}\n", 'c:1: upstream.ignorePaths: "(x" is not a regular expression: missing ), unterminated subpattern. Write one such as \\.css$.'),
    ("warm-up without path", f"models: {{a: {{{OK}, warmup: {{body: {{}}}}}}}}\n", "c:1: models.a.warmup.path: is missing. Add it."),
    ("unknown sleep level", f"models:\n  a:\n    {OK}\n    sleep: 3\n", "c:4: models.a.sleep: 3 is not one of the choices. Write off, 1, 2 or auto."),
    ("sleep is a path", f"models: {{a: {{{OK}, sleep: /sleep, wake: {{path: /w}}}}}}\n", 'c:1: models.a.sleep: "/sleep" is not one of the choices. Did you mean {path: /sleep}?'),
    ("sleep is a list", f"models: {{a: {{{OK}, sleep: [{{path: /s}}], wake: {{path: /w}}}}}}\n", "c:1: models.a.sleep: is a list. Write off, 1, 2 or auto, or {path: /sleep}; several calls go under calls in such a mapping."),
    ("sleep without path", f"models:\n  a:\n    {OK}\n    wake: {{path: /w}}\n    sleep: {{level: 2}}\n", "c:5: models.a.sleep: has no path. Add the route that puts the engine to sleep, such as path: /sleep, or several under calls."),
    ("sleep without wake", f"models:\n  a:\n    {OK}\n    sleep: {{path: /s}}\n", "c:4: models.a.sleep: has no wake beside it, so the engine could never be woken. Add wake: {path: /wake_up} or the like."),
    ("wake without sleep", f"models:\n  a:\n    {OK}\n    wake: {{path: /w}}\n", "c:4: models.a.wake: means something only beside sleep routes. Write sleep: {path: /sleep} or the like too, or remove it."),
    ("wake beside a level", f"models:\n  a:\n    {OK}\n    sleep: 1\n    wake: {{path: /w}}\n", "c:5: models.a.wake: means something only beside sleep routes. Write sleep: {path: /sleep} or the like too, or remove it."),
    ("wake is a path", f"models: {{a: {{{OK}, sleep: {{path: /s}}, wake: /w}}}}\n", 'c:1: models.a.wake: is the text "/w", not a mapping. Write {path: /w}.'),
    ("wake is a number", f"models: {{a: {{{OK}, sleep: {{path: /s}}, wake: 1}}}}\n", "c:1: models.a.wake: is 1, not a mapping. Write {path: /wake_up}, or a list of such."),
    ("wake is an empty list", f"models: {{a: {{{OK}, sleep: {{path: /s}}, wake: []}}}}\n", "c:1: models.a.wake: is an empty list. Write one `- path: /...` a call."),
    ("wake without path", f"models: {{a: {{{OK}, sleep: {{path: /s}}, wake: {{method: GET}}}}}}\n", "c:1: models.a.wake.path: is missing. Add it."),
    ("path without slash", f"models:\n  a:\n    {OK}\n    sleep:\n      path: sleep\n    wake: {{path: /w}}\n", 'c:5: models.a.sleep.path: "sleep" does not start with a slash. Did you mean "/sleep"?'),
    ("path is an address", f"models: {{a: {{{OK}, sleep: {{path: 'http://x/s'}}, wake: {{path: /w}}}}}}\n", "c:1: models.a.sleep.path: \"http://x/s\" is a whole address. Write the path alone, such as /sleep; the engine's address is in proxy."),
    ("path with a space", f"models: {{a: {{{OK}, sleep: {{path: '/s x'}}, wake: {{path: /w}}}}}}\n", 'c:1: models.a.sleep.path: "/s x" is not a path. Write one such as /sleep, or /sleep?level=1.'),
    ("unknown method", f"models:\n  a:\n    {OK}\n    sleep: {{path: /s}}\n    wake:\n    - path: /w\n    - path: /x\n      method: Pots\n", 'c:8: models.a.wake[1].method: "Pots" is not one of the choices. Did you mean "POST"? Write POST, GET, PUT, PATCH or DELETE.'),
    ("level of a sleep mapping", f"models: {{a: {{{OK}, sleep: {{path: /s, level: auto}}, wake: {{path: /w}}}}}}\n", 'c:1: models.a.sleep.level: "auto" is not a sleep level. Write 1 (weights wait in host RAM) or 2 (weights are dropped).'),
    ("GET with a body", f"models:\n  a:\n    {OK}\n    sleep: {{path: /s}}\n    wake:\n      path: /w\n      method: get\n      body: {{}}\n", "c:8: models.a.wake.body: a GET has no body. Write method: POST, or remove the body."),
    ("GET with a body among calls", f"models: {{a: {{{OK}, sleep: {{calls: [{{path: /s}}, {{path: /t, method: GET, body: {{x: 1}}}}]}}, wake: {{path: /w}}}}}}\n", "c:1: models.a.sleep.calls[1].body: a GET has no body. Write method: POST, or remove the body."),
    ("path and calls", f"models:\n  a:\n    {OK}\n    wake: {{path: /w}}\n    sleep:\n      calls: [{{path: /s}}]\n      path: /t\n", "c:7: models.a.sleep.path: is written beside calls. Move it into one of the calls, or remove calls."),
    ("calls is a mapping", f"models: {{a: {{{OK}, sleep: {{calls: {{path: /s}}}}, wake: {{path: /w}}}}}}\n", "c:1: models.a.sleep.calls: is a mapping, not a list. Write one `- path: /...` a call."),
    ("a call is text", f"models: {{a: {{{OK}, sleep: {{calls: [/s]}}, wake: {{path: /w}}}}}}\n", 'c:1: models.a.sleep.calls[0]: is the text "/s", not a mapping. Write `key: value` lines under it.'),
    ("unknown key of sleep", f"models:\n  a:\n    {OK}\n    wake: {{path: /w}}\n    sleep:\n      path: /s\n      residu: 1GiB\n", 'c:7: models.a.sleep.residu: "residu" is not a key greenroom knows here. Did you mean "residue"?'),
    ("unknown key of a call", f"models:\n  a:\n    {OK}\n    sleep: {{path: /s}}\n    wake:\n      - path: /w\n        payload: {{}}\n", 'c:7: models.a.wake[0].payload: "payload" is not a key greenroom knows here. Did you mean "body"?'),
    ("asleep without path", f"models: {{a: {{{OK}, sleep: {{path: /s, asleep: {{field: x}}}}, wake: {{path: /w}}}}}}\n", "c:1: models.a.sleep.asleep.path: is missing. Add it."),
    ("asleep is text", f"models: {{a: {{{OK}, sleep: {{path: /s, asleep: /x}}, wake: {{path: /w}}}}}}\n", 'c:1: models.a.sleep.asleep: is the text "/x", not a mapping. Write `key: value` lines under it.'),
    ("no field", f"models: {{a: {{{OK}, sleep: {{path: /s, asleep: {{path: /x, field: a..b}}}}, wake: {{path: /w}}}}}}\n", 'c:1: models.a.sleep.asleep.field: "a..b" names no field of a JSON answer. Write one such as is_sleeping; dots go deeper.'),
    ("residue without unit", f"models: {{a: {{{OK}, sleep: {{path: /s, residue: 800}}, wake: {{path: /w}}}}}}\n", "c:1: models.a.sleep.residue: 800 has no unit. Write 800GiB or 800MiB."),
    ("sleep timeout 0", f"models: {{a: {{{OK}, sleep_timeout: 0}}}}\n", "c:1: models.a.sleep_timeout: 0 is no time at all. Write at least 1, such as 120 or 2m."),
    ("unknown canary", f"models: {{a: {{{OK}, canary: alway}}}}\n", 'c:1: models.a.canary: "alway" is not one of the choices. Did you mean "always"? Write auto, always or off.'),
    ("habit of another engine", f"models: {{a: {{{OK}, sleep_level: 1}}}}\n", 'c:1: models.a.sleep_level: "sleep_level" is not a key greenroom knows here. Did you mean "sleep"?'),
    ("container without image", f"models: {{a: {{{OK}, container: {{}}}}}}\n", "c:1: models.a.container.image: is missing. Add it."),
    ("both spellings", f"models: {{a: {{{OK}, start_timeout: 5, healthCheckTimeout: 6}}}}\n", "c:1: models.a.start_timeout: says the same as healthCheckTimeout. Keep one of them."),
]
# fmt: on


@pytest.mark.parametrize(("text", "line"), [pytest.param(text, line, id=name) for name, text, line in TABLE])
def test_a_broken_file_is_told_in_one_line(text: str, line: str) -> None:
    """File, line, place, what is wrong and what to do."""
    assert problems(text) == [line]


def test_all_problems_of_a_file_are_told_at_once_by_line() -> None:
    """One mistake does not hide another, not even in the same section."""
    found = problems(
        """healtCheckTimeout: 30
matrix: {vars: {a: b}}
models:
  a:
    cmd: |
      fe ${PORT}
      "open
    ttl: 5mins
    memory: 80
    nope: 1
    filters: {setPrams: {}, stripParams: {}}
  b: {}
groups:
  g: {members: [c], swap: maybe}
"""
    )
    assert [line.split(": ")[:2] for line in found] == [
        ["c:1", "healtCheckTimeout"],
        ["c:2", "matrix"],
        ["c:7", "models.a.cmd"],
        ["c:8", "models.a.ttl"],
        ["c:9", "models.a.memory"],
        ["c:10", "models.a.nope"],
        ["c:11", "models.a.filters.setPrams"],
        ["c:11", "models.a.filters.stripParams"],
        ["c:12", "models.b"],
        ["c:14", "groups.g.members[0]"],
        ["c:14", "groups.g.swap"],
    ]


def test_a_problem_knows_its_place() -> None:
    """Line and column count from 1, for editors."""
    with pytest.raises(ConfigError) as caught:
        load_config_text("models:\n  m:\n    cmd: x ${PORT}\n    ttl: soon\n", env={})
    message = '"soon" is not a duration. Write 300, "300s" or "5m".'
    assert caught.value.problems == (Problem("greenroom.yaml", 4, 5, "models.m.ttl", message),)


@pytest.mark.parametrize("raw", [b"models:\n  a: \xff\n", "models:\n".encode("utf-16")])
def test_a_file_that_is_not_utf_8_is_told_with_its_line(tmp_path: Path, raw: bytes) -> None:
    """The byte that is wrong is shown."""
    path = tmp_path / "c.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert re.fullmatch(rf"{re.escape(str(path))}:[12]: is not UTF-8 text \(byte 0xff\)\. Save it as UTF-8\.", str(caught.value))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Missing, a directory, a name that cannot be one, a file inside a file."""
    (tmp_path / "file").write_text("x")
    said = []
    for name in (tmp_path / "none", tmp_path, "a\0b", tmp_path / "file" / "c"):
        with pytest.raises(ConfigError) as caught:
            load_config(name)
        said.append(str(caught.value))
    assert said == [
        f"{tmp_path}/none:1: does not exist. Name a file such as greenroom.yaml.",
        f"{tmp_path}:1: is a directory. Name the file in it, such as greenroom.yaml.",
        "a\\x00b:1: cannot be read: the name is not one of a file. Check the path and its permissions.",
        f"{tmp_path}/file/c:1: cannot be read: not a directory. Check the path and its permissions.",
    ]


def test_a_file_without_read_permission_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read anything, so the refusal is played."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(load.FilePath, "open", refuse)
    with pytest.raises(ConfigError) as caught:
        load_config("c")
    assert str(caught.value) == "c:1: cannot be read: permission denied. Check the path and its permissions."


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    """More than the limit is not parsed."""
    path = tmp_path / "c.yaml"
    path.write_bytes(b"#" * (load.CONFIG_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="is larger than 1,048,576 bytes"):
        load_config(path)


def test_anchors_that_multiply_are_refused_quickly() -> None:
    """Nine levels of nine would be 387 million values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    assert "has more than 100,000 values once its anchors are filled in. Make it smaller." in problems("\n".join(lines))[0]


@pytest.mark.parametrize(
    "text", ["models: " + "[" * 60 + "]" * 60, "".join(f"{' ' * depth}a:\n" for depth in range(1000))], ids=["60", "1000"]
)
def test_deep_nesting_is_refused(text: str) -> None:
    """No recursion error reaches people."""
    found = problems(text)
    assert [line for line in found if line.endswith("is nested too deeply; at most 50 levels are read.")] != []


def test_only_so_many_problems_are_told() -> None:
    """The last line says how many follow."""
    found = problems("models:\n" + "".join(f"  m{i}: {{}}\n" for i in range(PROBLEMS_MAX + 50)))
    assert len(found) == PROBLEMS_MAX
    assert found[-1].endswith("51 more problems follow.")


def test_problems_never_show_secrets() -> None:
    """Keys of clients, of engines, from the environment and from macros."""
    secrets = ["client key-11111", "engine-22222", "from-env-33333", "macro-44444"]
    text = """
apiKeys: ["client key-11111", "${env.API_KEY}"]
macros: {token: macro-44444}
logLevel: macro-44444
logToStdout: from-env-33333
models:
  a:
    cmd: x ${PORT}
    env: ["HF_TOKEN=engine-22222", "OTHER_KEY=${token}"]
    proxy: ftp://user:engine-22222@x
    priority: engine-22222
    ttl: ${env.API_KEY}
    memory: ${token}
    cmdStop: "stop --key 'engine-22222"
  b: {cmd: 'x ${PORT}', env: {SOME_SECRET: engine-22222, PLAIN: [1]}, engine: "${token}"}
"""
    found = problems(text, {"API_KEY": "from-env-33333"})
    assert len(found) == 10
    assert not [line for line in found if any(secret in line for secret in secrets)]
    assert sum("***" in line for line in found) == 6


def test_problems_show_no_password_of_a_url_and_no_header() -> None:
    """Of variables, commands, macros, the arguments of a container and the environment."""
    text = """
macros: {web: "http://u:macro-11111@p"}
logLevel: macro-11111
logToStdout: "${env.PROXY}"
models:
  a:
    cmd: "x ${PORT} --header 'Authorization: Bearer cmd-22222'"
    env: ["HTTPS_PROXY=http://u:env-33333@p:${PORT}"]
    container: {image: i, args: "-e A=redis://:box-44444@h"}
    ttl: cmd-22222
    memory: env-33333
    priority: box-44444
"""
    found = problems(text, {"PROXY": "http://u:from-55555@p"})
    assert len(found) == 5
    assert [line for line in found if "***" not in line or any(f"{digit * 5}" in line for digit in "12345")] == []


_SECTIONS = {
    "{key}: {value}\nmodels: {{a: {{cmd: 'x ${{PORT}}'}}}}": ConfigFile,
    "models: {{a: {{cmd: 'x ${{PORT}}', {key}: {value}}}}}": ModelSection,
    "models: {{a: {{cmd: 'x ${{PORT}}', filters: {{{key}: {value}}}}}}}": FiltersSection,
    "models: {{a: {{cmd: 'x ${{PORT}}', container: {{image: i, {key}: {value}}}}}}}": ContainerSection,
    "models: {{a: {{cmd: 'x ${{PORT}}', sleep: {{{key}: {value}}}, wake: {{path: /w}}}}}}": SleepSection,
    "models: {{a: {{cmd: 'x ${{PORT}}', sleep: {{path: /s}}, wake: {{{key}: {value}}}}}}}": CallSection,
    "models: {{a: {{cmd: 'x ${{PORT}}', sleep: {{path: /s, asleep: {{{key}: {value}}}}}, wake: [{{path: /w}}]}}}}": AsleepSection,
    "groups: {{g: {{members: [a], {key}: {value}}}}}\nmodels: {{a: {{cmd: 'x ${{PORT}}'}}}}": GroupSection,
    "apiKeys: [{{key: k1, {key}: {value}}}]\nmodels: {{a: {{cmd: 'x ${{PORT}}'}}}}": KeySection,
    "devices: {{gpu0: {{{key}: {value}}}}}\nmodels: {{a: {{cmd: 'x ${{PORT}}'}}}}": DeviceSection,
}


@pytest.mark.parametrize(
    "value", ["1", "-1", "1.5", ".nan", "x", "''", "true", "~", "[]", "[1]", "[~]", "[[x]]", "{}", "{a: 1}", "{a: ~}", "{a: {b: []}}"]
)
def test_any_kind_of_value_under_any_key_is_taken_or_told_in_our_own_words(value: str) -> None:
    """No wording of a library, whatever stands where."""
    said = []
    for template, section in _SECTIONS.items():
        for key in section.model_fields:
            try:
                load_config_text(
                    template.format(key=key, value=value).replace("cmd: 'x ${PORT}', cmd:", "cmd:").replace("key: k1, key:", "key:"),
                    "c",
                    env={},
                )
            except ConfigError as exc:
                said += str(exc).splitlines()
    assert [line for line in said if "is not accepted here" in line or "Input should" in line or "Value error" in line] == []


_LINES = st.lists(
    st.sampled_from(
        ["models:", "  a:", "  b:", f"    {OK}", "    cmd: |", "      x 'y", "    ttl: 5m", "    ttl: x", "    env: [A=1]", "    - x", "groups:", "  g: {members: [a]}",
        "macros: {a: '${b}', b: 1}", "    name: ${a}", "\t", "  ? [", "apiKeys: [k]", "}", "    <<: *x", "    &x y: 1", "hooks: 5", "    filters: 3", "x: !!binary y"]
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.one_of(_LINES.map("\n".join), st.text(max_size=80)))
def test_any_text_is_loaded_or_refused_in_lines(text: str) -> None:
    """Nothing but a ConfigError, strict or lenient, whatever the file holds."""
    for strict in (True, False):
        try:
            load_config_text(text, "c", env={}, strict=strict)
            said = []
        except ConfigError as exc:
            said = str(exc).splitlines()
        assert [line for line in said if not re.match(r"c:\d+: .", line)] == []


def test_secrets_among_arguments_are_never_shown_either() -> None:
    """As a flag's value in a text, in a list, in a shell's script, behind a variable, and through a macro."""
    text = """
macros: {k: through-macro-1}
models:
  a: {cmd: 'fe ${PORT} --api-key ${k}', ttl: '${k}'}
  b: {cmd: 'fe ${PORT} --hf-token=in-text-22', ttl: in-text-22}
  c: {cmd: [fe, '${PORT}', --token, in-list-333], ttl: in-list-333}
  d: {cmd: ["sh", "-c", "HF_TOKEN=in-script-4444 fe ${PORT}"], ttl: in-script-4444}
  e: {cmd: 'docker run -e HF_TOKEN=in-docker-55 x ${PORT}', ttl: in-docker-55}
  f: {cmd: 'fe ${PORT}', cmdStop: 'end --password in-stop-66', ttl: in-stop-66}
"""
    found = problems(text)
    assert len(found) == 6
    assert all('"***" is not a duration' in line for line in found)


def test_merges_of_merges_are_not_walked_for_ever() -> None:
    """A dozen short lines of anchors that hold nothing would take years."""
    lines = ["x: &a0 {}", *(f"y{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 100)}]}}" for i in range(1, 12))]
    assert any("once its anchors are filled in" in line for line in problems("\n".join(lines)))
