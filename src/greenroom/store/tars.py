"""Tar archives, read as strangers' and written to be the same every time.

Read here, not by `tarfile`: a header may claim names and fields of gigabytes, and what comes out is bounded.
"""

from __future__ import annotations

import gzip
import posixpath
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from .facts import Damaged, Refused
from .paths import safe_path, shown

BLOCK = 512
MEMBERS_MAX = 200_000
EXTENSION_BYTES_MAX = 1 << 20  # a long name or a pax header
SKIP_BYTES = 1 << 20
NAME_BYTES = 100
SIZE_MAX = 1 << 62

FILE, LINK, SYMLINK, CHARACTER, DEVICE, FOLDER, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
KINDS = {FILE: "file", b"\0": "file", b"7": "file", LINK: "link", SYMLINK: "symlink", FOLDER: "folder"}
KINDS |= {CHARACTER: "device", DEVICE: "device", FIFO: "device"}
WHITEOUT = ".wh."  # an image layer takes away what a lower one brought
OPAQUE = ".wh..wh..opq"


class Source(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Member:
    """One entry.  `path` is safe; `target` is what a link names."""

    path: str
    kind: str  # file | link | symlink | folder | device
    size: int
    target: str = ""


def opened(path: Path) -> BinaryIO:
    """The archive's bytes, unpacked where it is gzip."""
    with path.open("rb") as file:
        begin = file.read(4)
    if begin[:2] == b"\x1f\x8b":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if begin == b"\x28\xb5\x2f\xfd":
        raise Refused("a layer is compressed with zstd, which is not read here: pack it again without compression or with gzip")
    return path.open("rb")


def members(stream: Source, *, what: str, bytes_max: int = SIZE_MAX) -> Iterator[tuple[Member, Source]]:
    """Each member with its bytes, which must be read (or not) before the next one is asked for.

    `bytes_max` bounds what is read of the stream altogether.  Raises Damaged, Refused.
    """
    reader = _Reader(stream, what, bytes_max)
    long: dict[str, str] = {}
    common: dict[str, str] = {}
    for _ in range(MEMBERS_MAX):
        header = reader.exactly(BLOCK, end_allowed=True)
        if not header or header == bytes(BLOCK):
            return
        kind, size = header[156:157], _size(header, what)
        if kind in (b"L", b"K", b"x", b"g"):
            _extend(kind, reader.extension(size), long, common, what)
            continue
        fields = {**common, **long}
        long = {}
        if "size" in fields:
            size = _decimal(fields["size"], what)
        if kind == b"S" or any(key.startswith("GNU.sparse") for key in fields):
            raise Refused(f"{what} holds a sparse file: pack it again without --sparse")
        name = fields.get("path") or _name(header)
        has_bytes = KINDS.get(kind) == "file"
        member = Member(
            safe_path(name, what=what) if name.strip("./") else ".",
            KINDS.get(kind, "other"),
            size if has_bytes else 0,
            fields.get("linkpath") or _decode(header[157:257]),
        )
        body = _Body(reader, size if has_bytes else 0)
        yield member, body
        body.skip()
        reader.skip(-size % BLOCK if has_bytes else 0)
    raise Refused(f"{what} has more than {MEMBERS_MAX:,} members")


def link_target(member: Member, root: str = "") -> str:
    """Where a link leads, as a path inside the archive; raises Refused when it leads out of `root`."""
    if member.kind == "link":
        path = safe_path(member.target, what=member.path) if member.target else ""
    elif member.target.startswith("/"):
        path = posixpath.normpath(member.target).lstrip("/")
    else:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(member.path), member.target))
    inside = path == root or path.startswith(f"{root}/") if root else not path.startswith("..")
    if not member.target or not inside or "\0" in path:
        raise Refused(
            f"a layer has a link {shown(member.path)} that leads to {shown(member.target)}, out of the model: nothing of it was kept"
        )
    return path


