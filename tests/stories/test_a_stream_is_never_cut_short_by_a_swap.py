"""B04: replies were cut short when three models were asked for at once and only one fits."""

from pathlib import Path

from .rig import Rig, fake, together

NAMES = "abc"


async def test_three_models_for_one_place_all_answer_in_full(tmp_path: Path) -> None:
    """Six requests for three models that exclude each other: six whole answers, and models leave only when nobody uses them."""
    models = {name: fake(vram=8000, ready_after=0.15, stream="15x0.02", body=1 << 20) for name in NAMES}
    async with Rig(tmp_path, models) as rig:
        streams = await together(*(rig.chat(name, stream=True) for name in NAMES * 2))
        swapped = rig.starts()
        bodies = await together(*(rig.chat(name) for name in NAMES * 2))

        assert [(reply.done, len(reply.tokens)) for reply in streams] == [(True, 15)] * 6
        assert [(reply.done, len(reply.json["choices"][0]["message"]["content"])) for reply in bodies] == [(True, 1 << 20)] * 6
        assert 3 <= swapped <= 6
        assert rig.starts() <= swapped + 6
        # an engine may be asked to leave between its last byte and its note of it: the clients above count the answers
        assert {line["outcome"] for line in rig.journal(event="end")} == {"whole"}
        assert rig.journal(event="gone") == []
