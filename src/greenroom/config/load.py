"""Reading greenroom.yaml: text → macros → values → schema → checks → `model.Config`, with every problem at once."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import ValidationError

from . import checks, commands, document, foreign, lower, macros, peers, secrets
from .errors import ConfigError, Path, Problem, Report, did_you_mean, kind, looks_secret, nearest, one_line, quoted
from .explain import report_errors
from .macros import MacroError, Scope
from .model import Config, ModelConfig
from .schema import ConfigFile, KeySection, ModelSection, Section, name_error, secret_values

CONFIG_BYTES_MAX = 1 << 20
MODELS_MAX = 10_000
MINIMAL = 'models: {tiny: {cmd: "llama-server --model /models/tiny.gguf --port ${PORT}"}}'
_KEEP_PORT = frozenset({"PORT"})
_KEEP_PORT_PID = frozenset({"PORT", "PID"})
_KEEP: Mapping[str, frozenset[str]] = {
    "cmd": _KEEP_PORT,
    "cmdStop": _KEEP_PORT_PID,
    "proxy": _KEEP_PORT,
    "env": _KEEP_PORT,
    "container": _KEEP_PORT,
}
_KEEP_STORED = frozenset({"MODEL_PATH", "MODEL_DIR"})  # beside `model`: known once the model is in the store
_ROUNDS_MAX = 8  # each round takes out at least the innermost of what is wrong
_COMMANDS = ("cmd", "cmdStop")
_ONE_MACRO = re.compile(r"\$\{[^{}]*\}")  # a macro's name is no secret
_S = TypeVar("_S", bound=Section)


def load_config(
    path: str | os.PathLike[str],
    *,
    env: Mapping[str, str] | None = None,
    strict: bool = True,
    limit_names: Collection[str] = (),
) -> Config:
    """Read one file.  ConfigError holds every problem found, by line.

    With strict=False a model with problems is kept, marked `misconfigured` with the first of them; what is
    wrong outside models is an error all the same.  `limit_names` are the names `limits` may hold; without
    them any is taken.
    """
    name = os.fspath(path)
    return load_config_text(read(name), name, env=env, strict=strict, limit_names=limit_names)


def load_config_text(
    text: str,
    name: str = "greenroom.yaml",
    *,
    env: Mapping[str, str] | None = None,
    strict: bool = True,
    limit_names: Collection[str] = (),
) -> Config:
    """The same for a text that is already read; `name` is the file name in messages."""
    return _Loader(Report(name), os.environ if env is None else env, strict, frozenset(limit_names)).load(text)


def check(path: str | os.PathLike[str], *, env: Mapping[str, str] | None = None) -> list[str]:
    """Warnings of a file that can be used, each `file:line: sentence`; ConfigError for one that cannot."""
    return list(load_config(path, env=env).warnings)


def read(name: str) -> str:
    """The text of a configuration file; ConfigError when it cannot be had."""
    try:
        with FilePath(name).open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError:
        raise _failed(name, "does not exist. Name a file such as greenroom.yaml.") from None
    except IsADirectoryError:
        raise _failed(name, "is a directory. Name the file in it, such as greenroom.yaml.") from None
    except (OSError, ValueError) as exc:
        why = (exc.strerror if isinstance(exc, OSError) else None) or "the name is not one of a file"
        raise _failed(name, f"cannot be read: {why.lower()}. Check the path and its permissions.") from None
    if len(raw) > CONFIG_BYTES_MAX:
        raise _failed(name, f"is larger than {CONFIG_BYTES_MAX:,} bytes, the most a configuration may have.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise _failed(name, f"is not UTF-8 text (byte 0x{raw[exc.start]:02x}). Save it as UTF-8.", line) from None


def _failed(name: str, message: str, line: int = 1) -> ConfigError:
    return ConfigError([Problem(one_line(name), line, 1, "", message)])


@dataclass(slots=True)
class _Loader:
    """One reading of one file."""

    report: Report
    env: Mapping[str, str]
    strict: bool
    limit_names: frozenset[str] = frozenset()
    globals: dict[str, macros.Scalar] = field(default_factory=dict)

    def load(self, text: str) -> Config:
        raw = self._document(text.removeprefix("\ufeff"))
        self._learn_secrets(raw)
        top_raw = foreign.sort_out({key: value for key, value in raw.items() if key != "models"}, (), self.report)
        self.globals = macros.declared(top_raw.pop("macros", None), ("macros",), self.report)
        for name, chain in Scope(self.globals).cycles():
            self.report.add(("macros", name), f"the macros need each other: {chain}. Break the circle.")
        top_expanded = self._expanded(top_raw, (), Scope(self.globals, self.env))
        self._learn_secrets(top_expanded)  # keys that macros stood for
        top = self._validated(ConfigFile, top_expanded, ())
        raw_models = self._raw_models(raw)
        models = {model_id: self._model(model_id, item) for model_id, item in raw_models.items()}
        good = {model_id: model for model_id, model in models.items() if model is not None}
        names = self._check(top, good, raw_models)
        self._raise_if_bad()
        wrong = self.report.first_by_model()
        lowered = tuple(self._lowered(model_id, good.get(model_id), top, names, wrong.get(model_id)) for model_id in raw_models)
        far = tuple(lower.lower_peer(id, peer, self.report.spot(("peers", id))[0]) for id, peer in top.peers.items())
        return lower.lower(self.report.file, top, lowered, names, self._warnings(), far)

    def _document(self, text: str) -> dict[str, Any]:
        if "\0" in text:
            self.report.add((), "holds a NUL character, so it is not a text file. Remove it.", text.count("\n", 0, text.index("\0")) + 1)
            self._raise_if_bad()
        if len(text) > CONFIG_BYTES_MAX:
            self.report.add((), f"is larger than {CONFIG_BYTES_MAX:,} bytes, the most a configuration may have.", 1)
            self._raise_if_bad()
        raw = document.parse(macros.fill_env(text, self.env, self.report), self.report)
        if raw is None and not self.report.problems:
            self.report.add((), f"is empty. A minimal configuration is: {MINIMAL}", 1)
        elif not isinstance(raw, dict) and not self.report.problems:
            self.report.add((), f"is {kind(raw)}, not a mapping of keys. A minimal configuration is: {MINIMAL}", self.report.spot(())[0])
        if not isinstance(raw, dict):
            raise ConfigError(self.report.sorted_problems())
        return raw

    def _learn_secrets(self, raw: Mapping[str, Any]) -> None:
        """Before the first message about a value: what must never be shown."""
        keys = raw.get("apiKeys")
        for key in keys if isinstance(keys, list) else [keys]:
            self._hide_key(key)
        peers = raw.get("peers")
        for peer in peers.values() if isinstance(peers, Mapping) else ():
            self._hide_key(peer.get("apiKey") if isinstance(peer, Mapping) else None)
        models = raw.get("models")
        sections = [raw, *(models.values() if isinstance(models, Mapping) else ())]
        for section in sections:
            if not isinstance(section, Mapping):
                continue
            self._hide(section)
            declared = section.get("macros")
            for name, value in declared.items() if isinstance(declared, Mapping) else ():
                if isinstance(value, str) and (looks_secret(str(name)) or secrets.in_variable(str(name), value)):
                    self._hide_value(value)

    def _hide_key(self, item: Any) -> None:
        """One of `apiKeys`; in a mapping also what stands where a word of ours is expected and looks like none."""
        if isinstance(item, Mapping):
            known = KeySection.model_fields
            self._hide_key(item.get("key"))
            for name, value in item.items():
                if name not in known and nearest(str(name), known) is None:
                    self.report.hide(name)
                    self._hide_key(value)
        elif isinstance(item, (str, int, float)) and not isinstance(item, bool) and not _ONE_MACRO.fullmatch(str(item)):
            self.report.hide(item)

    def _hide(self, section: Mapping[str, Any]) -> None:
        """Variables and arguments of a model that are secrets."""
        found = [*secret_values(section.get("env"))]
        if secrets.is_told(reference := str(section.get("model"))):
            found.append(reference)
        container = section.get("container")
        in_container = container.get("args") if isinstance(container, Mapping) else None
        for command in (*(section.get(key) for key in _COMMANDS), in_container):
            if isinstance(command, list):
                found += secrets.in_arguments(word for word in command if isinstance(word, str))
            elif isinstance(command, str):
                found += secrets.in_script(command)
        for value in found:
            self._hide_value(value)

    def _hide_value(self, value: object) -> None:
        for part in secrets.parts(str(getattr(value, "text", value))):
            if "${" not in part:  # a macro's name is none
                self.report.hide(part)

    def _raw_models(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        models = raw.get("models")
        if models is not None and not isinstance(models, Mapping):
            self.report.add(("models",), f"is {kind(models)}, not a mapping. Write one `id:` a line under it, each with a cmd.")
        elif not models and isinstance(raw.get("peers"), Mapping) and raw["peers"]:
            return {}  # all that is served is served elsewhere
        elif not models:
            where: Path = ("models",) if "models" in raw else ()
            self.report.add(where, f"has no models, so there is nothing to serve. A minimal configuration is: {MINIMAL}")
        elif len(models) > MODELS_MAX:
            self.report.add(("models",), f"has {len(models):,} models; at most {MODELS_MAX:,} are taken.")
        else:
            return dict(models)
        return {}

    # ------------------------------------------------------------------------------------------------------- one model

    def _model(self, model_id: str, raw: Any) -> ModelSection | None:
        path: Path = ("models", model_id)
        raw = {} if raw is None else raw
        if not isinstance(raw, Mapping):
            self.report.add(path, f"is {kind(raw)}, not a mapping. Write `cmd: ...` under it.")
            return None
        section = foreign.rename(foreign.sort_out(raw, path, self.report), foreign.SYNONYMS, path, self.report)
        if isinstance(section.get("filters"), Mapping):
            filters = {key: value for key, value in section["filters"].items() if value is not None}
            section["filters"] = foreign.rename(filters, foreign.FILTER_SYNONYMS, (*path, "filters"), self.report)
            self._warn_about_model_parameter(section["filters"], (*path, "filters"))
        own = macros.declared(section.pop("macros", None), (*path, "macros"), self.report)
        scope = Scope({**self.globals, **own}, self.env, model_id)
        for name, chain in scope.cycles():
            if name in own:
                self.report.add((*path, "macros", name), f"the macros need each other: {chain}. Break the circle.")
        expanded = self._expanded(section, path, scope)
        self._hide(expanded)
        return self._validated(ModelSection, expanded, path)

    def _warn_about_model_parameter(self, filters: Mapping[str, Any], path: Path) -> None:
        stripped = filters.get("stripParams")
        names = stripped.split(",") if isinstance(stripped, str) else stripped if isinstance(stripped, list) else ()
        if "model" in [name.strip() for name in names if isinstance(name, str)]:
            self.report.warn((*path, "stripParams"), "`model` cannot be stripped; it is left alone.")
        by_id = filters.get("setParamsByID")
        for place, table in [(("setParams",), filters.get("setParams")), *_by_id(by_id)]:
            if isinstance(table, Mapping) and "model" in table:
                self.report.warn((*path, *place, "model"), "`model` cannot be set here; it is left alone. Use useModelName.")

    # ---------------------------------------------------------------------------------------------------------- macros

    def _expanded(self, section: Mapping[str, Any], path: Path, scope: Scope) -> dict[str, Any]:
        """The section with macros filled in; keys where that failed are reported and left out."""
        out: dict[str, Any] = {}
        stored = _KEEP_STORED if section.get("model") is not None else frozenset()
        for key, value in section.items():
            keep = _KEEP[key] | stored if path and key in _KEEP else frozenset()
            if path and key in _COMMANDS and isinstance(value, str):
                done = self._command(value, (*path, key), scope, keep)
            else:
                done = self._filled(value, (*path, key), scope, keep)
            if not self.report.has((*path, key)):
                out[key] = done
        return out

    def _filled(self, value: Any, path: Path, scope: Scope, keep: frozenset[str]) -> Any:
        if isinstance(value, list):
            return [self._filled(item, (*path, index), scope, keep) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            done = {key: self._filled(item, (*path, key), scope, keep) for key, item in value.items()}
            return self._keys_filled(done, path, scope) if path[-1] == "setParamsByID" else done
        try:
            return scope.expand(value, keep)
        except MacroError as exc:
            self.report.add(path, str(exc))
            return None

    def _keys_filled(self, table: dict[str, Any], path: Path, scope: Scope) -> dict[str, Any]:
        """Names clients may use can hold macros; two that come out the same are a problem."""
        out: dict[str, Any] = {}
        for key, item in table.items():
            try:
                name = str(scope.expand(key))
            except MacroError as exc:
                self.report.add((*path, key), str(exc))
                continue
            if name in out:
                self.report.add((*path, key), "stands for the same name as another key here. Keep one.")
            self.report.keys.setdefault((*path, name), self.report.spot((*path, key)))
            out[name] = item
        return out

    def _command(self, value: str, path: Path, scope: Scope, keep: frozenset[str]) -> str:
        """Comments go before macros are filled in, so that no macro in a comment can fail, or become a word."""
        text = value.lines if isinstance(value, document.Text) else value
        first_line = value.first_line if isinstance(value, document.Text) else 0
        try:
            return scope.expand_command(commands.without_comments(text), keep)
        except commands.CommandError as exc:
            line = first_line + exc.line_offset if first_line else None
            self.report.add(path, str(exc), line)
        except MacroError as exc:
            self.report.add(path, str(exc))
        return ""

    # ---------------------------------------------------------------------------------------------- schema and checks

    def _validated(self, schema: type[_S], section: Mapping[str, Any], path: Path) -> _S:
        """The section as far as it is good: keys with problems are reported and left at their defaults."""
        left = dict(section)
        for _ in range(_ROUNDS_MAX):
            try:
                return schema.model_validate(left)
            except ValidationError as exc:
                for place in report_errors(exc, path, schema, self.report):
                    left = _without(left, place)
        return schema.model_validate({})

    def _check(self, top: ConfigFile, models: Mapping[str, ModelSection], ids: Mapping[str, Any]) -> dict[str, str]:
        names = checks.check_names(models, ids, self.report)
        checks.check_devices(top, self.report)
        checks.check_pull(top.pull, ("pull",), self.report)
        declared = [*top.devices] if not self.report.has(("devices",)) else []
        for model_id, model in models.items():
            if not self.report.has(("devices",)):
                checks.check_model(model_id, model, ids[model_id] or {}, dict.fromkeys(declared), self.report)
            else:  # which devices there are is not known
                checks.check_model(model_id, model.model_copy(update={"device": ()}), ids[model_id] or {}, {}, self.report)
            checks.check_sleep(model_id, model, top, self.report)
        for name in top.limits if self.limit_names else ():
            if name not in self.limit_names:
                said = f"{quoted(name)} is no limit of the data plane.{did_you_mean(name, self.limit_names)}"
                self.report.add(("limits", name), said)
        checks.check_ports(models, self.report)
        checks.check_references(top, names, self.report, peers.check_peers(top.peers, names, self.report))
        return names

    # --------------------------------------------------------------------------------------------------------- results

    def _raise_if_bad(self) -> None:
        """Raise what was found; in lenient mode models with usable names may have problems."""
        paths = self.report.paths.values()
        if self.strict:
            is_bad = bool(self.report.problems)
        else:
            is_bad = any(len(path) < 2 or path[0] != "models" or name_error(str(path[1])) for path in paths)
        if is_bad:
            raise ConfigError(self.report.sorted_problems())

    def _lowered(
        self, model_id: str, model: ModelSection | None, top: ConfigFile, names: Mapping[str, str], problem: Problem | None
    ) -> ModelConfig:
        wrong = f"{problem.where}: {problem.message}" if problem is not None else ""
        section = model or ModelSection()
        section = section.model_copy(update={"aliases": tuple(alias for alias in section.aliases if names.get(alias) == model_id)})
        return lower.lower_model(model_id, section, top, self.report.spot(("models", model_id))[0], wrong)

    def _warnings(self) -> tuple[str, ...]:
        """Problems that lenient loading let pass come first."""
        return (*(str(problem) for problem in self.report.sorted_problems()), *self.report.sorted_warnings())


def _without(tree: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """A copy of the tree in which nothing is left at `place`."""
    if len(place) <= 1 or not isinstance(tree.get(str(place[0])), Mapping):
        return {key: item for key, item in tree.items() if not place or key != place[0]}
    return {**tree, str(place[0]): _without(tree[str(place[0])], place[1:])}


def _by_id(table: Any) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(table, Mapping):
        return []
    return [(("setParamsByID", str(name)), item) for name, item in table.items()]
