"""What the files of a model tell about themselves, by their heads: GGUF fields, the configuration of a safetensors folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from greenroom.engines.gguf import GgufError, Header, read_header

from .facts import Damaged, Description, ModelFile, Stored, StoreError
from .roles import format_of, missing_parts, some_of, stem_of

MAGIC = b"GGUF"
VERSIONS_READ = (2, 3)
SAFETENSORS_HEADER_BYTES_MAX = 100 << 20
CONFIG_BYTES_MAX = 64 << 20  # indexes of the largest models have a few MiB
LICENSE_CHARS_MAX = 100
ENTRIES_MAX = 20_000  # below the folder of a model
MODELS_TOLD = 5  # of those that are not meant by a reference
COMPANIONS = frozenset({"clip", "controlvector", "t5encoder", "wavtokenizer-dec"})  # architectures that nobody serves alone

# llama.cpp's numbers for how most tensors of a file are stored
FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}
TENSOR_TYPES: Mapping[int, str] = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 30: "BF16", 39: "MXFP4"}
CONFIGURATIONS = ("config.json", "model_index.json")  # of a model, in its folder
TYPE_ROLES: Mapping[str, str] = {"mmproj": "projector", "adapter": "adapter"}


def examine(folder: Path, files: Sequence[ModelFile], told: Description) -> tuple[tuple[ModelFile, ...], Description]:
    """The files with the roles that their heads give them, and the description completed by them; what the files say wins.

    Raises Damaged for a file that is not what its name says, or is cut short.
    """
    headers: dict[str, Header] = {}
    found: list[ModelFile] = []
    for file in files:
        path = folder / file.path
        if file.path.lower().endswith(".gguf"):
            header = head_of(path)
            if header is not None:
                headers[file.path] = header
                file = replace(file, role=_role(file, header))
        elif file.path.lower().endswith(".safetensors"):
            check_safetensors(path)
        found.append(file)
    missing = missing_parts([file.path for file in files])
    if missing:
        raise Damaged(f"it is a split model without {some_of(missing)}")
    _check_split(headers)
    _check_index(folder, files)
    weights = [headers[file.path] for file in found if file.role == "weights" and file.path in headers]
    if weights:
        return tuple(found), _by_gguf(weights, told)
    return tuple(found), _by_config(folder, found, told)


def head_of(path: Path) -> Header | None:
    """The header of a GGUF file; None for a version that is newer than what is read here.  Raises Damaged."""
    with path.open("rb") as file:
        begin = file.read(8)
    if begin[:4] != MAGIC:
        raise Damaged(f"{path.name} is not a GGUF file, it begins with {begin[:4]!r}: what is kept there is no model, or a broken one")
    try:
        return read_header(path)
    except GgufError as exc:
        if int.from_bytes(begin[4:8], "little") not in VERSIONS_READ:
            return None
        raise Damaged(str(exc)) from exc


def check_safetensors(path: Path) -> None:
    """Raises Damaged unless the file has as many bytes as its header tells."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(SAFETENSORS_HEADER_BYTES_MAX, size - 8):
            raise Damaged(f"{path.name} is not a safetensors file: what is kept there is no model, or a broken one")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            whole = int(end) + 8 + length == size
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise Damaged(f"{path.name} has a broken safetensors header: fetch it again") from None
    if not whole:
        raise Damaged(f"{path.name} has {size:,} bytes, its header tells {int(end) + 8 + length:,}: fetch it again")


def _role(file: ModelFile, header: Header) -> str:
    kind = TYPE_ROLES.get(str(header.fields.get("general.type", "")))
    if kind is None and header.architecture == "clip":
        kind = "projector"
    return kind or file.role


def _check_split(headers: Mapping[str, Header]) -> None:
    """A part knows how many there are, whatever the files are called."""
    for path, header in headers.items():
        count = header.fields.get("split.count")
        together = sum(stem_of(other) == stem_of(path) for other in headers)
        if isinstance(count, int) and not isinstance(count, bool) and count > 1 and together != count:
            raise Damaged(f"{path} is one of {count} parts, and {together} of them are here under names that belong together")


