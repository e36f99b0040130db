"""An engine that dies before the first byte costs its client nothing, once."""

from pathlib import Path

from .rig import Rig, fake


async def test_a_request_whose_engine_dies_before_the_first_byte_is_tried_once_more(tmp_path: Path) -> None:
    """One death: a fresh engine answers and the client never knows.  Two: 502, and no third try."""
    models = {"once": fake(start_1__fail="die_before_byte"), "always": fake(fail="die_before_byte")}
    async with Rig(tmp_path, models) as rig:
        once = await rig.chat("once")
        always = await rig.chat("always")

        assert (once.status, rig.starts("once")) == (200, 2)
        assert (always.status, rig.starts("always")) == (502, 2)
        assert always.error["message"]


async def test_a_stream_is_tried_once_more_too(tmp_path: Path) -> None:
    """The retried answer is whole."""
    async with Rig(tmp_path, {"a": fake(start_1__fail="die_before_byte", stream="5x0.01")}) as rig:
        reply = await rig.chat("a", stream=True)

        assert (reply.done, len(reply.tokens)) == (True, 5)
