"""A container did not start, and the reason stood in a log that nobody saw."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from .boxes import IMAGE, Dock
from .rig import Rig, fake, until

NEW = "registry.example/new:2"
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("podman", f"podman cannot pull {NEW}: initializing source docker://{NEW}: reading manifest latest in {NEW}: manifest unknown"),
        ("docker", f"docker cannot pull {NEW}: manifest for {NEW} not found: manifest unknown: manifest unknown"),
    ],
)
async def test_a_pull_that_fails_is_told_in_its_words(tmp_path: Path, kind: str, words: str) -> None:
    """To the client, and in the model's log; other models are served."""
    dock = Dock(tmp_path, kind)
    async with Rig(tmp_path, {"a": dock.engine(container={"image": NEW}), "b": dock.engine()}, env=dock.env) as rig:
        reply = await rig.chat("a")

        assert reply.status == 503
        assert words in reply.error["message"]
        assert f"{kind} pulls {NEW}" in (await rig.api("GET", "/api/models/a/logs")).body.decode()
        assert (dock.calls("run"), dock.boxes()) == ([], [])
        assert (await rig.chat("b")).status == 200


async def test_a_long_pull_is_no_long_start(tmp_path: Path) -> None:
    """It takes longer than a start may, is seen in the log, and what is learned of the start does not hold it."""
    dock = Dock(tmp_path)
    (dock.state / "registry").write_text(NEW + "\n")
    dock.faults(pull="slow:9")
    model = dock.engine(container={"image": NEW}, config={"healthCheckTimeout": "8s"})
    async with Rig(tmp_path, {"a": model}, env=dock.env) as rig:
        reply = await rig.chat("a")

        assert (reply.status, len(dock.calls("pull"))) == (200, 1)
        assert reply.took_s > 9
        assert "Writing manifest to image destination" in (await rig.api("GET", "/api/models/a/logs")).body.decode()
        ready = await rig.wait_kind("a", "ready")
        assert re.match(r"ready after (?:\d+ ms|[0-7]\.\d+ s)", ready), ready


async def test_a_pull_has_its_own_limit(tmp_path: Path) -> None:
    """Then it is ended, and the sentence names the key."""
    dock = Dock(tmp_path)
    dock.faults(pull="hang")
    async with Rig(tmp_path, {"a": dock.engine(container={"image": NEW, "pull_timeout": "1s"})}, env=dock.env) as rig:
        reply = await rig.chat("a")

        assert reply.status == 503
        assert "was not pulled within 1 s (container.pull_timeout)" in reply.error["message"]


async def test_a_pull_nobody_wants_any_more_is_called_off(tmp_path: Path) -> None:
    """An unload ends it at once."""
    dock = Dock(tmp_path)
    dock.faults(pull="hang")
    async with Rig(tmp_path, {"a": dock.engine(container={"image": NEW})}, env=dock.env) as rig:
        asking = asyncio.create_task(rig.chat("a"))
        await until(lambda: bool(dock.calls("pull")), "it pulls")
        began_at = time.monotonic()
        unloaded = await rig.unload("a", force=True)
        await asking

        assert unloaded.status == 200
        assert time.monotonic() - began_at < 5
        assert (await rig.model("a"))["state"] == "stopped"


async def test_when_an_image_is_pulled_is_the_operators_choice(tmp_path: Path) -> None:
    """`never` says what is missing, `always` asks the registry before each start."""
    dock = Dock(tmp_path)
    (dock.state / "registry").write_text(IMAGE + "\n")
    models = {
        "never": dock.engine(container={"image": NEW, "pull": "never"}),
        "always": dock.engine(container={"pull": "always"}),
        "missing": dock.engine(),
    }
    async with Rig(tmp_path, models, env=dock.env) as rig:
        refused = await rig.chat("never")
        assert f"the image {NEW} is not here, and `pull: never` forbids to fetch it; `podman pull {NEW}`" in refused.error["message"]
        assert dock.calls("pull") == []
        assert (await rig.chat("missing")).status == 200
        assert dock.calls("pull") == []
        assert (await rig.chat("always")).status == 200
        assert dock.calls("pull") == [["pull", IMAGE]]
        assert {call[call.index("--pull") + 1] for call in dock.calls("run")} == {"never"}


