"""What the server takes from the store: only what its configuration asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.model import Config, ModelConfig, PullConfig
from greenroom.serve.fetching import Files
from greenroom.serve.storeroom import Storeroom
from greenroom.store.facts import Refused
from greenroom.store.library import Library
from greenroom.store.references import parse
from tests.store.models import gguf
from tests.store.servers import Fake
from tests.store.test_signatures import MINE, OTHERS, by, simple
from tests.store.test_signatures import fake as fake  # fixtures
from tests.store.test_signatures import public as public


def config_of(tmp_path: Path, *models: ModelConfig) -> Config:
    return Config(str(tmp_path / "greenroom.yaml"), models)


def model(reference: str, **options: str) -> ModelConfig:
    return ModelConfig("a", ("engine", "${MODEL_PATH}"), reference=reference, pull_options=PullConfig(**options))  # type: ignore[arg-type]


async def test_what_a_key_has_not_signed_is_not_served_though_it_is_here(fake: Fake, public: Path, tmp_path: Path) -> None:
    """Fetched before anybody asked for a signature: it is asked for now, refused, and served once the right key has signed it."""
    about, reference = fake.hold("m", ("m.gguf", gguf())), f"oci://{fake.host}/m:v1"
    room, asks = Storeroom(Library(tmp_path / "store")), model(reference, verify_key=str(public))
    free, strict = config_of(tmp_path, model(reference)), config_of(tmp_path, asks)
    room.resolve(free)
    await room.pull(room.absent["a"], lambda told: None)
    assert not room.resolve(free).models[0].misconfigured

    for sign in (None, OTHERS):
        if sign is not None:
            simple(fake, about, by(sign))
        assert "not here yet" in room.resolve(strict).models[0].misconfigured
        assert room.absent == {"a": Files(parse(reference), asks.pull_options)}
        assert not room.changed("a")  # or it would be planned anew for each request
        with pytest.raises(Refused, match="sign"):
            await room.pull(room.absent["a"], lambda told: None)
    simple(fake, about, by(MINE))
    await room.pull(room.absent["a"], lambda told: None)
    assert room.changed("a")
    assert not room.resolve(strict).models[0].misconfigured
    assert (room.absent, room.changed("a")) == ({}, False)


async def test_what_cannot_be_signed_is_told_and_never_fetched(public: Path, tmp_path: Path, tiny_chat: Path) -> None:
    """A file of this host, and one of the hub."""
    library = Library(tmp_path / "store")
    library.adopt(parse(str(tiny_chat)))
    for reference in (str(parse(str(tiny_chat))), "hf://o/r:Q4_K_M"):
        room = Storeroom(library)
        config = config_of(tmp_path, model(reference, verify_key=str(public)))
        assert "cannot be signed, and verify_key asks for it" in room.resolve(config).models[0].misconfigured
        assert (room.absent, room.changed("a")) == ({}, False)


async def test_a_server_that_is_offline_asks_nobody(fake: Fake, tmp_path: Path) -> None:
    """Told in the configuration, without the environment."""
    fake.hold("m", ("m.gguf", gguf()))
    room = Storeroom(Library(tmp_path / "store"))
    room.resolve(
        config_of(tmp_path, ModelConfig("a", ("engine",), reference=f"oci://{fake.host}/m:v1", pull_options=PullConfig(offline=True)))
    )
    with pytest.raises(Exception, match="nobody is asked while offline"):
        await room.pull(room.absent["a"], lambda told: None)
    assert fake.asked == []
