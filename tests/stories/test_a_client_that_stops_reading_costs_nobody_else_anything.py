"""A client stopped reading its answer: the engine was taken for stuck and ended, and everybody's streams with it."""

from pathlib import Path

from .rig import Rig, fake

BUSY_S = 1.0
LARGE = {"body": 40 << 20}  # more than kernels take
STEADY = {"stream": f"{int(3 * BUSY_S / 0.1)}x0.1"}


async def test_an_engine_that_a_client_holds_back_is_not_ended_for_its_silence(tmp_path: Path) -> None:
    """Others go on, and the rest of the large answer is there when its client reads again."""
    models = {"m": fake(config={"busy_timeout": f"{BUSY_S}s"})}
    async with Rig(tmp_path, models) as rig:
        idle = await rig.ask("m", fe=LARGE)
        steady = await rig.chat("m", stream=True, fe=STEADY)
        large = await idle.rest()

        assert (steady.done, large.done) == (True, True)
        assert rig.starts("m") == 1
