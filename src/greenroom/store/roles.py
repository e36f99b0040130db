"""What each file of a model is for, told by its name; and which of them an engine is given."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

from .facts import ModelFile, StoreError

PART = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<ending>\.gguf|\.safetensors)$", re.IGNORECASE)
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".dduf")
TOKENIZER = re.compile(r"(?:tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|.*\.(?:tiktoken|spm))$")
TEMPLATE = re.compile(r"(?:chat_template.*|template|.*\.jinja2?)$")
LICENSE = re.compile(r"(?:licen[cs]e|notice|copying)(?:$|[-._])")
DOC = re.compile(r"(?:readme.*|.*\.(?:md|rst|pdf|png|jpg))$")
CONFIG = re.compile(r"(?:params|.*\.(?:json|ya?ml|toml|cfg|ini))$")
NOT_WEIGHTS = re.compile(r"(?:training_args|optimizer|scheduler|rng_state.*)\.(?:bin|pt|pth)$")


def role_of(path: str) -> str:
    """One of `ROLES`."""
    name = path.rsplit("/", 1)[-1].lower()
    if name.endswith(WEIGHTS):
        return _weights_role(name)
    for pattern, role in ((TOKENIZER, "tokenizer"), (TEMPLATE, "template"), (LICENSE, "license"), (DOC, "doc"), (CONFIG, "config")):
        if pattern.match(name):
            return role
    return "other"


def _weights_role(name: str) -> str:
    if NOT_WEIGHTS.match(name):
        return "other"
    words = set(re.split(r"[-._]", name))
    if "mmproj" in name or "projector" in words:
        return "projector"
    if words & {"draft", "drafter", "eagle", "eagle3"}:
        return "draft"
    if words & {"lora", "adapter"}:
        return "adapter"
    return "weights"


def entry_of(files: Sequence[ModelFile]) -> str:
    """What an engine is given, relative to the model's folder: a GGUF (the first part of a split one), or "" for the folder itself.

    Of several GGUF models the largest; raises StoreError where there are no weights.
    """
    weights = [file for file in files if file.role == "weights"]
    groups: defaultdict[str, list[ModelFile]] = defaultdict(list)
    for file in weights:
        if file.path.lower().endswith(".gguf"):
            groups[stem_of(file.path)].append(file)
    if groups:
        largest = max(sorted(groups), key=lambda stem: sum(file.size for file in groups[stem]))
        return min(file.path for file in groups[largest])
    if not weights:
        raise StoreError("it holds no model: no .gguf and no .safetensors file")
    folders = sorted({str(PurePosixPath(file.path).parent) for file in weights}, key=lambda folder: (folder.count("/"), folder))
    return "" if folders[0] == "." else folders[0]


def format_of(files: Sequence[ModelFile]) -> str:
    """`gguf`, `safetensors`, or "" for anything else."""
    names = [file.path.lower() for file in files if file.role == "weights"]
    return next((ending for ending in ("gguf", "safetensors") if any(name.endswith(ending) for name in names)), "")


def stem_of(path: str) -> str:
    """The path without part number and ending: the same for all parts of a split file."""
    folder, slash, name = path.rpartition("/")
    match = PART.match(name)
    return f"{folder}{slash}{match['stem'] if match else name.rsplit('.', 1)[0]}"


def missing_parts(paths: Sequence[str]) -> tuple[str, ...]:
    """Names of the parts that split files claim and that are not among `paths`."""
    have = set(paths)
    wanted: dict[str, None] = {}
    for path in paths:
        folder, slash, name = path.rpartition("/")
        match = PART.match(name)
        if match is None:
            continue
        for part in range(1, min(int(match["parts"]), 10_000) + 1):
            wanted[f"{folder}{slash}{match['stem']}-{part:05}-of-{match['parts']}{match['ending']}"] = None
    return tuple(path for path in wanted if path not in have)


def some_of(paths: Sequence[str]) -> str:
    """The first, and how many more."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