async def test_a_name_taken_by_an_older_run_is_freed(tmp_path: Path) -> None:
    """One that could not be found at the start, by its label; a stranger's container of that name is left alone."""
    dock = Dock(tmp_path)
    async with Rig(tmp_path, {"a": dock.engine(), "b": dock.engine()}, env=dock.env) as rig:
        await rig.warm("a")
        (box,) = dock.boxes()
        box["State"] |= {"Status": "exited", "Running": False, "Pid": 0}
        await rig.unload("a")
        name = box["Name"].rpartition("-")[0]
        for generation in range(2, 30):
            dock.plant({**box, "Id": f"{generation:064x}", "Name": f"{name}-{generation}"})
        assert (await rig.chat("a")).status == 200

        strange = {**box, "Labels": {}}
        for generation in range(1, 60):
            dock.plant({**strange, "Id": f"{100 + generation:064x}", "Name": f"{name.removesuffix('-a')}-b-{generation}"})
        reply = await rig.chat("b")
        assert reply.status == 503
        assert "is taken by a container that is not greenroom's; remove it (`podman rm --force greenroom-" in reply.error["message"]
        assert len([one for one in dock.boxes() if not one["Labels"]]) == 59
        await rig.unload("a")
        for path in (dock.state / "containers").glob("*.json"):
            path.unlink()


async def test_a_docker_service_that_is_down_is_told_with_what_to_do(tmp_path: Path) -> None:
    """At the start as a warning, to the client as the reason; when it is up again the model starts."""
    dock = Dock(tmp_path, "docker")
    dock.faults(**{"*": "down"})
    async with Rig(tmp_path, {"a": dock.engine(), "b": fake()}, env=dock.env) as rig:
        warnings = [line for line in rig.output if DOWN in line]
        assert len(warnings) == 1
        reply = await rig.chat("a")
        assert reply.status == 503
        assert f"{DOWN}; start the docker service, and see that this user may use it (group docker)" in reply.error["message"]
        assert (await rig.chat("b")).status == 200
        dock.faults()
        assert (await rig.load("a")).status == 200


async def test_a_program_that_its_image_lacks_is_told(tmp_path: Path) -> None:
    """As for a process: the command was not found; and the container that never ran is removed."""
    dock = Dock(tmp_path)
    entry = {"cmd": ["no-such-program", "--port", "${PORT}"], "memory": "10MiB", "device": "bench0"}
    async with Rig(tmp_path, {"a": {**entry, "container": {"image": IMAGE}}}, env=dock.env) as rig:
        reply = await rig.chat("a")

        assert reply.status == 503
        assert "not found" in reply.error["message"]
        assert dock.boxes() == []


async def test_no_secret_of_an_engine_is_on_the_command_line_of_its_container(tmp_path: Path) -> None:
    """Its value travels in the environment of the client, and is masked in the log."""
    dock = Dock(tmp_path)
    model = dock.engine(config={"env": {"HF_TOKEN": "hf_verysecret"}}, env="HF_TOKEN")
    async with Rig(tmp_path, {"a": model}, env=dock.env) as rig:
        await rig.warm("a")

        assert "hf_verysecret" not in json.dumps(dock.calls())
        assert rig.journal("a", "start")[0]["env"] == {"HF_TOKEN": "hf_verysecret"}


async def test_a_pull_takes_no_room_from_a_model_that_serves(tmp_path: Path) -> None:
    """While an image is fetched nothing is booked for it: who is ready stays, and is answered at once."""
    dock = Dock(tmp_path)
    (dock.state / "registry").write_text(NEW + "\n")
    dock.faults(pull="slow:4")
    models = {"a": dock.engine(8000, container={"image": NEW}), "b": dock.engine(8000)}
    async with Rig(tmp_path, models, env=dock.env) as rig:
        await rig.warm("b")
        asked = await rig.ask("a")
        await rig.wait_kind("a", "fetching")
        assert (await rig.model("a"))["fetch"]["reference"] == NEW
        reply = await rig.chat("b")
        assert (reply.status, reply.headers["x-greenroom-start"]) == (200, "hot")
        assert (await rig.model("b"))["state"] == "ready"
        assert (await asked.rest()).status == 200
        assert (await rig.model("b"))["evictions"] == 1
