"""An engine that dies before the first byte costs its client nothing, once."""

from pathlib import Path

from .rig import Rig, fake


async def test_a_request_whose_engine_dies_before_the_first_byte_is_tried_once_more(tmp_path: Path) -> None:
    """One death: a fresh engine answers and the client never knows.  Two: 502, and no third try."""
    models = {
        "once": fake(start_1__fail="die_before_byte"),
        "streams": fake(start_1__fail="die_before_byte", stream="5x0.01"),
        "always": fake(fail="die_before_byte"),
    }
    async with Rig(tmp_path, models) as rig:
        once = await rig.chat("once")
        stream = await rig.chat("streams", stream=True)
        always = await rig.chat("always")

        assert (once.status, rig.starts("once")) == (200, 2)
        assert (stream.done, len(stream.tokens), rig.starts("streams")) == (True, 5, 2)
        assert (always.status, rig.starts("always")) == (502, 2)
        assert always.error["message"]
