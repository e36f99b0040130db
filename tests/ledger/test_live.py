"""The ledger of a real server: what clients did is in it, and nothing of what they said."""

from __future__ import annotations

from pathlib import Path

from greenroom.core.facts import Admit, RequestArrived, Start
from greenroom.core.scheduler import Scheduler
from greenroom.ledger import codec
from greenroom.ledger.store import Ledger
from tests.stories.rig import Rig, fake, together, vllm

SECRET = "marmalade-sandwich-4711"


def ledger_of(rig: Rig) -> Path:
    (found,) = rig.state_dir.rglob("journal.sqlite")
    return found


async def test_requests_of_a_swap_are_told_from_both_sides(tmp_path: Path) -> None:
    """Path, status, waits, start and who was there before; and no prompt anywhere, nor a query."""
    model = fake(vram=8000, ready_after=0.2)
    async with Rig(tmp_path, {"a": model, "b": model}) as rig:
        messages = [{"role": "user", "content": SECRET}]
        await rig.chat("a", messages=messages)
        await together(rig.chat("a", messages=messages, stream=True), rig.chat("b", messages=messages))
        asked = await rig.ask("a", path=f"/v1/chat/completions?secret={SECRET}", messages=messages)
        await asked.rest()
        state = ledger_of(rig).parent
    for path in (one for one in state.rglob("*") if one.is_file()):
        if path.name.startswith("journal.sqlite"):
            assert SECRET.encode() not in path.read_bytes()
    ledger = Ledger(state / "journal.sqlite")
    try:
        rows = sorted(ledger.find.requests().rows, key=lambda row: row.at)
        assert [row.outcome for row in rows] == ["ok"] * 4
        assert {row.path for row in rows} == {"/v1/chat/completions"}
        assert all(row.status == 200 and row.first_byte_s is not None and row.duration_s > 0 for row in rows)
        first = rows[0]
        assert (first.model, first.start, first.generation, first.before) == ("a", "cold", 1, "")
        assert 0.1 < first.load_s < 5.0
        (swapped,) = [row for row in rows if row.model == "b"]
        assert (swapped.start, swapped.before) == ("cold", "a")
        starts = ledger.find.transitions(kind="start").rows
        assert {row.model for row in starts} == {"a", "b"}
        assert all(row.ok and row.took_s > 0.1 and row.mib for row in starts)
        assert any(row.evicted_for == "b" for row in ledger.find.transitions(model="a", kind="stop").rows)
        (boot,) = ledger.find.boots()
        setup = codec.setup_from(boot.setup)
        assert {one.id for one in setup.models} == {"a", "b"}
        device = setup.devices[0].id
        assert ledger.find.samples(0.0, 1e12, device=device) or not setup.devices[0].measured
        assert SECRET not in "\n".join(map(str, [*ledger.find.events(), *ledger.find.boots()]))  # these lie packed in the file
        assert [row.kind for row in ledger.find.events()].count("RequestArrived") == 4
    finally:
        ledger.close()


async def test_a_live_journal_replays_to_the_same_actions(tmp_path: Path) -> None:
    """The scheduler, given the recorded settings and events again, says again what it said."""
    async with Rig(tmp_path, {"a": vllm(sleep=1, sleep_after=0.2), "b": fake(vram=8000)}) as rig:
        await rig.chat("a")
        await rig.wait_state("a", "asleep")
        await together(*(rig.chat(name) for name in "abba"))
        state = ledger_of(rig).parent
    ledger = Ledger(state / "journal.sqlite")
    try:
        (boot,) = ledger.find.boots()
        scheduler = Scheduler(codec.setup_from(boot.setup), boot.clock)
        kinds = set()
        for row in ledger.find.events(run=boot.boot):
            event = codec.event_from(row.event)
            assert event is not None
            said = codec.actions_from(row.actions)
            assert tuple(scheduler.handle(event)) == said
            kinds |= {type(one) for one in (event, *said)}
        assert {RequestArrived, Admit, Start} <= kinds
    finally:
        ledger.close()
