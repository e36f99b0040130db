"""B39: an entry without a model loaded for ever."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from .rig import FE, Rig, fake


def bad_models(folder: Path) -> dict[str, object]:
    """One good and four bad entries."""
    llama = folder / "llama-server"
    llama.write_text("#!/bin/sh\nexit 1\n")
    llama.chmod(0o755)
    return {
        "good": fake(),
        "empty": {},
        "typo": {"cmd": f"{llama} --port ${{PORT}}", "modle": "/x.gguf"},
        "missing": {"cmd": f"{llama} --model /does/not/exist.gguf --port ${{PORT}}"},
        "self": {"cmd": [sys.executable, "-m", "greenroom", "serve", "--listen", "127.0.0.1:${PORT}"]},
    }


async def test_in_lenient_mode_the_good_model_works_and_the_bad_ones_say_why(tmp_path: Path) -> None:
    """503 misconfigured at once, by name, without a start; the good one serves."""
    async with Rig(tmp_path, bad_models(tmp_path), lenient=True) as rig:  # type: ignore[arg-type]
        assert (await rig.chat("good")).status == 200
        for name in ("empty", "typo", "missing", "self"):
            reply = await rig.chat(name)

            assert (reply.status, reply.error["code"]) == (503, "misconfigured"), name
            assert name in reply.error["message"]
            assert reply.took_s < 0.5
            assert (await rig.model(name))["starts"] == 0
        assert "exist.gguf" in (await rig.chat("missing")).error["message"]


async def test_in_strict_mode_it_refuses_to_start_and_names_each_line(tmp_path: Path) -> None:
    """Exit code other than 0; `empty` and `typo` by file and line, with what to write instead."""
    rig = Rig(tmp_path, bad_models(tmp_path))  # type: ignore[arg-type]
    lines = rig.config_path.read_text().splitlines()
    with pytest.raises(AssertionError, match="ended at once"):
        await rig.start_server()
    await rig.force_down()

    assert rig.exit_code not in (0, None)
    output = "".join(rig.output)
    for name, key in (("empty", '"empty"'), ("typo", '"modle"')):
        number = next(index for index, line in enumerate(lines, start=1) if key in line)
        assert f"greenroom.yaml:{number}" in output, (name, output)
    assert "Traceback" not in output


async def test_a_stranger_on_the_engines_port_is_never_taken_for_the_engine(tmp_path: Path) -> None:
    """Another program answers 200 where the engine should: the model is not ready, and no request reaches the stranger."""
    stranger_journal = tmp_path / "stranger.jsonl"
    port = 19_999 - hash(str(tmp_path)) % 900
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", str(FE), "--port", str(port), "model=stranger", f"journal={stranger_journal}"
    )
    try:
        model = fake(listen_after=30, config={"proxy": f"http://127.0.0.1:{port}", "healthCheckTimeout": "1s"})
        async with Rig(tmp_path, {"a": model}, config={"scheduling": {"backoff_first_s": 0.1}}) as rig:
            reply = await rig.chat("a")

            assert reply.status in (503, 504)
            assert (await rig.model("a"))["state"] in ("failed", "stopped")
            events = [json.loads(line)["event"] for line in stranger_journal.read_text().splitlines()]
            assert "begin" not in events
    finally:
        stranger.terminate()
        await stranger.wait()


async def test_what_was_missing_may_appear_while_others_are_served(tmp_path: Path) -> None:
    """A program that is not there yet: 503 by name; once it is there the next request starts it, and nobody else notices."""
    program = tmp_path / "late-engine"
    late = fake(wrap=lambda command: [str(program), *command])
    async with Rig(tmp_path, {"good": fake(), "late": late}) as rig:
        await rig.warm("good")
        before = await rig.chat("late")
        program.write_text('#!/bin/sh\nexec "$@"\n')
        program.chmod(0o755)
        after = await rig.chat("late")

        assert (before.status, before.error["code"]) == (503, "misconfigured")
        assert str(program) in before.error["message"]
        assert after.status == 200
        assert (rig.starts("good"), rig.journal("good", "term")) == (1, [])
