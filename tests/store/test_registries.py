"""The real docker-registry, plain, with TLS of a private authority, and with a password; and the tools that others use with it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from greenroom.demo_models import find_smollm2
from greenroom.store.facts import LAYOUTS, NotFound, Refused, Stored, Unreachable
from greenroom.store.library import Library
from greenroom.store.pull import Options, Puller, source_of
from greenroom.store.push import Pusher, loose
from greenroom.store.references import parse
from tests.validators import tool

from .models import gguf, safetensors
from .servers import PASSWORD, USER, Real, docker_registry, run

KINDS = ("plain", "tls", "password")
KILLS = 20
PULL_S_MAX = 60.0


@dataclass
class Rig:
    real: Real
    options: Options

    def place(self, name: str, tag: str = "v1") -> str:
        return f"oci://{self.real.host}/{name}:{tag}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GREENROOM_MIRRORS", "GREENROOM_OFFLINE", "GREENROOM_ALLOW_HOSTS", "GREENROOM_MODELS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "none.json").write_text("{}")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))


@pytest.fixture(scope="module", params=KINDS)
def registry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with docker_registry(
        tmp_path_factory.mktemp(request.param), port_of(), tls=request.param != "plain", password=request.param == "password"
    ) as real:
        yield real


@pytest.fixture
def rig(registry: Real, monkeypatch: pytest.MonkeyPatch) -> Rig:
    if registry.auth_file is not None:
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(registry.auth_file))
    return Rig(registry, Options(tls_ca=registry.ca))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with docker_registry(tmp_path_factory.mktemp("registry"), port_of()) as real:
        yield real


def port_of() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small GGUF with its projector."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tiny-Q4_0.gguf").write_bytes(gguf(300_000))
    (folder / "mmproj-tiny.gguf").write_bytes(gguf(50_000, fields={"general.type": "mmproj", "general.architecture": "clip"}))
    return folder / "tiny-Q4_0.gguf"


def split_model(folder: Path, tensors: int = 6, values: int = 5_000) -> Path:
    """A split GGUF as the package of llama.cpp writes it; its first part."""
    writers = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    folder.mkdir()
    writer = writers.GGUFWriter(str(folder / "big.gguf"), "llama", split_max_tensors=2)
    writer.add_name("big")
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.ffn_up.weight", numpy.full((values,), number, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.glob("big-*-of-*.gguf"))
    assert len(parts) == tensors // 2
    return parts[0]


def digests(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of each file of a model."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


async def brought(rig: Rig, path: Path, layout: str, name: str, store: Path) -> Stored:
    """Pushed in a layout, and pulled into an empty store."""
    pushed = await Pusher(Library(store / "unused"), rig.options).push(loose(path), parse(rig.place(name)), layout)
    stored = await Puller(Library(store), rig.options).pull(parse(rig.place(name)))
    assert (stored.digest, stored.layout) == (pushed.digest, layout)
    return stored


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_is_pushed_comes_back_byte_for_byte(rig: Rig, model: Path, layout: str, tmp_path: Path) -> None:
    """With its projector; and a second push sends nothing."""
    stored = await brought(rig, model, layout, f"one/{layout}", tmp_path / "store")
    assert digests(stored.folder) == digests(model.parent)
    assert stored.entry.name == model.name

    again = await Pusher(Library(tmp_path / "store"), rig.options).push(loose(model), parse(rig.place(f"one/{layout}", "v2")), layout)
    assert (again.digest, again.sent) == (stored.digest, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_split_model_stays_together(rig: Rig, layout: str, tmp_path: Path) -> None:
    first = split_model(tmp_path / "split")
    stored = await brought(rig, first, layout, f"split/{layout}", tmp_path / "store")

    assert digests(stored.folder) == digests(first.parent)
    assert stored.entry.name == first.name


async def test_a_stored_model_is_pushed_on_with_the_same_digest(rig: Rig, model: Path, tmp_path: Path) -> None:
    """Its blobs are mounted from where they are: nothing is sent twice to one registry."""
    stored = await brought(rig, model, "modelpack", "from/here", tmp_path / "store")
    pushed = await Pusher(Library(tmp_path / "store"), rig.options).push(stored, parse(rig.place("to/there")))

    assert (pushed.digest, pushed.sent) == (stored.digest, 0)
    tags = source_of(parse(rig.place("to/there")), rig.options)
    try:
        assert await tags.registry.tags(parse(rig.place("to/there"))) == ["v1"]  # type: ignore[attr-defined]
    finally:
        await tags.close()


async def test_a_safetensors_folder(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "st"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(safetensors())
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    for layout in LAYOUTS:
        stored = await brought(rig, folder, layout, f"st/{layout}", tmp_path / f"store-{layout}")
        assert digests(stored.folder) == digests(folder)


async def test_what_is_not_there(rig: Rig, tmp_path: Path) -> None:
    for text in (rig.place("nobody/here"), f"oci://{rig.real.host}/nobody/here@sha256:{'0' * 64}"):
        with pytest.raises(NotFound, match="nobody/here"):
            await Puller(Library(tmp_path / "store"), rig.options).pull(parse(text))


@pytest.mark.parametrize("registry", ["tls", "password"], indirect=True)
async def test_certificates_and_passwords_are_asked_for(
    registry: Real, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the authority nothing is believed, also not by falling back to no TLS; without the password nothing is given."""
    place = parse(f"oci://{registry.host}/x:v1")
    with pytest.raises(Unreachable, match="--tls-ca"):
        await Puller(Library(tmp_path / "store")).pull(place)
    if registry.auth_file is None:
        await Pusher(Library(tmp_path / "store"), Options(tls_verify=False)).push(loose(model), place)
        monkeypatch.setenv("SSL_CERT_FILE", str(registry.ca))
        assert hash_of((await Puller(Library(tmp_path / "store")).pull(place)).entry) == hash_of(model)
        return
    with pytest.raises(Refused, match="podman login"):
        await Puller(Library(tmp_path / "store"), Options(tls_ca=registry.ca)).pull(place)
    wrong = json.loads(registry.auth_file.read_text())
    wrong["auths"][registry.host]["auth"] = "cGlldDp3cm9uZw=="
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "wrong.json"))
    with pytest.raises(Refused) as fault:
        await Pusher(Library(tmp_path / "store"), Options(tls_ca=registry.ca)).push(loose(model), place)
    assert "wrong" not in str(fault.value)


