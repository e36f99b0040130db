"""What `greenroom pull` can be told of a registry, the server can be told under `pull`: a real one with its own authority."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.host.ports import free_port
from greenroom.store.library import Library
from greenroom.store.pull import Options
from greenroom.store.push import Pusher, loose
from greenroom.store.references import parse
from tests.store.servers import Real, docker_registry

from .rig import Fake, Rig, fake


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with docker_registry(tmp_path_factory.mktemp("registry"), free_port(None, ()), tls=True) as real:
        yield real


@pytest.fixture
async def place(registry: Real, tmp_path: Path, tiny_chat: Path) -> str:
    place = f"oci://{registry.host}/tiny/chat:v1"
    await Pusher(Library(tmp_path / "unused"), Options(tls_ca=registry.ca)).push(loose(tiny_chat), parse(place))
    return place


def from_there(place: str, **pull: object) -> Fake:
    return fake(config={"model": place, "env": {"WEIGHTS": "${MODEL_PATH}"}, **({"pull": pull} if pull else {})})


def rig(tmp_path: Path, **models: Fake) -> Rig:
    return Rig(tmp_path, models, env={"GREENROOM_MODELS": str(tmp_path / "models")})


async def test_an_authority_that_is_named_is_believed(registry: Real, place: str, tmp_path: Path) -> None:
    """Without it the fetch fails and says why; a reload that names it is tried at once, not after the pause of a failure."""
    async with rig(tmp_path, a=from_there(place)) as stage:
        refused = await stage.chat("a")
        assert (refused.status, refused.error["code"]) == (503, "fetch_failed")
        assert "certificate" in refused.error["message"]
        stage.write_config({"a": from_there(place)}, pull={"tls_ca": str(registry.ca)})
        await stage.reloaded()
        assert (await stage.chat("a")).status == 200
        assert (await stage.kinds("a")).count("fetched") == 1


async def test_one_model_is_fetched_in_its_own_way(place: str, tmp_path: Path) -> None:
    """What is said of it counts for no other, also where both come from one place."""
    models = {
        "small": from_there(place, tls_verify=False, max_size="1KiB"),
        "strict": from_there(place),
        "a": from_there(place, tls_verify=False),
    }
    async with rig(tmp_path, **models) as stage:
        assert "that are allowed: nothing was fetched" in (await stage.chat("small")).error["message"]
        assert "certificate" in (await stage.chat("strict")).error["message"]
        assert (await stage.chat("a")).status == 200
        assert (await stage.chat("strict")).status == 200  # it is here now, and asks for no more
