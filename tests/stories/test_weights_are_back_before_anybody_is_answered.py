"""B31: after a sleep that dropped the weights, an engine answered rubbish."""

from pathlib import Path

import pytest

from .rig import Rig, vllm

ROUNDS = 10
LEVEL_2 = ["sleep 2", "wake weights", "reload", "wake kv_cache", "forget"]


async def test_a_model_without_its_weights_answers_nobody(tmp_path: Path) -> None:
    """Ten rounds at level 2: weights mapped, read again, cache mapped, cache forgotten, canary answered, and only then the client."""
    async with Rig(tmp_path, {"a": vllm(sleep=2)}) as rig:
        texts = [(await rig.chat("a", temperature=0)).text]
        for _ in range(ROUNDS):
            assert (await rig.put_to_sleep("a")).status == 200
            reply = await rig.chat("a", temperature=0)
            assert (reply.status, reply.headers["x-greenroom-start"]) == (200, "wake")
            texts.append(reply.text)

        assert len(set(texts)) == 1
        assert texts[0]
        assert rig.moves("a") == ["start", *ROUNDS * LEVEL_2]
        answered = [line["target"] for line in rig.inferences("a")]
        assert answered == (ROUNDS + 1) * ["/v1/completions", "/v1/chat/completions"]
        now = await rig.model("a")
        assert (now["sleeps"], now["wakes"], now["wake_failures"], now["starts"]) == (ROUNDS, ROUNDS, 0, 1)


@pytest.mark.parametrize(
    ("knob", "hazard"),
    [
        ("on_wake", "garbage*1"),
        ("on_reload", "no_load*1"),
        ("on_first", "die:139*1"),
        ("on_first", "500*1"),
        ("on_first", "garbage*1"),
        ("on_wake", "500*1"),
        ("on_wake_kv", "500*1"),
        ("on_reload", "500*1"),
    ],
)
async def test_a_wake_that_went_wrong_costs_its_client_a_cold_start_and_nothing_else(tmp_path: Path, knob: str, hazard: str) -> None:
    """Rubbish, a death at the first inference, an error: it is started anew, the request that waited is served, and it is counted."""
    async with Rig(tmp_path, {"a": vllm(sleep=2, **{knob: hazard})}) as rig:
        before = await rig.chat("a", temperature=0)
        await rig.put_to_sleep("a")
        after = await rig.chat("a", temperature=0, stream=True)

        assert (after.done, after.text, after.headers["x-greenroom-start"]) == (True, before.text, "cold")
        now = await rig.model("a")
        assert (now["starts"], now["wake_failures"], now["failures"], now["sleep"]["off"]) == (2, 1, 0, "")
        assert "could not be woken" in await rig.why("a")