# ------------------------------------------------------------------------------------------------------------ others' tools


def skopeo_words(rig: Rig, direction: str) -> list[str]:
    words = [f"--{direction}tls-verify=false"]
    return [*words, f"--{direction}creds={USER}:{PASSWORD}"] if rig.real.auth_file else words


async def test_skopeo_reads_all_layouts(rig: Rig, model: Path, tmp_path: Path) -> None:
    """It inspects them, and copies them to a folder with every blob."""
    skopeo = tool("skopeo")
    for layout in LAYOUTS:
        stored = await brought(rig, model, layout, f"skopeo/{layout}", tmp_path / f"store-{layout}")
        source = f"docker://{rig.real.host}/skopeo/{layout}:v1"
        raw = run(skopeo, "inspect", "--raw", *skopeo_words(rig, ""), source)
        assert "sha256:" + hashlib.sha256(raw.encode()).hexdigest() == stored.digest
        run(skopeo, "copy", "-q", *skopeo_words(rig, "src-"), source, f"dir:{tmp_path / layout}")
        found = {path.name for path in (tmp_path / layout).iterdir()}
        assert {layer["digest"].removeprefix("sha256:") for layer in json.loads(raw)["layers"]} <= found


async def test_a_model_that_skopeo_copied_is_pulled(rig: Rig, model: Path, tmp_path: Path) -> None:
    skopeo = tool("skopeo")
    stored = await brought(rig, model, "image", "skopeo/from", tmp_path / "store")
    here, there = f"docker://{rig.real.host}/skopeo/from:v1", f"docker://{rig.real.host}/skopeo/to:v1"
    run(skopeo, "copy", "-q", *skopeo_words(rig, "src-"), *skopeo_words(rig, "dest-"), here, there)
    copied = await Puller(Library(tmp_path / "other"), rig.options).pull(parse(rig.place("skopeo/to")))

    assert digests(copied.folder) == digests(stored.folder)


async def test_umoci_unpacks_our_images(plain: Real, model: Path, tmp_path: Path) -> None:
    """The model lies at /models in the image, and `model.file` leads to it."""
    skopeo, umoci = tool("skopeo"), tool("umoci")
    rig = Rig(plain, Options())
    await brought(rig, model, "image", "umoci/image", tmp_path / "store")
    run(skopeo, "copy", "-q", "--src-tls-verify=false", f"docker://{plain.host}/umoci/image:v1", f"oci:{tmp_path / 'oci'}:v1")
    run(umoci, "unpack", "--rootless", "--image", f"{tmp_path / 'oci'}:v1", tmp_path / "bundle")
    models = tmp_path / "bundle" / "rootfs" / "models"

    assert hash_of(models / model.name) == hash_of(model)
    assert os.readlink(models / "model.file") == model.name


async def test_oras_pulls_what_we_push(plain: Real, model: Path, tmp_path: Path) -> None:
    oras = tool("oras")
    for layout in ("modelpack", "docker"):
        await brought(Rig(plain, Options()), model, layout, f"oras/{layout}", tmp_path / f"store-{layout}")
        run(oras, "pull", "--plain-http", "--no-tty", f"{plain.host}/oras/{layout}:v1", "-o", tmp_path / layout)
        assert digests(tmp_path / layout) == digests(model.parent)


