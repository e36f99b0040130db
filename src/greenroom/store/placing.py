"""Put files into folders: linked, cloned or copied; written whole and kept over a power cut; and the room that is left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .facts import NoRoom

FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
COPY_BYTES = 8 << 20
KEPT_FREE_BYTES = 64 << 20  # for logs, ledgers and whatever else lives on that disk
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = 0o444


@contextlib.contextmanager
def room_for(folder: Path, needed: int = 0) -> Iterator[None]:
    """Turn a full disk into NoRoom, with the figures."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        raise no_room(folder, needed) from exc


def no_room(folder: Path, needed: int) -> NoRoom:
    more = f"{needed:,} bytes are needed, " if needed else ""
    return NoRoom(
        f"the disk of {folder} is full: {more}{free_bytes(folder):,} are free; make room (`greenroom rm`, `greenroom gc`) and try again"
    )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there."""
    stat = os.statvfs(_there(folder))
    return stat.f_bavail * stat.f_frsize


def same_disk(path: Path, folder: Path) -> bool:
    """True where a hard link from one to the other is possible."""
    return path.stat().st_dev == _there(folder).stat().st_dev


def _there(folder: Path) -> Path:
    """The folder, or what it will be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def need_room(folder: Path, needed: int) -> None:
    """Raises NoRoom when `needed` more bytes do not fit, a small reserve kept."""
    free = free_bytes(folder)
    if needed and needed + KEPT_FREE_BYTES > free and not _small_disk_holds(folder, needed, free):
        hint = "make room there (`greenroom rm`, `greenroom gc`) or name another store"
        raise NoRoom(f"it needs {needed:,} bytes, and the disk of {folder} has {free:,} free: {hint}")


def _small_disk_holds(folder: Path, needed: int, free: int) -> bool:
    """A disk that is itself tiny (a tmpfs, a small volume) has no such reserve to keep."""
    stat = os.statvfs(_there(folder))
    return stat.f_blocks * stat.f_frsize < 16 * KEPT_FREE_BYTES and needed <= free


def place(source: Path, target: Path) -> str:
    """Make `target` the same file as `source`: "link", else "clone", else "copy".  Raises OSError (FileExistsError where it exists)."""
    try:
        os.link(source, target)
        return "link"
    except FileExistsError:
        raise
    except OSError:
        pass  # no hard links there, too many, or another file system
    return take(source, target)


def take(source: Path, target: Path, *, link: bool = False) -> str:
    """Make `target` a file with the bytes of `source`: "clone" where the file system can share blocks, "link" if allowed, else "copy"."""
    with source.open("rb") as read, open(target, "xb") as write:
        os.fchmod(write.fileno(), READ_ONLY)
        cloned = _clone(read.fileno(), write.fileno())
        if not cloned and not link:
            copy_range(read.fileno(), 0, os.fstat(read.fileno()).st_size, write.fileno())
        os.fsync(write.fileno())
    if cloned or not link:
        return "clone" if cloned else "copy"
    target.unlink()
    return place(source, target)


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True


def copy_range(source: int, offset: int, size: int, target: int) -> None:
    """`size` bytes of one open file to the end of another, in the kernel where it can; raises OSError, EOFError when cut short."""
    while size > 0:
        try:
            count = os.copy_file_range(source, target, min(size, 1 << 30), offset_src=offset)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            count = _copy_some(source, offset, min(size, COPY_BYTES), target)
        if count == 0:
            raise EOFError(f"{size} bytes are missing")
        offset, size = offset + count, size - count


def _copy_some(source: int, offset: int, size: int, target: int) -> int:
    data = memoryview(os.pread(source, size, offset))
    done = 0
    while done < len(data):
        done += os.write(target, data[done:])
    return done


def write_whole(path: Path, data: bytes, mode: int = READ_ONLY) -> None:
    """A file that is there wholly or not at all, also after a power cut; replaces one of that name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "xb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_tree(folder: Path) -> None:
    """Remove a folder; one that is gone already is no fault."""
    shutil.rmtree(folder, ignore_errors=True)
