"""B39: an entry without a model loaded for ever."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .rig import FE, Rig, fake, until


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
            assert reply.took_s < 5
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


async def test_a_card_that_is_gone_takes_only_its_own_models_down(tmp_path: Path) -> None:
    """With --lenient: the others serve, also after a reload; what names it is refused by name, and told so."""
    bad = fake(config={"device": "gpu7", "pin": True})
    async with Rig(tmp_path, {"good": fake(), "bad": bad}, lenient=True) as rig:
        for _ in range(2):
            assert (await rig.chat("good")).status == 200
            reply = await rig.chat("bad")
            assert (reply.status, reply.error["code"]) == (503, "misconfigured")
            assert "there is no device 'gpu7' here" in reply.error["message"]
            assert "there is no device 'gpu7' here" in (await rig.model("bad"))["blocked"]
            rig.reload()
            await until(lambda: any("configuration read again" in line for line in rig.output), "the reload")
        assert (await rig.load("bad")).status == 503
        assert rig.starts("good") == 1


async def test_in_strict_mode_a_card_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """As `check` says it, with exit code 2."""
    rig = Rig(tmp_path, {"good": fake(), "bad": fake(config={"device": "gpu7"})})
    with pytest.raises(AssertionError, match="there is no device 'gpu7' here"):
        await rig.start_server()
    await rig.force_down()

    assert rig.exit_code == 2


def late(program: Path, **more: Any) -> Any:
    """A model whose program is not there yet."""
    return fake(wrap=lambda command: [str(program), *command], config=more)


def install(program: Path) -> None:
    new = program.with_suffix(".new")
    new.write_text('#!/bin/sh\nexec "$@"\n')
    new.chmod(0o755)
    new.rename(program)


async def test_what_is_missing_is_told_before_anybody_asks(tmp_path: Path) -> None:
    """Status, why and refusal say the same, with the name once; a start that is the first to see it changes what is told."""
    program = tmp_path / "late-engine"
    async with Rig(tmp_path, {"late": late(program)}) as rig:
        lacks = f"the program {str(program)!r} is not an executable file; install it or write its full path"
        assert (await rig.model("late"))["blocked"] == lacks
        assert f"Stopped, and cannot be started: {lacks}." in await rig.why("late")
        assert (await rig.chat("late")).error["message"] == f"late is misconfigured: {lacks}"
        assert any(f"late: {lacks}" in line for line in rig.output)
        assert not any("late: late:" in line for line in rig.output)

        install(program)
        assert (await rig.load("late")).status == 200
        assert (await rig.model("late"))["blocked"] == ""
        await rig.unload("late")
        program.unlink()
        assert (await rig.chat("late")).status == 503
        blocked = await rig.model("late")

        assert (blocked["blocked"], (await rig.chat("late")).error["code"]) == (lacks, "misconfigured")


async def test_a_pinned_model_comes_in_when_what_it_lacked_is_there(tmp_path: Path) -> None:
    """Nobody asks for it, and until then nobody starts it."""
    program = tmp_path / "late-engine"
    async with Rig(tmp_path, {"late": late(program, pin=True)}) as rig:
        assert (await rig.model("late"))["blocked"]
        install(program)
        ready = await rig.wait_state("late", "ready")

        assert (ready["blocked"], ready["starts"]) == ("", 1)
        assert await rig.kinds("late") == ["mended", "starting", "ready"]


async def test_a_model_that_never_comes_up_says_so_when_its_back_off_is_over(tmp_path: Path) -> None:
    """Not only that the next request starts it."""
    async with Rig(tmp_path, {"a": fake(fail="exit_at_start:3")}, config={"scheduling": {"backoff_first_s": 0.05}}) as rig:
        assert (await rig.chat("a")).status == 503
        told = await rig.wait_state("a", "stopped")

        assert (told["failing"], told["failures"], told["blocked"]) == (True, 1, "")
        assert "Stopped; it failed once, last: " in await rig.why("a")


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
