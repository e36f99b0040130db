"""The memory book."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.budget import Book, Pool
from greenroom.core.facts import Device
from greenroom.core.stage import pools_for

DEVICES = (Device("gpu0", "gpu", 1000, headroom_mib=100), Device("gpu1", "gpu", 500))


def a_book() -> Book:
    return pools_for(DEVICES)


def free(book: Book) -> dict[str, int]:
    return {name: pool.free_mib for name, pool in book.pools.items()}


def test_what_is_booked_is_no_longer_free() -> None:
    """On every device at once; capacity less headroom is what there is."""
    book = a_book()
    assert free(book) == {"gpu0": 900, "gpu1": 500}
    book.set("m", {"gpu0": 300, "gpu1": 200})

    assert free(book) == {"gpu0": 600, "gpu1": 300}


def test_a_booking_replaces_the_earlier_one() -> None:
    """Nothing is left on a device that is not named any more."""
    book = a_book()
    book.set("m", {"gpu0": 300, "gpu1": 200})
    book.set("m", {"gpu1": 50})
    assert (free(book), dict(book.of("m"))) == ({"gpu0": 900, "gpu1": 450}, {"gpu1": 50})
    book.set("m", {})

    assert (free(book), dict(book.of("m"))) == ({"gpu0": 900, "gpu1": 500}, {})


def test_what_it_holds_itself_counts_as_room_for_it() -> None:
    """A sleeper that wakes needs only the difference."""
    book = a_book()
    book.set("m", {"gpu1": 400})

    assert (book.fits({"gpu1": 500}, "m"), book.fits({"gpu1": 501}, "m"), book.fits({"gpu1": 200}, "other")) == (True, False, False)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.dictionaries(st.sampled_from(("gpu0", "gpu1", "gone")), st.integers(0, 300)))))
def test_the_sums_are_those_of_the_holders(script: list[tuple[str, dict[str, int]]]) -> None:
    """Whatever is booked and booked anew; devices that do not exist hold nothing."""
    book, naive = a_book(), {}
    for name, mib in script:
        book.set(name, mib)
        naive[name] = mib
        book.check()

    for device in ("gpu0", "gpu1"):
        assert sum(mib.get(device, 0) for mib in naive.values()) == book.pools[device].booked_mib


def test_a_false_sum_is_a_broken_invariant() -> None:
    """The check names the device and both numbers."""
    book = a_book()
    book.set("m", {"gpu0": 300})
    book.pools["gpu0"].booked_mib = 299

    with pytest.raises(AssertionError, match="gpu0: booked 299 MiB, holders sum to 300 MiB"):
        book.check()


@pytest.mark.parametrize(("total", "outside", "counted"), [(None, 50, 50), (1000, 50, 50), (1200, 50, 0), (1200, 250, 50)])
def test_outside_memory_counts_where_it_eats_into_the_plan(total: int | None, outside: int, counted: int) -> None:
    """A capacity below the physical size leaves the difference to others."""
    assert counted == Pool(Device("gpu0", "gpu", 1000, total_mib=total)).outside_counted_mib(outside)


def test_a_device_stays_until_it_is_empty() -> None:
    """New budgets are taken over at once; what is gone leaves when nobody holds it, what is new joins."""
    book = a_book()
    book.set("m", {"gpu0": 300})
    book.replace_devices((Device("gpu2", "gpu", 700),))
    assert {"gpu0", "gpu2"} == set(book.pools)
    book.set("m", {})
    book.replace_devices((Device("gpu2", "gpu", 800),))

    assert free(book) == {"gpu2": 800}
