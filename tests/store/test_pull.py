"""Pulling: whole or not at all, never twice, and nothing that a registry may claim does harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.store import transfer
from greenroom.store.facts import Damaged, NoRoom, NotFound, Progress, Reference, Refused, StoreError, Unreachable
from greenroom.store.guard import Policy
from greenroom.store.layouts import OCI_INDEX
from greenroom.store.library import Library
from greenroom.store.pull import Options, Puller, host_of
from greenroom.store.references import parse
from greenroom.store.registry import mirrors_of
from greenroom.store.web import retry_after_s

from .models import digest, gguf, modelpack, named
from .servers import Fake, serving

MIB = 1 << 20
WEIGHTS = gguf(300_000)
BIG = gguf(20 * MIB, seed=1)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own settings; no waiting between tries."""
    for name in ("GREENROOM_MIRRORS", "GREENROOM_OFFLINE", "GREENROOM_ALLOW_HOSTS", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    monkeypatch.setattr("greenroom.store.web.BACKOFF_S_MAX", 0.0)
    monkeypatch.setattr("greenroom.store.transfer.BACKOFF_S_MAX", 0.0)


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with serving(Fake()) as fake:
        fake.hold("m", ("m.gguf", WEIGHTS))
        fake.hold("big", ("big.gguf", BIG))
        yield fake


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "store")


def named_in(fake: Fake, name: str = "m", rest: str = ":v1") -> Reference:
    return parse(f"oci://{fake.host}/{name}{rest}")


def leftovers(library: Library) -> list[str]:
    """Whatever holds bytes and belongs to no model."""
    kept = ("partial", "work")
    return [str(path) for folder in kept for path in (library.root / folder).rglob("*") if path.is_file() and path.suffix != ".lock"]


async def test_what_is_pulled_is_what_was_pushed(fake: Fake, library: Library) -> None:
    """And a second pull asks for nothing but the manifest."""
    told: list[Progress] = []
    stored = await Puller(library).pull(named_in(fake), told.append)

    assert stored.entry.read_bytes() == WEIGHTS
    assert (told[0].stage, told[-1].stage, told[-1].done, told[-1].total) == ("resolving", "done", len(WEIGHTS), len(WEIGHTS))
    fake.asked.clear()
    assert await Puller(library).pull(named_in(fake)) == stored
    assert fake.blob_requests() == []
    assert leftovers(library) == []


async def test_a_digest_in_the_reference_is_held_to(fake: Fake, library: Library) -> None:
    right = fake.hold("m", ("m.gguf", WEIGHTS))
    stored = await Puller(library).pull(named_in(fake, rest=f"@{right}"))
    assert stored.digest == right

    wrong = digest(b"something else")
    fake.manifests[f"m:{wrong}"] = fake.manifests["m:v1"]
    with pytest.raises(Damaged, match="digest"):
        await Puller(library).pull(named_in(fake, rest=f"@{wrong}"))


@pytest.mark.parametrize("alone", [True, False])
async def test_a_connection_cut_at_70_percent_costs_little(fake: Fake, library: Library, alone: bool) -> None:
    """What came before the cut is not fetched again, but for what was still on its way."""
    fake.cut_at = int(len(BIG) * 0.7)
    stored = await Puller(library, Options(alone=alone)).pull(named_in(fake, "big"))

    assert stored.entry.read_bytes() == BIG
    assert fake.sent - len(BIG) <= 0.35 * 0.7 * len(BIG)


async def test_a_cancelled_pull_is_gone_on_with(fake: Fake, library: Library) -> None:
    """It is never listed; the next one fetches the rest."""
    fake.pause_at = len(BIG) // 2
    pull = asyncio.ensure_future(Puller(library, Options(streams=1)).pull(named_in(fake, "big")))
    await fake.paused.wait()
    while sum(part.done for part in library.partials()) < len(BIG) // 3:  # noqa: ASYNC110 (only the disk tells)
        await asyncio.sleep(0.01)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert library.all() == ()
    kept = sum(part.done for part in library.partials())
    assert kept > len(BIG) // 3

    fake.sent, fake.pause_at = 0, None
    fake.go.set()
    told: list[Progress] = []
    stored = await Puller(library).pull(named_in(fake, "big"), told.append)
    assert stored.entry.read_bytes() == BIG
    assert fake.sent <= len(BIG) - kept + 64 * 1024
    assert told[-1].done == told[-1].total == len(BIG)


