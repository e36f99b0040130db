"""B56: two models threw each other out at every message, and all that anybody saw was "slow".

Calm, and switches that are far apart, need hours: tests/core/test_thrash.py plays those.
"""

from pathlib import Path

from .rig import Rig, fake

ROUNDS = 6
SWITCHES_MAX = 6


async def take_turns(rig: Rig) -> list[str]:
    """A title is asked for after each turn of a chat; who of both was started for it."""
    for _ in range(ROUNDS):
        await rig.warm("chat", "title")
    return [line["model"] for line in rig.journal(event="start")]


def lines_of(rig: Rig, word: str) -> list[str]:
    return [line for line in (rig.state_dir / "greenroom.log").read_text().splitlines() if word in line]


async def test_a_pair_is_named_within_six_switches(tmp_path: Path) -> None:
    """Both by name, what it cost, and ways out; once in events and log, however long it goes on; as a share in the figures."""
    models = {"chat": fake(vram=8000, ready_after=0.3), "title": fake(vram=5000, ready_after=0.15)}
    async with Rig(tmp_path, models) as rig:
        starts = await take_turns(rig)
        status = await rig.status()
        events = await rig.events()
        thrash = [event for event in events if event["kind"] == "thrash"]
        ratio = next(
            float(line.rpartition(" ")[2])
            for line in (await rig.api("GET", "/metrics")).body.decode().splitlines()
            if line.startswith('greenroom_device_swap_ratio{device="bench0"}')
        )

        assert starts == ["chat", "title"] * ROUNDS
        assert len(thrash) == 1
        assert thrash[0]["level"] == "warning"
        assert len([one for one in events[: events.index(thrash[0])] if one["kind"] == "ready"]) - 1 <= SWITCHES_MAX
        text = thrash[0]["text"]
        assert text.startswith("chat and title take turns on bench0: ")
        assert "swaps in" in text
        assert "holding all needs 2.9 GiB more" in text
        assert "pin one" in text
        assert [(one["models"], one["device"]) for one in status["thrash"]] == [(["chat", "title"], "bench0")]
        assert "take turns on bench0" in status["advice"]["headline"]["text"]
        assert len(lines_of(rig, "take turns")) == 1
        assert 0 < ratio < 1


async def test_those_who_fit_are_not_told(tmp_path: Path) -> None:
    """The same turns with room for both: one start each, and no word."""
    models = {"chat": fake(vram=8000, ready_after=0.3), "title": fake(vram=5000, ready_after=0.15)}
    async with Rig(tmp_path, models, budget_mib=14_000) as rig:
        assert await take_turns(rig) == ["chat", "title"]
        assert [event for event in await rig.events() if event["kind"] == "thrash"] == []


async def test_another_name_for_the_same_model_ends_it(tmp_path: Path) -> None:
    """The way out that costs nothing: `title` is another name of `chat`."""
    async with Rig(tmp_path, {"chat": fake(vram=8000, config={"aliases": ["title"]})}) as rig:
        assert await take_turns(rig) == ["chat"]
        assert [event for event in await rig.events() if event["kind"] == "thrash"] == []
