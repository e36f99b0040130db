"""What of a command lies on the host: found by its words alone, mounted read-only under /models, and renamed in the command."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from greenroom.deploy.intent import Mount
from greenroom.engines.discovery import IMAGE_PROGRAM

ROOT = "/models"
CACHE_PLACE = "/cache"  # home of what runs inside: downloads, compiled code
NAME_CHARS_MAX = 120  # of a file inside; the host's own name is not bound by it
DIGEST_CHARS = 8
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.[A-Za-z0-9]+$")  # its other parts lie beside it
FILES = (".gguf", ".jinja", ".jinja2", ".safetensors", ".gbnf", ".mmproj")  # endings that make a relative word a file

# Flags whose value looks like a path and is none: URLs' paths, names for clients, names on a hub.
NO_PATHS = frozenset(
    [
        *(
            "--api-prefix",
            "--root-path",
            "--url-prefix",
            "--metrics-path",
            "--prefix",
            "--served-model-name",
            "--alias",
            "-a",
            "-p",
            "--prompt",
        ),
        *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hfd", "--hf-repo-draft", "-hfv", "--hf-repo-v", "-hffv", "--hf-file-v"),
    ]
)
# Variables that name folders an engine writes to, or files it reads; they keep their values, so the same path is mounted.
CACHE_VARIABLES = frozenset(
    {
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "LLAMA_CACHE",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_HOME",
        "TRANSFORMERS_CACHE",
        "TRITON_CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "XDG_CACHE_HOME",
    }
)
FILE_VARIABLES = re.compile(r"^(?:LLAMA_ARG_[A-Z_]+|MODEL_ID)$")
# What an engine writes to: mounted where it lies, writable.
WRITTEN_FOLDERS = frozenset({"--slot-save-path", "--download-dir", "--huggingface-hub-cache", "--cache-dir"})
WRITTEN_FILES = frozenset({"--log-file"})
KERNEL = ("/dev", "/proc", "/sys")
PROGRAMS = (os.path.dirname(IMAGE_PROGRAM),)  # of images that are known
SYSTEM = (*KERNEL, "/bin", "/boot", "/etc", "/lib", "/lib64", "/run", "/sbin", "/usr", "/var/run")  # programs there are the image's


@dataclass(slots=True)
class Places:
    """Host paths seen so far, each with its place inside; no two share one."""

    inside: tuple[str, ...] = ()  # folders that are there inside only
    targets: dict[str, str] = field(default_factory=dict)  # host path -> path inside
    same: dict[str, bool] = field(default_factory=dict)  # host path mounted where it lies -> read-only

    def argv(self, words: Sequence[str], host_path: Callable[[str], str | None]) -> tuple[str, ...]:
        """The command with paths as inside; `host_path` tells where a word lies on the host, None = it is not there."""
        out: list[str] = []
        flag = ""
        for position, word in enumerate(words):
            if word.startswith("-") and not _is_path(word):
                name, equals, value = word.partition("=")
                flag = name
                out.append(f"{name}={self._value(value, name, host_path)}" if equals else word)
                continue
            # The program itself: what is bare, or belongs to the system, is found inside.
            is_inside = position == 0 and ("/" not in word or _is_in(word, SYSTEM))
            out.append(word if is_inside else self._value(word, flag, host_path))
            flag = ""
        return tuple(out)

    def script(self, text: str, paths: Sequence[str]) -> str:
        """A shell script with these host paths as inside."""
        for path in sorted(paths, key=len, reverse=True):
            text = text.replace(path, self.place(path))
        return text

    def environment(self, env: Sequence[tuple[str, str]]) -> None:
        """Values are kept; what they name is mounted where it lies."""
        for name, value in env:
            if not value.startswith("/") or value == "/" or _is_in(value, SYSTEM):
                continue
            if name in CACHE_VARIABLES:
                self.same[os.path.normpath(value)] = False
            elif FILE_VARIABLES.match(name):
                self.same.setdefault(os.path.normpath(value), True)

    def place(self, host: str) -> str:
        """Where a host path is inside.  The folder is mounted where a file has other parts beside it."""
        host = os.path.normpath(host)
        if SPLIT.search(host):
            return f"{self._target(os.path.dirname(host))}/{os.path.basename(host)}"
        return self._target(host)

    def stay(self, host: str) -> str:
        """It is read where it lies."""
        self.same.setdefault(host, True)
        return host

    def mounts(self) -> tuple[Mount, ...]:
        moved = [Mount("bind", source, target) for source, target in self.targets.items()]
        kept = [Mount("bind", path, path, read_only) for path, read_only in self.same.items()]
        return tuple(sorted((*moved, *kept), key=lambda mount: mount.target))

    def _target(self, host: str) -> str:
        if host not in self.targets:
            path = PurePosixPath(host)
            taken = set(self.targets.values())
            plain = [_safe(path.name), f"{_safe(path.parent.name)}-{_safe(path.name)}"]
            digest = hashlib.sha256(os.fsencode(host)).hexdigest()[:DIGEST_CHARS]
            names = (*plain, f"{digest}-{_safe(path.name)}")
            self.targets[host] = next(target for name in names if (target := f"{ROOT}/{name}") not in taken)
        return self.targets[host]

    def _value(self, text: str, flag: str, host_path: Callable[[str], str | None]) -> str:
        if flag in NO_PATHS or "://" in text:
            return text
        if flag in WRITTEN_FOLDERS | WRITTEN_FILES and text.startswith("/") and not _is_in(text, KERNEL):
            self.same[os.path.normpath(text if flag in WRITTEN_FOLDERS else os.path.dirname(text))] = False
            return text
        if text[:1] in "{[":
            return self._json(text, host_path)
        if _is_path(text):
            parts = text.split(",")
            if len(parts) > 1 and all(map(_is_path, parts)) and not text.endswith(FILES[1:3]):
                return ",".join(self._path(part, host_path) for part in parts)
            return self._path(text, host_path)
        if text.endswith(FILES) and not any(char.isspace() for char in text.partition("=")[0]) and "=" not in text:
            return self._path(text, host_path)
        name, equals, rest = text.partition("=")
        if equals and _is_path(rest) and re.fullmatch(r"[\w.-]+", name):
            return f"{name}={self._path(rest, host_path)}"
        return text

    def _path(self, text: str, host_path: Callable[[str], str | None]) -> str:
        found = host_path(text)
        if _is_in(text, self.inside) or found is None or found == "/" or _is_in(found, KERNEL):
            return text
        return self.place(found)

    def _json(self, text: str, host_path: Callable[[str], str | None]) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            return text
        changed = self._in_json(value, host_path)
        return text if changed == value else json.dumps(changed, ensure_ascii=False)

    def _in_json(self, value: object, host_path: Callable[[str], str | None]) -> object:
        if isinstance(value, str) and _is_path(value) and "://" not in value:
            return self._path(value, host_path)
        if isinstance(value, Mapping):
            return {key: self._in_json(item, host_path) for key, item in value.items()}
        if isinstance(value, list):
            return [self._in_json(item, host_path) for item in value]
        return value


def unmounted(words: Sequence[str], folders: Sequence[str]) -> tuple[str, ...]:
    """Whole paths among these words that lie in none of the folders, and in no folder of every system."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        name, equals, value = word.partition("=")
        path = value if equals else word
        if path.startswith("/") and path.strip("/") and (name if equals else before) not in NO_PATHS:
            found += [] if _is_in(path, (*folders, *SYSTEM, *PROGRAMS, "/tmp")) else [path]
    return tuple(dict.fromkeys(found))


def _is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~/")) and len(text) > 1 and "\n" not in text


def _is_in(path: str, folders: Sequence[str]) -> bool:
    path = os.path.normpath(path)
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name)[-NAME_CHARS_MAX:].lstrip("-.") or "file"
