"""B04: replies were cut short when three models were asked for at once and only one fits."""

from pathlib import Path

import pytest

from .rig import Rig, fake, together


@pytest.mark.parametrize("stream", [True, False])
async def test_three_models_for_one_place_all_answer_in_full(tmp_path: Path, stream: bool) -> None:
    """Six requests for three models that exclude each other: six whole answers, and models leave only when nobody uses them."""
    models = {name: fake(vram=8000, ready_after=0.15, stream="15x0.02", body=1 << 20) for name in "abc"}
    async with Rig(tmp_path, models) as rig:
        first = [rig.chat(name, stream=stream) for name in "abc"]
        again = [rig.chat(name, stream=stream) for name in "abc"]
        replies = await together(*first, *again)

        assert [reply.done for reply in replies] == [True] * 6
        if stream:
            assert [len(reply.tokens) for reply in replies] == [15] * 6
        else:
            assert [len(reply.json["choices"][0]["message"]["content"]) for reply in replies] == [1 << 20] * 6
        assert 3 <= rig.starts() <= 6
        assert [line["outcome"] for line in rig.journal(event="end")] == ["whole"] * 6
        assert rig.journal(event="gone") == []