async def test_we_pull_what_oras_pushes(plain: Real, model: Path, tmp_path: Path) -> None:
    oras = tool("oras")
    for name, words in {"typed": ["--artifact-type", "application/x.model"], "bare": []}.items():
        run(oras, "push", "--plain-http", "--no-tty", *words, f"{plain.host}/oras/{name}:v1", model.name, cwd=model.parent)
        stored = await Puller(Library(tmp_path / name)).pull(parse(f"oci://{plain.host}/oras/{name}:v1"))
        assert hash_of(stored.entry) == hash_of(model)


async def test_we_pull_what_buildah_pushes(plain: Real, model: Path, tmp_path: Path) -> None:
    """Its layers are gzipped; what was below /models comes out byte for byte."""
    buildah = tool("buildah")
    words = [buildah, "--root", tmp_path / "root", "--runroot", tmp_path / "runroot", "--storage-driver", "vfs"]
    box = run(*words, "from", "scratch").strip()
    run(*words, "copy", box, model, f"/models/{model.name}")
    run(*words, "config", "--label", "org.containers.type=ai.image.model.raw", box)
    run(*words, "commit", "-q", box, "made")
    run(*words, "push", "-q", "--tls-verify=false", "made", f"docker://{plain.host}/buildah/m:v1")
    stored = await Puller(Library(tmp_path / "store")).pull(parse(f"oci://{plain.host}/buildah/m:v1"))

    assert hash_of(stored.entry) == hash_of(model)


# ------------------------------------------------------------------------------------------------------------ by the command


def greenroom(store: Path, *words: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("greenroom")
    environment = {**os.environ, "GREENROOM_MODELS": str(store)}
    return subprocess.Popen([program, *words], env=environment, stdout=output, stderr=output)


def test_the_commands_bring_a_model_there_and_back(plain: Real, model: Path, tmp_path: Path) -> None:
    """`push FILE`, `pull`, `push NAME`; results as text and as JSON; faults in one line."""
    place = f"oci://{plain.host}/cli/m:v1"
    pushed = greenroom(tmp_path / "store", "push", str(model), place, "--layout", "docker", "--json", output=subprocess.PIPE)
    out, err = pushed.communicate(timeout=PULL_S_MAX)
    assert pushed.returncode == 0, err
    assert json.loads(out)["layout"] == "docker"

    pulled = greenroom(tmp_path / "store", "pull", place, output=subprocess.PIPE)
    out, err = pulled.communicate(timeout=PULL_S_MAX)
    path = Path(out.decode().splitlines()[-1])
    assert path.read_bytes() == model.read_bytes()
    assert b"publishing" in err

    failed = greenroom(tmp_path / "store", "pull", f"oci://{plain.host}/cli/none:v1", output=subprocess.PIPE)
    out, err = failed.communicate(timeout=PULL_S_MAX)
    assert (failed.returncode, out) == (1, b"")
    assert err.startswith(f"Error: {plain.host} has no cli/none:v1".encode())
    assert err.count(b"\n") == 1


# ------------------------------------------------------------------------------------------------------------ large ones


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_true_model_there_and_back(rig: Rig, layout: str, tmp_path: Path) -> None:
    """98 MB, byte for byte, in each layout at each registry."""
    model = smollm2()
    stored = await brought(rig, model, layout, f"smollm2/{layout}", tmp_path / "store")

    assert stored.size == model.stat().st_size
    assert hash_of(stored.entry) == hash_of(model)


@pytest.mark.slow
def test_a_pull_killed_at_any_point_is_gone_on_with(plain: Real, tmp_path: Path) -> None:
    """20 times SIGKILL at random: nothing half-made is ever listed, and the next pull completes."""
    model, place = smollm2(), f"oci://{plain.host}/kill/m:v1"
    words = greenroom(tmp_path / "unused", "push", "-q", str(model), place)
    assert words.wait(PULL_S_MAX) == 0
    began = time.monotonic()
    assert greenroom(tmp_path / "first", "pull", "-q", place).wait(PULL_S_MAX) == 0
    usual_s = time.monotonic() - began
    chance = random.Random(7)
    library, wanted, killed = Library(tmp_path / "store"), hash_of(model), 0
    while killed < KILLS:
        child = greenroom(tmp_path / "store", "pull", "-q", place)
        try:
            child.wait(chance.uniform(0.2, 1.0) * usual_s)
            usual_s *= 0.8  # it was done sooner: the first one took long for another reason
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            killed += 1
        for stored in library.all():
            assert hash_of(stored.entry) == wanted
            library.remove(stored.reference)
    assert greenroom(tmp_path / "store", "pull", "-q", place).wait(PULL_S_MAX) == 0
    library.gc()
    (stored,) = library.all()
    assert hash_of(stored.entry) == wanted
    assert [path for folder in ("work", "partial") for path in (library.root / folder).rglob("*")] == []


def smollm2() -> Path:
    path = find_smollm2()
    if path is None:
        pytest.fail("SmolLM2 is not installed: make test installs it")
    return path


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
