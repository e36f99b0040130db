"""Host RAM: how much there is, how much is free, how much an engine holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from greenroom.host.proctable import read_small

MIB = 1024 * 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The exact share costs about 10 ms for each GiB a process holds; above this the kernel's plain counters must do.
EXACT_MIB_MAX = 1024
FILES_LOOKED_AT_MAX = 4096
CGROUP_ROOT = Path("/sys/fs/cgroup")


def total_mib() -> int:
    """What can ever be used: the machine's RAM, or less where a container limits us."""
    limit = _cgroup_limit()
    physical = psutil.virtual_memory().total
    return (physical if limit is None else min(physical, limit[0])) // MIB


def available_mib() -> int:
    """What can be used now without swapping; caches that can be dropped count as free."""
    free = int(psutil.virtual_memory().available)
    limit = _cgroup_limit()
    return (free if limit is None else min(free, max(0, limit[0] - limit[1]))) // MIB


def tree_mib(pids: Iterable[int]) -> int:
    """RAM these processes hold together, shared pages counted once; mapped weights count, swap does not.

    Small trees exactly (proportional shares); large ones as private pages plus the largest shared part, which is
    exact for one process and a little high for several.
    """
    held = [(pid, *_resident(pid)) for pid in pids]
    if sum(rss for _, rss, _ in held) <= EXACT_MIB_MAX * MIB:
        shares = [_proportional(pid) for pid, _, _ in held]
        if None not in shares:
            return sum(share or 0 for share in shares) // MIB
    private = sum(rss - shared for _, rss, shared in held)
    return (private + max((shared for _, _, shared in held), default=0)) // MIB


def unmapped_mib(pids: Iterable[int]) -> int:
    """RAM these processes hold in anonymous files (memfd) that no process maps: it is in nobody's resident set."""
    pids = list(pids)
    files: dict[int, int] = {}  # inode -> bytes
    for pid in pids:
        files |= _memory_files(pid)
    if files:
        mapped = {int(line.split()[4]) for pid in pids for line in _maps(pid) if b"/memfd:" in line}
        files = {inode: size for inode, size in files.items() if inode not in mapped}
    return sum(files.values()) // MIB


def _memory_files(pid: int) -> dict[int, int]:
    """inode -> bytes in RAM of each memfd a process has open."""
    found: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names[:FILES_LOOKED_AT_MAX]:
        try:
            if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                stat = os.stat(f"{folder}/{name}")
                found[stat.st_ino] = stat.st_blocks * 512
        except OSError:
            continue
    return found


def _maps(pid: int) -> list[bytes]:
    return read_small(f"/proc/{pid}/maps", 8 * MIB).splitlines()


def _resident(pid: int) -> tuple[int, int]:
    """(resident, of it shared with files or other processes), bytes."""
    fields = read_small(f"/proc/{pid}/statm", 256).split()
    if len(fields) < 3:
        return 0, 0
    return int(fields[1]) * PAGE_BYTES, int(fields[2]) * PAGE_BYTES


def _proportional(pid: int) -> int | None:
    """Bytes; None when it may not be looked at, 0 when it is gone."""
    text = read_small(f"/proc/{pid}/smaps_rollup", 65536)
    for line in text.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None if read_small(f"/proc/{pid}/statm", 256).split()[:1] not in ([], [b"0"]) else 0


# --------------------------------------------------------------------------------------------------- container limits


def _cgroup_limit() -> tuple[int, int] | None:
    """(limit, used and not droppable) in bytes of the tightest control group we are in; None = no limit."""
    found = [limit for folder in _cgroup_folders() if (limit := _read_limit(folder)) is not None]
    return min(found, default=None)


def _cgroup_folders() -> list[Path]:
    folders = []
    for line in read_small("/proc/self/cgroup", 65536).decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = CGROUP_ROOT if controllers == "" else CGROUP_ROOT / "memory"
            here = Path(path.lstrip("/"))
            folders += [root / here, *(root / parent for parent in here.parents)]
    return folders


def _read_limit(folder: Path) -> tuple[int, int] | None:
    for limit_name, used_name, droppable in (
        ("memory.max", "memory.current", b"inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file"),
    ):
        limit = read_small(f"{folder}/{limit_name}", 64).strip()
        if limit.isdigit() and int(limit) < psutil.virtual_memory().total:
            used = int(read_small(f"{folder}/{used_name}", 64).strip() or 0)
            return int(limit), max(0, used - _stat(folder, droppable))
    return None


def _stat(folder: Path, key: bytes) -> int:
    for line in read_small(f"{folder}/memory.stat", 65536).splitlines():
        name, _, value = line.partition(b" ")
        if name == key:
            return int(value)
    return 0