def _check_index(folder: Path, files: Sequence[ModelFile]) -> None:
    """An index names the shards it needs."""
    names = {file.path for file in files}
    for file in files:
        if not file.path.endswith(".safetensors.index.json"):
            continue
        shards = _json(folder / file.path).get("weight_map")
        below = file.path.rpartition("/")[0]
        wanted = {f"{below}/{name}" if below else str(name) for name in shards.values()} if isinstance(shards, dict) else set()
        if wanted - names:
            raise Damaged(f"{file.path} names {len(wanted)} shards, and it came without {some_of(sorted(wanted - names))}")


def _by_gguf(headers: Sequence[Header], told: Description) -> Description:
    """All parts of the largest model; only the first part of a split one has the fields."""
    stems: Counter[str] = Counter()
    for header in headers:
        stems[stem_of(header.path.name)] += header.file_bytes
    stem = max(sorted(stems), key=lambda name: stems[name])
    parts = sorted((header for header in headers if stem_of(header.path.name) == stem), key=lambda header: header.path.name)
    first = parts[0]
    counted = sum(_values(part) for part in parts)
    license_ = str(first.fields.get("general.license", ""))[:LICENSE_CHARS_MAX]
    return Description(
        "gguf",
        first.architecture or told.architecture,
        count_of(counted) or told.parameters,
        _quantization(first, parts) or told.quantization,
        str(first.fields.get("general.name", "")) or told.name,
        told.licenses or ((license_,) if license_ else ()),
        first.number("context_length") or told.context_length,
        told.annotations,
    )


def _values(header: Header) -> int:
    total = 0
    for tensor in header.tensors:
        values = 1
        for dim in tensor.dims:
            values *= dim
        total += values
    return total


def _quantization(first: Header, parts: Sequence[Header]) -> str:
    number = first.fields.get("general.file_type")
    if isinstance(number, int) and not isinstance(number, bool) and number in FILE_TYPES:
        return FILE_TYPES[number]
    weights: Counter[int] = Counter()
    for part in parts:
        for tensor in part.tensors:
            weights[tensor.type] += tensor.bytes
    return TENSOR_TYPES.get(weights.most_common(1)[0][0], "") if weights else ""


def _by_config(folder: Path, files: Sequence[ModelFile], told: Description) -> Description:
    config = next(
        (file for file in sorted(files, key=lambda file: file.path.count("/")) if file.path.rsplit("/", 1)[-1] == "config.json"), None
    )
    data = _json(folder / config.path) if config is not None else {}
    architectures = data.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else data.get("model_type")
    quantization = data.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else data.get("torch_dtype") or data.get("dtype")
    context = data.get("max_position_embeddings")
    return replace(
        told,
        format=format_of(files) or told.format,
        architecture=named if isinstance(named, str) else told.architecture,
        quantization=told.quantization or (method if isinstance(method, str) else ""),
        context_length=context if isinstance(context, int) and context > 0 else told.context_length,
        parameters=told.parameters or count_of(sum(_safetensors_values(folder / f.path) for f in files if f.path.endswith(".safetensors"))),
    )