class _Reader:
    """Counts, bounds and never believes a length."""

    def __init__(self, stream: Source, what: str, bytes_max: int) -> None:
        self.stream = stream
        self.what = what
        self.at = 0
        self.bytes_max = bytes_max

    def some(self, size: int) -> bytes:
        try:
            data = self.stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise Damaged(f"{self.what} is a broken gzip file ({exc}): fetch it again") from None
        self.at += len(data)
        if self.at > self.bytes_max:
            raise Refused(f"{self.what} unpacks to more than {self.bytes_max:,} bytes: nothing of it was kept")
        return data

    def exactly(self, size: int, *, end_allowed: bool = False) -> bytes:
        data = b""
        while len(data) < size:
            more = self.some(size - len(data))
            if not more:
                break
            data += more
        if len(data) < size and (data or not end_allowed):
            raise Damaged(f"{self.what} ends in the middle of a file: fetch it again")
        return data

    def extension(self, size: int) -> bytes:
        if size > EXTENSION_BYTES_MAX:
            raise Refused(f"{self.what} has a header of {size:,} bytes; {EXTENSION_BYTES_MAX:,} are the limit")
        data = self.exactly(size)
        self.skip(-size % BLOCK)
        return data

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.exactly(min(size, SKIP_BYTES)))


class _Body:
    """The bytes of one member."""

    def __init__(self, reader: _Reader, size: int) -> None:
        self._reader = reader
        self._left = size

    def read(self, size: int = SKIP_BYTES, /) -> bytes:
        data = self._reader.exactly(min(size, self._left)) if self._left else b""
        self._left -= len(data)
        return data

    def skip(self) -> None:
        while self._left:
            self.read()


def _extend(kind: bytes, data: bytes, long: dict[str, str], common: dict[str, str], what: str) -> None:
    if kind == b"L":
        long["path"] = _decode(data)
    elif kind == b"K":
        long["linkpath"] = _decode(data)
    else:
        (common if kind == b"g" else long).update(_pax(data, what))


def _pax(data: bytes, what: str) -> dict[str, str]:
    """Records `LENGTH KEY=VALUE\\n`."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(data):
        number, _, _ = data[at : at + 20].partition(b" ")
        if not number.isdigit():
            break
        record = data[at : at + int(number)]
        key, equals, value = record[len(number) + 1 : -1].partition(b"=")
        if not equals or record[-1:] != b"\n" or len(record) != int(number):
            raise Damaged(f"{what} has a broken pax header")
        fields[_decode(key)] = value.decode("utf-8", "surrogateescape")
        at += len(record)
    return fields


def _size(header: bytes, what: str) -> int:
    _check_sum(header, what)
    field = header[124:136]
    if field[0] & 0x80:  # base 256
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    else:
        text = field.split(b"\0")[0].strip()
        try:
            value = int(text or b"0", 8)
        except ValueError:
            raise Damaged(f"{what} has a broken tar header") from None
    if not 0 <= value <= SIZE_MAX:
        raise Damaged(f"{what} has a tar header with an impossible size")
    return value


def _decimal(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= SIZE_MAX):
        raise Damaged(f"{what} has a tar header with an impossible size")
    return int(text)


def _check_sum(header: bytes, what: str) -> None:
    text = header[148:156].replace(b"\0", b" ").split()
    try:
        told = int(text[0], 8) if text else -1
    except ValueError:
        told = -1
    if told != sum(header) - sum(header[148:156]) + 8 * 0x20:
        raise Damaged(f"{what} is no tar archive, or a broken one")


def _name(header: bytes) -> str:
    name = _decode(header[:NAME_BYTES])
    prefix = _decode(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _decode(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8", "surrogateescape")


def header_of(path: str, *, size: int = 0, kind: bytes = FILE, target: str = "") -> bytes:
    """The header block(s) of one member, the same every time: owner 0, time 0; names that do not fit are told by a pax header."""
    fields = {key: value for key, value in (("path", path), ("linkpath", target)) if value and not _fits(value)}
    if size >= 1 << 33:
        fields["size"] = str(size)
    before = b""
    if fields:
        records = b"".join(_record(key, value) for key, value in sorted(fields.items()))
        before = _block("pax", len(records), b"x", "") + records + bytes(-len(records) % BLOCK)
    return before + _block(path, size if size < 1 << 33 else 0, kind, target)


def padding_of(size: int) -> bytes:
    return bytes(-size % BLOCK)


END = bytes(2 * BLOCK)


def _fits(text: str) -> bool:
    return text.isascii() and len(text) <= NAME_BYTES


def _record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def _block(path: str, size: int, kind: bytes, target: str) -> bytes:
    mode = 0o755 if kind == FOLDER else 0o777 if kind == SYMLINK else 0o644
    header = b"".join(
        (
            path.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"),
            b"%07o\0" % mode,
            b"0000000\0" * 2,  # owner, group
            b"%011o\0" % size,
            b"00000000000\0",  # time
            b" " * 8,
            kind,
            target.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"),
            b"ustar\x0000",
        )
    ).ljust(BLOCK, b"\0")
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]
