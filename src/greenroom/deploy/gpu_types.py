"""NVIDIA GPUs that can be cut into slices, and how: profiles, what they hold, where on the chip they may stand.

Profiles and counts are those of NVIDIA's table of supported MIG profiles; for the GB200 and B300, which it leaves out,
those of the configurations that the GPU operator ships.  Places are what `nvidia-smi mig -lgipp` prints: a profile takes
`width` memory slices from one of its starts.  Memory is what `nvidia-smi mig -lgip` prints where such a listing was at
hand; else it is reckoned from the profile's name, on the safe side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1024
# A profile's name rounds up: of what it says, this much is there at least, by the share of the chip that it is.
REAL_SHARE = ((1 / 8, 0.88), (1 / 4, 0.92), (1.0, 0.96))


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of slice."""

    name: str  # 3g.40gb
    compute: int  # compute slices
    width: int  # memory slices
    starts: tuple[int, ...]
    memory_mib: int
    listed: bool  # memory is from a listing, not reckoned


@dataclass(frozen=True, slots=True)
class GpuType:
    name: str
    memory_mib: int  # of the whole GPU, not sliced
    width: int = 0  # memory slices; 0 = it cannot be cut
    profiles: tuple[Profile, ...] = ()  # smallest first; the last is the whole GPU


Grid = tuple[tuple[int, int, tuple[int, ...]], ...]
# (compute, width, starts) as they lie on the chip, smallest first
EIGHTHS: Grid = ((1, 1, (0, 1, 2, 3, 4, 5, 6)), (1, 2, (0, 2, 4, 6)), (2, 2, (0, 2, 4)), (3, 4, (0, 4)), (4, 4, (0,)), (7, 8, (0,)))
QUARTERS: Grid = ((1, 1, (0, 1, 2, 3)), (2, 2, (0, 2)), (4, 4, (0,)))


def _sliced(name: str, memory_mib: int, grid: Grid, gb: tuple[int, ...], listed: Mapping[int, float] | None = None) -> GpuType:
    """`gb`: what the profiles are called, by width: one, two, four, … slices; `listed`: GiB by width."""
    width = max(one[1] for one in grid)
    by_width = dict(zip(sorted({one[1] for one in grid}), gb, strict=True))
    listed = listed or {}

    def profile(compute: int, wide: int, starts: tuple[int, ...]) -> Profile:
        real = next(share for limit, share in REAL_SHARE if wide / width <= limit)
        gib = listed.get(wide, by_width[wide] * real)
        return Profile(f"{compute}g.{by_width[wide]}gb", compute, wide, starts, int(gib * GIB), wide in listed)

    return GpuType(name, memory_mib, width, tuple(profile(*one) for one in grid))


SLICED = (
    _sliced("A30", 24_576, QUARTERS, (6, 12, 24), {1: 5.81, 2: 11.69, 4: 23.44}),
    _sliced("A100-40GB", 40_960, EIGHTHS, (5, 10, 20, 40), {1: 4.75, 2: 9.62, 4: 19.5, 8: 39.25}),
    _sliced("A100-80GB", 81_920, EIGHTHS, (10, 20, 40, 80), {1: 9.5, 2: 19.5, 4: 39.25, 8: 78.5}),
    _sliced("H100-80GB", 81_559, EIGHTHS, (10, 20, 40, 80), {1: 9.75, 2: 19.62, 4: 39.5, 8: 79.25}),
    _sliced("H100-94GB", 95_830, EIGHTHS, (12, 24, 47, 94)),
    _sliced("H100-96GB", 97_871, EIGHTHS, (12, 24, 48, 96), {1: 11.0, 2: 23.0, 4: 46.5, 8: 93.0}),
    _sliced("RTX-PRO-6000", 97_887, QUARTERS, (24, 48, 96)),
    _sliced("H200", 143_771, EIGHTHS, (18, 35, 71, 141)),
    _sliced("B200", 183_359, EIGHTHS, (23, 45, 90, 180)),
    _sliced("GB200", 189_471, EIGHTHS, (24, 47, 95, 189)),
    _sliced("B300", 275_040, EIGHTHS, (34, 67, 135, 269)),
)
WHOLE = (
    GpuType("T4", 15_360),
    GpuType("L4", 23_034),
    GpuType("A10", 23_028),
    GpuType("RTX-3090", 24_576),
    GpuType("RTX-4090", 24_564),
    GpuType("RTX-5090", 32_607),
    GpuType("L40S", 46_068),
    GpuType("RTX-6000-ADA", 49_140),
)
TYPES: Mapping[str, GpuType] = {one.name: one for one in sorted((*SLICED, *WHOLE), key=lambda one: one.memory_mib)}


ALIASES: Mapping[str, str] = {"H100 NVL": "H100-94GB", "GH200": "H100-96GB"}  # sold under another name than the table's


def find(name: str) -> GpuType | None:
    """By its name as people and drivers write it: `h100 80gb`, `NVIDIA-H100-80GB-HBM3`; None when it is not known, or not told enough."""
    words = _words(name)
    known = {**{one: one for one in TYPES}, **ALIASES}
    meant = [(len(_words(written)), type_name) for written, type_name in known.items() if _words(written) <= words]
    return TYPES[max(meant)[1]] if meant else None


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))
