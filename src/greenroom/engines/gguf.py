"""Read the header of a GGUF model file: architecture, sizes, and what its tensors weigh.  Never the weights."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[Scalar, ...]

HEADER_BYTES_FIRST = 1 << 20
HEADER_BYTES_MAX = 256 << 20  # the largest vocabularies are a few tens of MiB
FIELDS_MAX = 1 << 16
TENSORS_MAX = 1 << 20
ARRAY_KEPT_MAX = 4096  # longer arrays (vocabularies) are skipped; only their length is kept
DIMENSIONS_MAX = 8
PARTS_MAX = 10_000
HEADERS_CACHED_MAX = 1024

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9

# tensor type -> (values in a block, bytes of a block)
F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16 = 10, 11, 12, 13, 14, 20, 23, 30
BLOCKS: Mapping[int, tuple[int, int]] = {
    F32: (1, 4),
    F16: (1, 2),
    BF16: (1, 2),
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q5_0: (32, 22),
    Q5_1: (32, 24),
    Q8_0: (32, 34),
    Q2_K: (256, 84),
    Q3_K: (256, 110),
    Q4_K: (256, 144),
    Q5_K: (256, 176),
    Q6_K: (256, 210),
    IQ4_NL: (32, 18),
    IQ4_XS: (256, 136),
}

PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


class GgufError(ValueError):
    """This is not a complete GGUF file; the message is one sentence that names it."""


class _NeedMore(Exception):
    """The header goes on behind the bytes read so far."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dims: tuple[int, ...]
    type: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the head of one file says.  `lengths` has the element count of every array, also of the skipped ones."""

    path: Path
    file_bytes: int
    fields: Mapping[str, Value]
    lengths: Mapping[str, int]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    def number(self, key: str, default: int = 0) -> int:
        """An integer field of this architecture (`key` without its prefix); the default when absent or an array."""
        value = self.fields.get(f"{self.architecture}.{key}")
        return int(value) if isinstance(value, int | float) else default

    def per_layer(self, key: str, layers: int, default: int) -> tuple[int, ...]:
        """A field that may be one number for all layers or one for each."""
        value = self.fields.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            numbers = tuple(int(item) for item in value if isinstance(item, int | float))
            return (numbers + (default,) * layers)[:layers]
        return (int(value) if isinstance(value, int | float) else default,) * layers

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.lengths.get("tokenizer.ggml.tokens", 0) or self.number("vocab_size")


def read_header(path: Path) -> Header:
    """Read one file's header; raises GgufError (not GGUF, damaged, cut short) or OSError."""
    stat = path.stat()
    return _cached(path, stat.st_size, stat.st_mtime_ns)


def read_model(path: Path) -> tuple[Header, ...]:
    """The headers of all parts of a model given by its (first) file; raises GgufError when a part is missing."""
    return tuple(read_header(part) for part in part_paths(path))


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of a split model (`name-00001-of-00003.gguf`), or just this one."""
    match = PART_NAME.match(path.name)
    if match is None or not 1 <= int(match["parts"]) <= PARTS_MAX:
        return (path,)
    parts = int(match["parts"])
    paths = tuple(path.with_name(f"{match['stem']}-{part:05}-of-{parts:05}.gguf") for part in range(1, parts + 1))
    for part in paths:
        if not part.is_file():
            raise GgufError(f"{part} is missing: the model has {parts} parts; fetch them all into one folder")
    return paths


@lru_cache(maxsize=HEADERS_CACHED_MAX)
def _cached(path: Path, file_bytes: int, mtime_ns: int) -> Header:
    size = HEADER_BYTES_FIRST
    with path.open("rb") as file:
        while True:
            file.seek(0)
            data = file.read(min(size, HEADER_BYTES_MAX))
            try:
                return _parse(path, file_bytes, data)
            except _NeedMore:
                # Read, not mapped: a file that shrinks under a mapping would kill the process.
                if len(data) >= file_bytes:
                    raise GgufError(f"{path} ends inside its header ({file_bytes:,} bytes): fetch it again") from None
                if len(data) >= HEADER_BYTES_MAX:
                    raise GgufError(f"{path} has a header of more than {HEADER_BYTES_MAX:,} bytes: it is damaged") from None
                size *= 8


class _Reader:
    """A cursor over the bytes of a header."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, layout: str) -> int | float | bool:
        try:
            (value,) = struct.unpack_from(layout, self.data, self.at)
        except struct.error:
            raise _NeedMore from None
        self.at += struct.calcsize(layout)
        assert isinstance(value, int | float)
        return value

    def count(self, layout: str, limit: int, what: str) -> int:
        value = int(self.take(layout))
        if value > limit:
            raise GgufError(f"{self.path} is damaged: it claims {value:,} {what} (at most {limit:,} are possible)")
        return value

    def text(self) -> str:
        length = self.count("<Q", HEADER_BYTES_MAX, "bytes in a string")
        end = self.at + length
        if end > len(self.data):
            raise _NeedMore
        raw = self.data[self.at : end]
        self.at = end
        return raw.decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        unpack, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data)
        for _ in range(count):
            if at + 8 > end:
                raise _NeedMore
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise _NeedMore
        self.at = at

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise _NeedMore