async def test_several_connections_bring_one_blob(fake: Fake, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """In stretches that together are the file, each asked for once."""
    monkeypatch.setattr(transfer, "SEGMENT_BYTES_MIN", 4 * MIB)
    monkeypatch.setattr(transfer, "RAMP_S", 0.0)
    monkeypatch.setattr(transfer, "FAST_BYTES_S", float("inf"))
    monkeypatch.setattr(transfer.Transfer, "__init__", eager(transfer.Transfer.__init__))
    stored = await Puller(library).pull(named_in(fake, "big"))

    ranges = sorted(item[2] for item in fake.blob_requests())
    assert stored.entry.read_bytes() == BIG
    assert len(ranges) == len(set(ranges)) == 6
    assert fake.sent == len(BIG)


def eager(made):  # type: ignore[no-untyped-def]
    def made_eager(self, *arguments, **words):  # type: ignore[no-untyped-def]
        made(self, *arguments, **words)
        self.ramp_s = 0.0

    return made_eager


async def test_a_server_without_ranges_serves_in_one_stream(fake: Fake, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a cut: then all of it comes again, and only what is missing is written."""
    monkeypatch.setattr(transfer, "SEGMENT_BYTES_MIN", 4 * MIB)
    fake.ranges = False
    fake.cut_at = len(BIG) // 2
    stored = await Puller(library).pull(named_in(fake, "big"))

    assert stored.entry.read_bytes() == BIG
    assert len(fake.blob_requests()) == 2


async def test_two_pulls_at_once_make_one_fetch(fake: Fake, library: Library) -> None:
    """Both hear how far it is, and both get the model."""
    fake.gate = asyncio.Event()
    told: tuple[list[Progress], list[Progress]] = ([], [])
    pulls = [asyncio.ensure_future(Puller(Library(library.root)).pull(named_in(fake), hear.append)) for hear in told]
    await fake.reached.wait()
    fake.gate.set()
    first, second = await asyncio.gather(*pulls)

    assert first.digest == second.digest
    assert len(fake.blob_requests()) == 1
    assert [hear[-1].stage for hear in told] == ["done", "done"]
    assert all(hear[-1].done == len(WEIGHTS) for hear in told)


async def test_two_references_that_share_a_blob_fetch_it_once(fake: Fake, library: Library) -> None:
    fake.hold("other", ("m.gguf", WEIGHTS), ("LICENSE", b"free"))
    fake.gate = asyncio.Event()
    pulls = [asyncio.ensure_future(Puller(Library(library.root)).pull(named_in(fake, name))) for name in ("m", "other")]
    await fake.reached.wait()
    fake.gate.set()
    await asyncio.gather(*pulls)

    assert len([item for item in fake.blob_requests() if digest(WEIGHTS) in item[1]]) == 1


async def test_busy_servers_are_asked_again(fake: Fake, library: Library) -> None:
    fake.fails = 3
    assert (await Puller(library).pull(named_in(fake))).entry.read_bytes() == WEIGHTS


async def test_a_server_that_wants_much_patience_is_told_to_the_user(fake: Fake, library: Library) -> None:
    fake.fails, fake.retry_after = 1, "7200"
    with pytest.raises(StoreError, match="7200 s"):
        await Puller(library).pull(named_in(fake))


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after_s("12") == 12.0
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_s("soon") is None


# ------------------------------------------------------------------------------------------------------- poisoned registries


async def refused(fake: Fake, library: Library, kind: type[StoreError], words: str, name: str = "m", **options: object) -> None:
    """The pull fails with these words; no model is listed, and nothing lies outside the store or half made in it."""
    outside = sorted(path.name for path in library.root.parent.iterdir())
    with pytest.raises(kind, match=words):
        await Puller(library, replace(Options(), **options)).pull(named_in(fake, name))  # type: ignore[arg-type]
    assert library.all() == ()
    assert sorted(path.name for path in library.root.parent.iterdir() if path != library.root) == [
        name for name in outside if name != "store"
    ]
    assert not list((library.root / "blobs").rglob("*.gguf"))


async def test_other_bytes_than_the_digest_says(fake: Fake, library: Library) -> None:
    fake.other_bytes = True
    await refused(fake, library, Damaged, "promised")
    assert leftovers(library) == []


async def test_a_manifest_that_is_not_its_digest(fake: Fake, library: Library) -> None:
    fake.manifest_digest = digest(b"x")
    await refused(fake, library, Damaged, "not used")


async def test_a_truncated_blob(fake: Fake, library: Library) -> None:
    """A server that claims the length and sends less, and one that is honest about having less."""
    fake.truncated = True
    await refused(fake, library, Damaged, "declared with")
    fake.truncated, fake.blobs[digest(WEIGHTS)] = False, WEIGHTS[:-10]
    await refused(fake, library, Damaged, "declared with")
    assert leftovers(library) == []


async def test_a_connection_that_always_breaks(fake: Fake, library: Library) -> None:
    """After some tries without a byte it is given up, and told what is here."""
    fake.blob_status = 503
    await refused(fake, library, Unreachable, "503")


async def test_an_endless_stream_stops_at_the_limit(fake: Fake, library: Library) -> None:
    fake.endless = fake.other_bytes = True
    await refused(fake, library, Damaged, "more bytes|promised")
    assert fake.sent < len(WEIGHTS) + 64 * MIB  # what socket buffers hold; never read
    assert leftovers(library) == []


async def test_a_part_that_was_not_asked_for(fake: Fake, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SEGMENT_BYTES_MIN", 4 * MIB)
    fake.content_range = f"bytes 5-9/{len(BIG)}"
    await refused(fake, library, Damaged, "asked for bytes", "big")
    fake.content_range = f"bytes 0-{4 * MIB - 1}/{len(BIG) * 2}"
    await refused(fake, library, Damaged, "declared with", "big")


@pytest.mark.parametrize("path", ["../../evil", "/abs", "a/../../b", "..", "x\0y.gguf", "n" * 300 + ".gguf", "C:\\x.gguf", "a\nb.gguf"])
async def test_names_that_lead_out(fake: Fake, library: Library, path: str) -> None:
    fake.hold("m", (path, WEIGHTS))
    await refused(fake, library, Refused, "names a file")
    assert fake.blob_requests() == []


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1:1/x",
        "http://localhost:1/x",
        "http://[::1]:1/x",
        "http://[::ffff:127.0.0.1]:1/x",
        "http://0.0.0.0/x",
        "http://10.0.0.1/x",
        "file:///etc/passwd",
        "ftp://h.example/",
        "//127.0.0.1:1/x",
    ],
)
async def test_redirects_into_the_house(fake: Fake, library: Library, target: str) -> None:
    """Whether a blob or the manifest is said to be there."""
    fake.redirect = target
    await refused(fake, library, Refused, "refused|no web address")
    fake.redirect, fake.redirect_manifests = "", target
    await refused(fake, library, Refused, "refused|no web address")


async def test_redirects_without_end(fake: Fake, library: Library) -> None:
    fake.redirect = f"http://{fake.host}/v2/m/blobs/{digest(WEIGHTS)}"
    await refused(fake, library, Refused, "more than 5 times")


async def test_sizes_that_lie(fake: Fake, library: Library) -> None:
    """More than the disk has, or than is allowed, is refused before the first byte."""
    for size, options, kind, words in (
        (10 << 50, {}, Refused, "more than the"),
        (1 << 42, {}, NoRoom, "bytes"),
        (2 * MIB, {"bytes_max": MIB}, Refused, "more than the 1,048,576"),
        (len(WEIGHTS) + 5, {}, Damaged, "declared with"),
        (len(WEIGHTS) - 5, {}, Damaged, "declared with"),
    ):
        fake.asked.clear()
        fake.manifests["m:v1"] = modelpack({**named(WEIGHTS, "m.gguf"), "size": size})
        await refused(fake, library, kind, words, **options)
        assert kind is Damaged or fake.blob_requests() == []


async def test_a_manifest_without_end(fake: Fake, library: Library) -> None:
    fake.manifests["m:v1"] = b"{" + b" " * (5 * MIB)
    await refused(fake, library, Refused, "at most 4,194,304")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"<html>", b'{"schemaVersion":1}', b"[" * 100_000])
async def test_manifests_that_are_none(fake: Fake, library: Library, data: bytes) -> None:
    fake.manifests["m:v1"] = data
    await refused(fake, library, StoreError, ".")


async def test_an_index_leads_to_the_manifest_of_the_platform(fake: Fake, library: Library) -> None:
    other = fake.hold("m", ("m.gguf", gguf(1000, seed=3)), tag="other")
    mine = fake.hold("m", ("m.gguf", WEIGHTS))
    entries = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": found,
            "size": len(fake.manifests[f"m:{found}"]),
            "platform": platform,
        }
        for found, platform in ((other, {"os": "linux", "architecture": "arm64"}), (mine, {"os": "linux", "architecture": "amd64"}))
    ]
    fake.manifests["m:all"] = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()

    assert (await Puller(library).pull(named_in(fake, rest=":all"))).digest == mine
    assert (await Puller(library, Options(platform="linux/arm64")).pull(named_in(fake, rest=":all"))).digest == other


# ------------------------------------------------------------------------------------------------------------ who is asked


async def test_a_server_connects_to_nobody_who_is_not_on_its_list(fake: Fake, library: Library) -> None:
    """The registry of a reference from a request is refused before a connection is made."""
    options = Options(policy=Policy(hosts=frozenset({"registry.example"})), files=False)
    for reference in (named_in(fake), parse("https://169.254.169.254/x.gguf"), parse("ollama://tiny"), parse("hf://a/b")):
        with pytest.raises(Refused, match="not among the hosts"):
            await Puller(library, options).pull(reference)
    with pytest.raises(Refused, match="files of this host"):
        await Puller(library, options).pull(parse("file:///etc/passwd"))
    assert fake.asked == []


async def test_offline_nobody_is_asked(fake: Fake, library: Library) -> None:
    """What is here is found; what is not, is not looked for."""
    puller = Puller(library, Options(offline=True))
    with pytest.raises(NotFound, match="offline"):
        await puller.pull(named_in(fake))
    assert fake.asked == []

    stored = await Puller(library).pull(named_in(fake))
    fake.asked.clear()
    assert await puller.pull(named_in(fake)) == stored
    assert fake.asked == []


async def test_a_file_of_this_host_that_is_larger_than_allowed_is_not_taken_in(library: Library, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WEIGHTS)
    reference = parse((tmp_path / "m.gguf").as_uri())
    with pytest.raises(Refused, match=f"{len(WEIGHTS):,} bytes, more than the {len(WEIGHTS) - 1:,}"):
        await Puller(library, Options(bytes_max=len(WEIGHTS) - 1)).pull(reference)
    assert library.all() == ()
    assert (await Puller(library, Options(bytes_max=len(WEIGHTS))).pull(reference)).size == len(WEIGHTS)


async def test_mirrors_are_asked_first_and_not_believed(fake: Fake, library: Library) -> None:
    """One that is down or knows nothing is passed over; one that lies is found out, and the registry itself is asked."""
    async with serving(Fake()) as mirror:
        mirror.hold("hub/m", ("m.gguf", WEIGHTS))
        mirrors = mirrors_of(f"{fake.host}=127.0.0.1:9,{mirror.host}/hub")
        stored = await Puller(library, Options(mirrors=mirrors)).pull(named_in(fake))
        assert stored.entry.read_bytes() == WEIGHTS
        assert fake.asked == []

        mirror.manifest_digest = digest(b"x")
        other = Library(library.root.parent / "other")
        await Puller(other, Options(mirrors=mirrors)).pull(named_in(fake))
        assert [item[1] for item in fake.asked if "manifests" in item[1]] != []


def test_mirrors_are_read() -> None:
    assert mirrors_of(" docker.io=a:5000,b/hub ; ghcr.io=c ") == {"docker.io": ("a:5000", "b/hub"), "ghcr.io": ("c",)}
    assert mirrors_of("") == {}
    for text in ("docker.io", "=a", "docker.io=", "docker.io=https://a"):
        with pytest.raises(StoreError, match="HOST=MIRROR"):
            mirrors_of(text)


async def test_a_secret_goes_to_its_host_alone(fake: Fake, library: Library, tmp_path: Path) -> None:
    """Not to where the registry redirects; and into no error."""
    async with serving(Fake()) as elsewhere:
        elsewhere.blobs[digest(WEIGHTS)] = WEIGHTS
        fake.challenge, fake.authorization = 'Basic realm="x"', "Basic cGlldDpTRUNSRVQ="
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {fake.host: {"auth": "cGlldDpTRUNSRVQ="}}}))
        fake.redirect = f"http://{elsewhere.host}/v2/x/blobs/{digest(WEIGHTS)}"
        stored = await Puller(library, Options(allowed=(elsewhere.host,))).pull(named_in(fake))

        assert stored.entry.read_bytes() == WEIGHTS
        assert [headers for headers in elsewhere.seen if "Authorization" in headers] == []
        fake.authorization = "Basic other"
        with pytest.raises(Refused) as fault:
            await Puller(library, Options(allowed=(elsewhere.host,))).pull(named_in(fake, "big"))
        assert "SECRET" not in str(fault.value)
        assert "cGll" not in str(fault.value)


async def test_tokens_are_asked_for_and_kept(fake: Fake, library: Library, tmp_path: Path) -> None:
    """The password goes to the token server, the token to the registry; one token for many requests."""
    fake.authorization = "Bearer T0KEN"
    asked: list[dict[str, str]] = []

    async def handle(request):  # type: ignore[no-untyped-def]
        from aiohttp import web

        if request.path == "/token":
            asked.append({**request.query, "authorization": request.headers.get("Authorization", "")})
            return web.json_response({"token": "T0KEN", "expires_in": 60})
        return await Fake.handle(fake, request)

    fake.handle = handle  # type: ignore[method-assign]
    async with serving(fake):
        fake.challenge = f'Bearer realm="http://{fake.host}/token",service="s",scope="repository:m:pull"'
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {fake.host: {"auth": "cGlldDpTRUNSRVQ="}}}))
        await Puller(library).pull(named_in(fake))

    assert asked == [{"service": "s", "scope": "repository:m:pull", "authorization": "Basic cGlldDpTRUNSRVQ="}]


async def test_a_registry_that_wants_a_login_says_how(fake: Fake, library: Library) -> None:
    fake.challenge, fake.authorization = 'Basic realm="x"', "Basic x"
    with pytest.raises(Refused, match="podman login"):
        await Puller(library).pull(named_in(fake))


def test_the_environment_adds_to_the_options() -> None:
    env = {"GREENROOM_OFFLINE": "1", "GREENROOM_MIRRORS": "a.example=b.example", "GREENROOM_ALLOW_HOSTS": "c.example, d.example:5000"}
    options = Options(allowed=("e",)).from_environment(env)

    assert options.offline
    assert options.mirrors == {"a.example": ("b.example",)}
    assert options.allowed == ("e", "c.example", "d.example:5000")
    assert Options().from_environment({}) == Options()


def test_hosts_that_are_asked_first() -> None:
    hosts = [
        host_of(parse(text)) for text in ("docker://ai/x", "ollama://x", "oci://h.example:5/x", "https://h.example/x.gguf", "hf://a/b")
    ]
    assert hosts == ["registry-1.docker.io", "registry.ollama.ai", "h.example:5", "h.example", ""]


# ---------------------------------------------------------------------------------------------------------------- the disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_what_does_not_fit_is_refused_before_the_first_byte(fake: Fake, small_disk: Path) -> None:
    library = Library(small_disk / "store")
    with pytest.raises(NoRoom, match=rf"{len(BIG):,} bytes"):
        await Puller(library).pull(named_in(fake, "big"))
    assert fake.blob_requests() == []


@pytest.mark.parametrize("alone", [True, False])
async def test_a_disk_that_fills_up_in_the_middle_keeps_nothing(fake: Fake, small_disk: Path, alone: bool) -> None:
    """The models that are there are not touched."""
    library = Library(small_disk / "store")
    there = await Puller(library).pull(named_in(fake))
    data = gguf(6 * MIB, seed=5)
    fake.hold("mid", ("mid.gguf", data))

    fake.pause_at = 3 * MIB
    pull = asyncio.ensure_future(Puller(library, Options(alone=alone)).pull(named_in(fake, "mid")))
    await fake.paused.wait()
    fill(small_disk / "other")
    fake.pause_at = None
    fake.go.set()
    with pytest.raises(NoRoom, match=r"full|free"):
        await pull
    assert [stored.reference for stored in library.all()] == [there.reference]
    assert leftovers(library) == []
    (small_disk / "other").unlink()
    assert (await Puller(library).pull(named_in(fake, "mid"))).entry.read_bytes() == data


def fill(path: Path) -> None:
    """Takes what room there is."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