def _safetensors_values(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, entry in header.items():
        shape = entry.get("shape") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(shape, list) and all(isinstance(dim, int) for dim in shape):
            values = 1
            for dim in shape:
                values *= dim
            total += values
    return total


def _json(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def count_of(values: int) -> str:
    """`135M`, `1.2B`; "" for nothing."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if values >= unit * 0.9995:
            number = values / unit
            return f"{number:.1f}{name}" if number < 9.95 and f"{number:.1f}"[-1] != "0" else f"{number:.0f}{name}"
    return str(values) if values > 0 else ""


def local_files(path: Path) -> tuple[tuple[str, Path], ...]:
    """The files of a model on disk, by the names they get: a file with its other parts and its projector, or a whole folder.

    Raises StoreError: nothing there, no model, parts missing, too many files.
    """
    from .layouts import check_paths
    from .roles import role_of

    if path.is_dir():
        files = [(file.relative_to(path).as_posix(), file) for file in _below(path)]
        files = [(name, file) for name, file in files if role_of(name) != "other"]
    elif path.is_file():
        files = [(file.name, file) for file in _together(path)]
    else:
        raise StoreError(f"there is no file {path}: write the path of a .gguf file or of a model's folder")
    if not any(role_of(name) in ("weights", "projector", "adapter", "draft") for name, _ in files):
        raise StoreError(f"{path} is no model: .gguf files and folders with .safetensors files are")
    check_paths([name for name, _ in files], what=str(path))
    missing = missing_parts([name for name, _ in files])
    if missing:
        raise StoreError(f"{path} is a split model without {some_of(missing)}: fetch the whole of it into the same folder")
    return tuple(files)


def about_others(stored: Stored) -> str:
    """That it holds several models, and which of them is meant by its reference; "" for one.

    They may belong together all the same (a draft, a decoder, a text encoder): an engine is given each by its own path.
    """
    from .roles import entry_of

    models = _models([(file.path, stored.folder / file.path) for file in stored.files])
    if len(models) < 2:
        return ""
    meant = entry_of(stored.files)
    others = [name for name in models if name != meant]
    more = f" and {len(others) - MODELS_TOLD} more" if len(others) > MODELS_TOLD else ""
    told = f"{', '.join(others[:MODELS_TOLD])}{more}"
    return f"it holds {len(models)} models, of which {meant or 'its folder'} is served; for another ({told}) name that one's own path"


def _models(files: Sequence[tuple[str, Path]]) -> list[str]:
    """What in a folder can each be served alone: GGUF files, of a split one the first part; else folders with a configuration each."""
    from .roles import role_of

    weights = [(name, file) for name, file in files if role_of(name) == "weights"]
    first: dict[str, tuple[str, Path]] = {}
    for name, file in weights:
        if name.lower().endswith(".gguf"):
            first.setdefault(stem_of(name), (name, file))
    if first:
        return [name for name, file in first.values() if len(first) == 1 or _is_model(file)]
    configured = {name.rpartition("/")[0] for name, _ in files if name.rsplit("/", 1)[-1] in CONFIGURATIONS}
    folders = sorted({name.rpartition("/")[0] for name, _ in weights})
    return [] if "" in configured else [folder for folder in folders if folder in configured]


def _is_model(path: Path) -> bool:
    """Whether it could be served alone, whatever it is called: nothing that only goes with a model.  One that cannot be read counts."""
    try:
        header = head_of(path)
    except Damaged:
        return True
    if header is None:
        return True
    is_weights = _role(ModelFile(path.name, 0, "", "weights"), header) == "weights"
    return is_weights and header.fields.get("general.type", "model") == "model" and header.architecture not in COMPANIONS


def _below(folder: Path) -> list[Path]:
    """All files, sorted, hidden ones left out.  Raises StoreError for a folder that can be no model's."""
    found: list[Path] = []
    seen = 0
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        seen += len(folders) + len(names)
        if seen > ENTRIES_MAX:
            raise StoreError(f"{folder} has more than {ENTRIES_MAX:,} files and folders below it: name the folder of one model")
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def _together(path: Path) -> list[Path]:
    """All parts of a split file; and the projector beside it, where it can only belong to this model."""
    from .roles import PART, role_of

    match = PART.match(path.name)
    parts = [path]
    if match:
        like = f"{match['stem']}-{'[0-9]' * 5}-of-{match['parts']}{match['ending']}"
        parts = sorted(part for part in path.parent.glob(_escaped(like, match["stem"])) if part.is_file())
    if role_of(path.name) != "weights" or path.suffix.lower() != ".gguf":
        return parts
    beside = [file for file in sorted(path.parent.glob("*.gguf")) if file.is_file()]
    models = {stem_of(file.name) for file in beside if role_of(file.name) == "weights"}
    projectors = [file for file in beside if role_of(file.name) == "projector"]
    return parts + projectors if len(models) == 1 and len(projectors) == 1 else parts


def _escaped(pattern: str, stem: str) -> str:
    import glob

    return pattern.replace(stem, glob.escape(stem), 1)