def _parse(path: Path, file_bytes: int, data: bytes) -> Header:
    if data[:4] != b"GGUF":
        raise GgufError(f"{path} is not a GGUF file: it starts with {data[:4]!r}; fetch it again")
    reader = _Reader(data, path)
    reader.at = 4
    version = int(reader.take("<I"))
    if version not in (2, 3):
        raise GgufError(f"{path} has GGUF version {version}; versions 2 and 3 are known")
    tensor_count = reader.count("<Q", TENSORS_MAX, "tensors")
    field_count = reader.count("<Q", FIELDS_MAX, "fields")
    fields: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(field_count):
        _read_field(reader, fields, lengths)
    infos = [_read_tensor(reader) for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    start = -(-reader.at // alignment) * alignment
    tensors = _weigh(path, file_bytes, start, infos)
    return Header(path, file_bytes, fields, lengths, tensors)


def _read_field(reader: _Reader, fields: dict[str, Value], lengths: dict[str, int]) -> None:
    key = reader.text()
    kind = int(reader.take("<I"))
    if kind == ARRAY:
        element = int(reader.take("<I"))
        count = reader.count("<Q", HEADER_BYTES_MAX, "elements in an array")
        lengths[key] = count
        if element == STRING:
            reader.skip_texts(count)
        elif count <= ARRAY_KEPT_MAX:
            fields[key] = tuple(reader.take(_layout(reader, element)) for _ in range(count))
        else:
            reader.skip(count * struct.calcsize(_layout(reader, element)))
    elif kind == STRING:
        fields[key] = reader.text()
    else:
        fields[key] = reader.take(_layout(reader, kind))


def _layout(reader: _Reader, kind: int) -> str:
    layout = SCALARS.get(kind)
    if layout is None:
        raise GgufError(f"{reader.path} is damaged: it has a field of unknown type {kind}")
    return layout


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text()
    dimensions = reader.count("<I", DIMENSIONS_MAX, "dimensions of a tensor")
    dims = tuple(int(reader.take("<Q")) for _ in range(dimensions))
    kind = int(reader.take("<I"))
    offset = int(reader.take("<Q"))
    return name, dims, kind, offset


def _weigh(path: Path, file_bytes: int, start: int, infos: list[tuple[str, tuple[int, ...], int, int]]) -> tuple[Tensor, ...]:
    """Bytes of each tensor: from its type, or from where the next one starts when the type is new to us."""
    ends = sorted({offset for *_, offset in infos} | {max(0, file_bytes - start)})
    after = dict(pairwise(ends))
    tensors = []
    for name, dims, kind, offset in infos:
        values = 1
        for dim in dims:
            values *= dim
        if kind in BLOCKS:
            per_block, block_bytes = BLOCKS[kind]
            size = -(-values // per_block) * block_bytes
        else:
            size = after.get(offset, offset) - offset
        if start + offset + size > file_bytes:
            raise GgufError(f"{path} is cut short: {name} ends at byte {start + offset + size:,} of {file_bytes:,}; fetch it again")
        tensors.append(Tensor(name, dims, kind, size))
    return tuple(tensors)


def folder_bytes(folder: Path, suffixes: tuple[str, ...] = (".safetensors", ".bin")) -> int:
    """Weight bytes of a Hugging Face style folder: its safetensors, or else its .bin files."""
    for suffix in suffixes:
        sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.is_file() and entry.name.endswith(suffix)]
        if sizes:
            return sum(sizes)
    return 0
