"""B20: one slow start, and the model was dead until the supervisor was restarted."""

import itertools
import re
from pathlib import Path

from .rig import Reply, Rig, fake

QUICK = {"scheduling": {"backoff_first_s": 0.1, "backoff_max_s": 0.4}}


async def test_a_start_that_takes_too_long_is_told_and_the_next_one_works(tmp_path: Path) -> None:
    """504 with the time-out and the last log line, the process gone; a later request gets its answer.  Progress in the log may count."""
    short = {"healthCheckTimeout": "1s"}
    models = {
        "a": fake(start_1__ready_after=60, ready_after=0.1, log="loading tensors 12/99", config=short),
        "slow": fake(ready_after=2.2, log_every=0.2, config={**short, "progress_counts": True}),
    }
    async with Rig(tmp_path, models, config=QUICK) as rig:
        first = await rig.chat("a")
        gone = rig.processes() == []
        await rig.wait_state("a", "stopped")
        second = await rig.chat("a")

        assert first.status in (503, 504)
        assert 0.95 <= first.took_s < 15
        assert re.search(r"not ready after [1-9][0-9.]* s", first.error["message"])
        assert "loading tensors 12/99" in first.error["message"]
        assert gone
        assert second.status == 200
        assert ((await rig.chat("slow")).status, rig.starts("slow")) == (200, 1)


async def test_a_crash_loop_backs_off_and_recovers_without_anybody(tmp_path: Path) -> None:
    """Five starts that fail: pauses grow up to their cap, refusals say when to come back, the sixth start serves."""
    model = fake(start_1_5__fail="exit_at_start:7")
    async with Rig(tmp_path, {"a": model}, config=QUICK) as rig:
        refused: list[Reply] = []
        states = []
        while (reply := await rig.chat("a")).status != 200:
            refused += [reply, await rig.chat("a")]  # the second one comes into the back-off
            states.append(await rig.model("a"))
            await rig.wait_state("a", "stopped")

        assert [reply.status for reply in refused] == [503] * 10
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert rig.starts("a") == 6
        starts = [line["at"] for line in rig.journal("a", "start")]
        pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
        for pause, least in zip(pauses, [0.1, 0.2, 0.4, 0.4, 0.4], strict=True):
            assert pause >= least * 0.95
        assert [state["failures"] for state in states] == [1, 2, 3, 4, 5]
        assert all("exit code 7" in state["last_error"] for state in states)
        assert (await rig.model("a"))["state"] == "ready"
