"""Host RAM is read from the kernel: in all, free, and by process tree."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from greenroom.host import memory
from tests.host.engines import a_launch, printed, python_argv, running

HOLD = (
    "import mmap, os, time; m = mmap.mmap(-1, {mib} << 20, flags={flags}); m.write(b'x' * ({mib} << 20));"
    "{then}os.write(1, b'held\\n'); time.sleep(60)"
)


def test_the_machine_has_what_the_kernel_says():
    """At most the physical RAM; some of it free."""
    assert 0 < memory.available_mib() <= memory.total_mib() <= psutil.virtual_memory().total // memory.MIB


async def test_private_memory_is_counted_whole():
    """200 MiB held are 200 MiB and a little for the interpreter."""
    async with running(a_launch(python_argv(HOLD.format(mib=200, flags="mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS", then="")))) as process:
        await printed(process.log, "held")
        assert 200 <= memory.tree_mib(process.tree()) < 230


@pytest.mark.parametrize("exact_mib_max", [1024, 0])
async def test_memory_shared_in_a_tree_is_counted_once(exact_mib_max, monkeypatch):
    """Parent and child share 200 MiB: that is 200, not 400, by proportional shares and by plain counters alike."""
    monkeypatch.setattr(memory, "EXACT_MIB_MAX", exact_mib_max)
    code = HOLD.format(mib=200, flags="mmap.MAP_SHARED | mmap.MAP_ANONYMOUS", then="os.fork(); sum(m[::4096]); ")
    async with running(a_launch(python_argv(code))) as process:
        await printed(process.log, "held")
        while len(process.tree()) < 2 or process.log.tail(10).count("held") < 2:
            await printed(process.log, "held")
            await process.tree_gone(0.01)
        assert 200 <= memory.tree_mib(process.tree()) < 260


def test_nobody_holds_nothing():
    """Pids that are gone count as zero."""
    assert memory.tree_mib([]) == 0
    assert memory.tree_mib([2**22 + 1]) == 0


FILE = (
    "import mmap, os, time; f = os.memfd_create('copy'); os.ftruncate(f, {size} << 20); m = mmap.mmap(f, {size} << 20);"
    "m.write(b'x' * ({mib} << 20)); {then}os.write(1, b'held\\n'); time.sleep(60)"
)


@pytest.mark.parametrize(
    ("then", "mib"),
    [
        ("m.close(); ", 200),  # a copy that lies there until it is wanted again
        ("", 0),  # mapped: it is in the resident set already
        ("m.close(); os.dup(f); os.dup(f); os.fork(); ", 200),  # one file, however many hold it open
        ("m.close(); os.ftruncate(f, 0); ", 0),  # given back
        ("os.fork() or m.close(); ", 0),  # somebody maps it
    ],
)
async def test_a_copy_in_a_file_of_memory_that_nobody_maps_is_found(then, mib):
    """It is in no process's resident set, and takes the RAM all the same; only what was written counts."""
    async with running(a_launch(python_argv(FILE.format(size=300, mib=200, then=then)))) as process:
        await printed(process.log, "held")
        while "fork" in then and process.log.tail(10).count("held") < 2:
            await printed(process.log, "held")
            await process.tree_gone(0.01)
        assert mib <= memory.unmapped_mib(process.tree()) <= mib + 1
        in_all = memory.tree_mib(process.tree()) + memory.unmapped_mib(process.tree())
        assert in_all >= (200 if "ftruncate(f, 0)" not in then else 0)
        assert in_all < 260


def test_nobody_holds_no_files():
    """Pids that are gone count as zero."""
    assert memory.unmapped_mib([]) == 0
    assert memory.unmapped_mib([2**22 + 1]) == 0


async def test_a_large_tree_is_measured_cheaply(monkeypatch):
    """Above the limit the exact share is not asked for: its cost grows with the memory held."""
    asked = []
    monkeypatch.setattr(memory, "EXACT_MIB_MAX", 100)
    monkeypatch.setattr(memory, "_proportional", asked.append)
    async with running(a_launch(python_argv(HOLD.format(mib=200, flags="mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS", then="")))) as process:
        await printed(process.log, "held")
        began_at = time.monotonic()
        assert 200 <= memory.tree_mib([process.pid]) < 230
        print(f"plain counters: {1e6 * (time.monotonic() - began_at):.0f} us")
    assert asked == []


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1073741824", "memory.current": "800000000", "memory.stat": "anon 5\ninactive_file 300000000\n"}, (1024, 547)),
        (
            {"memory.limit_in_bytes": "1073741824", "memory.usage_in_bytes": "800000000", "memory.stat": "total_inactive_file 300000000\n"},
            (1024, 547),
        ),
        ({"memory.max": "max", "memory.current": "1"}, None),
        ({"memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_limit_of_a_container_counts(files, limit, tmp_path, monkeypatch):
    """Both generations of control groups; what can be dropped is free; no limit is the machine's own size."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_cgroup_folders", lambda: [tmp_path / "inner", tmp_path])
    expected = limit or (psutil.virtual_memory().total // memory.MIB, None)
    assert memory.total_mib() == expected[0]
    if limit is not None:
        assert memory.available_mib() == min(expected[1], psutil.virtual_memory().available // memory.MIB)


def test_our_own_control_group_is_looked_up_to_the_root():
    """The limit may be set on any level above us."""
    folders = memory._cgroup_folders()
    assert all(folder == Path("/sys/fs/cgroup") or Path("/sys/fs/cgroup") in folder.parents for folder in folders)
