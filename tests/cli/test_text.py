"""Words for people."""

from __future__ import annotations

import pytest

from greenroom.cli import text


@pytest.mark.parametrize(
    ("mib", "words"),
    [
        (None, "-"),
        (0, "0 MiB"),
        (120 / 1024, "120 KiB"),
        (0.7, "1 MiB"),
        (512, "512 MiB"),
        (1023, "1023 MiB"),
        (1024, "1.0 GiB"),
        (4403, "4.3 GiB"),
        (2_000_000, "1,953 GiB"),
    ],
)
def test_sizes(mib: int | None, words: str) -> None:
    """MiB below one GiB, then GiB; what would be 0 MiB in KiB; unknown is a dash."""
    assert text.size(mib) == words


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [
        (0, "0 s", "0 s"),
        (0.41, "0.4 s", "0 s"),
        (9.94, "9.9 s", "10 s"),
        (9.96, "10 s", "10 s"),
        (59.4, "59 s", "59 s"),
        (59.6, "1 min", "1 min"),
        (250, "4 min 10 s", "4 min"),
        (3600, "1 h", "1 h"),
        (7500, "2 h 5 min", "2 h"),
        (86400, "1 d", "1 d"),
        (273600, "3 d 4 h", "3 d"),
    ],
)
def test_durations(seconds: float, long: str, short: str) -> None:
    """Two units at most; one in columns."""
    assert (text.duration(seconds), text.brief(seconds)) == (long, short)


def test_a_bar_is_full_only_at_the_end() -> None:
    """99.9 % leaves a gap; more than all, or less than nothing, stays inside."""
    drawn = [text.bar(fraction, 10) for fraction in (-1, 0, 0.5, 0.999, 1, 7)]
    assert drawn == ["[░░░░░░░░░░]", "[░░░░░░░░░░]", "[█████░░░░░]", "[█████████░]", "[██████████]", "[██████████]"]
    assert text.bar(0.62, 6, ascii=True) == "[####..]"


@pytest.mark.parametrize(
    ("since_s", "expected_s", "words"),
    [
        (4.96, 3.04, "[████░░] 62 % about 3 s"),
        (0.0, 12.0, "[░░░░░░] 0 % about 12 s"),
        (300.0, 300.0, "[███░░░] 50 % about 5 min"),
        (12.5, 0.4, "[█████░] 97 % less than 1 s"),
        (13.0, 0.0, "[█████░] 99 % any moment"),
        (13.0, -4.0, "[█████░] 99 % any moment"),
        (2.5, None, "since 2.5 s"),
    ],
)
def test_the_loading_bar_tells_how_far_and_how_long(since_s: float, expected_s: float | None, words: str) -> None:
    """Never 100 % before it is ready; no estimate, no invented one."""
    assert text.loading(since_s, expected_s, 6) == words


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("plain-name:8b", "plain-name:8b"),
        ("mü 模型 🦙", "mü 模型 🦙"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("bell\x07del\x7fcsi\x9b31m", r"bell\x07del\x7fcsi\x9b31m"),
        ("rtl\u202egnp.exe", r"rtl\u202egnp.exe"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("line\u2028sep", r"line\u2028sep"),
        ("half\ud800", r"half\ud800"),
        ("tag\U000e0041", r"tag\U000e0041"),
    ],
)
def test_hostile_text_is_shown_not_obeyed(hostile: str, shown: str) -> None:
    """Nothing from outside moves the cursor, hides or reorders text."""
    assert text.safe(hostile) == shown


def test_log_lines_lose_their_colours_and_keep_their_tabs() -> None:
    """Colours are dropped; other sequences are shown."""
    assert text.safe_line("\x1b[1;32mok\x1b[0m\tgpu\x1b]0;title\x07\r\n") == "ok\tgpu\\x1b]0;title\\x07"


def test_columns_count_wide_characters() -> None:
    """CJK names take two cells each, combining marks none, so the next column stays in line."""
    lines = text.table(("NAME", "N"), [("模型", "1"), ("e\u0301t", "22")], frozenset({1}))
    assert lines == ["NAME   N", "模型   1", "e\u0301t    22"]
    assert text.cut("模型模型", 5) == "模型…"
    assert text.cut("abcdef", 6) == "abcdef"


def test_clock_times_carry_the_date_only_when_it_is_another_day() -> None:
    """Today is implied."""
    noon = 1_700_049_600.0
    assert len(text.clock(noon, noon + 60)) == len("12:00:00")
    assert len(text.clock(noon - 200_000, noon)) == len("2023-11-13 12:00:00")


def test_wrapped_lines_keep_every_word_while_there_are_lines() -> None:
    """Broken between words; the last line tells that something is missing; a word that is too long is cut."""
    assert text.wrapped("the actor waits", 9, 3) == ["the actor", "waits"]
    assert text.wrapped("the actor waits for it", 9, 2) == ["the actor", "waits fo…"]
    assert text.wrapped("incomprehensible", 6, 2) == ["incom…"]
    assert text.wrapped("", 6, 2) == [""]
