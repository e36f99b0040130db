"""The library: whole models only, shared blobs, safe removal, and what a disk that is full or a kill leaves."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from greenroom.store.facts import Damaged, NoRoom, NotFound, Refused, Remote, Stored, StoreError
from greenroom.store.layouts import read_manifest
from greenroom.store.library import Library, Pulling, default_root
from greenroom.store.references import parse

from .models import digest, gguf, modelpack, named, safetensors
from .test_packing import contents, into
from .test_partial import fill

ONE = parse("oci://h.example/team/one:v1")
TWO = parse("oci://h.example/team/two:v1")
WEIGHTS = gguf(200_000)
PROJECTOR = gguf(50_000, fields={"general.type": "mmproj", "general.architecture": "clip"})


def remote(reference=ONE, *files: tuple[str, bytes]) -> Remote:
    files = files or (("m.gguf", WEIGHTS), ("mmproj.gguf", PROJECTOR))
    return read_manifest(reference, modelpack(*(named(data, path) for path, data in files)), b"{}")


BLOBS = {digest(data): data for data in (WEIGHTS, PROJECTOR)}


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "store")


def begin_one(pulling: Pulling, share: float = 1.0, data: bytes = b"") -> None:
    """Fetch so much of the first blob."""
    file = pulling.wanted()[0]
    partial = pulling.begin(file)
    assert partial is not None
    with partial:
        length = int(file.size * share)
        with partial.filling(0, length) as filler:
            filler.write((data or BLOBS[file.digest])[:length])
        if share == 1.0:
            pulling.finish(partial, file)


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "locks" not in path.parts)


class TestPull:
    def test_a_model_is_its_folder(self, library: Library):
        """Under the names that engines expect, read-only, sharing bytes with the blobs."""
        stored = into(library, remote(), BLOBS)
        assert contents(stored) == {"m.gguf": WEIGHTS, "mmproj.gguf": PROJECTOR}
        assert stored.entry == stored.folder / "m.gguf"
        assert stored.entry.samefile(library.blob(digest(WEIGHTS)))
        assert stored.entry.stat().st_mode & 0o777 == 0o444
        assert library.root.stat().st_mode & 0o777 == 0o700
        assert [file.role for file in stored.files] == ["weights", "projector"]
        assert (stored.description.format, stored.description.architecture, stored.description.context_length) == ("gguf", "llama", 2048)

    def test_it_is_found_by_every_name(self, library: Library):
        stored = into(library, remote(), BLOBS)
        assert library.find(ONE) == stored
        assert library.all() == (stored,)
        assert library.ready(ONE) == stored
        for name in (str(ONE), "h.example/team/one:v1", "one", stored.digest, stored.digest[7:19]):
            assert library.get(name) == stored
        assert library.find(parse(f"oci://h.example/team/one@{stored.digest}")) == stored
        assert library.find(parse(f"oci://h.example/team/other@{stored.digest}")) is None
        assert library.find(parse("oci://h.example/team/one@sha256:" + "0" * 64)) is None

    @pytest.mark.parametrize("name", ["two", "abcdef", "abc", "", "../one", "oci://h.example/team/one:v2", "one\0"])
    def test_what_is_not_here_is_said(self, library: Library, name: str):
        into(library, remote(), BLOBS)
        with pytest.raises(NotFound, match="greenroom list"):
            library.get(name)

    def test_a_short_name_of_two_models_is_asked_about(self, library: Library):
        into(library, remote(), BLOBS)
        into(
            library,
            remote(parse("oci://other.example/one:v1"), ("m.gguf", gguf(100, seed=5))),
            {digest(gguf(100, seed=5)): gguf(100, seed=5)},
        )
        with pytest.raises(StoreError, match="may be any of"):
            library.get("one")

    def test_a_blob_that_is_here_is_not_fetched_again(self, library: Library):
        into(library, remote(), BLOBS)
        with library.pulling(remote(TWO)) as pulling:
            assert pulling.wanted() == ()
            pulling.publish()
        assert len(library.all()) == 2

    def test_a_new_version_takes_the_name(self, library: Library):
        old = into(library, remote(), BLOBS)
        new = into(library, remote(ONE, ("m.gguf", WEIGHTS)), BLOBS)
        assert library.find(ONE) == new != old
        library.gc()
        assert not old.folder.exists()
        assert contents(new) == {"m.gguf": WEIGHTS}

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"<html>Sign in</html>", "not a GGUF"),
            (WEIGHTS[:-1000], "cut short"),
            (WEIGHTS[:60], "ends inside its header"),
            (b"", "not a GGUF"),
        ],
    )
    def test_what_is_no_whole_model_is_not_published(self, library: Library, data: bytes, words: str):
        """Digests that hold prove nothing when the one who pushed had a broken file."""
        with pytest.raises(Damaged, match=words):
            into(library, remote(ONE, ("m.gguf", data)), {digest(data): data})
        assert library.all() == ()
        assert files_in(library.root) == []

    def test_broken_safetensors_are_not_published(self, library: Library):
        data = safetensors()[:-3]
        with pytest.raises(Damaged, match="fetch it again"):
            into(library, remote(ONE, ("model.safetensors", data)), {digest(data): data})

    def test_a_signature_that_is_checked_later_is_kept(self, library: Library):
        """The same model, pulled again with a key; and again without one."""
        into(library, remote(), BLOBS)
        for signed_by in ("key", ""):
            with library.pulling(remote()) as pulling:
                pulling.publish(signed_by=signed_by)
            assert library.ready(ONE).signed_by == "key"

    def test_files_without_a_digest_get_one(self, library: Library):
        from greenroom.store.facts import ModelFile

        reference = parse("https://h.example/d/m.gguf")
        with library.pulling(Remote(reference, "", "files", (ModelFile("m.gguf", len(WEIGHTS)),))) as pulling:
            (file,) = pulling.wanted()
            partial = pulling.begin(file, key="etag")
            assert partial is not None
            with partial, partial.filling(0, file.size) as filler:
                filler.write(WEIGHTS)
            with pulling.begin(file, key="etag") as partial:  # type: ignore[union-attr]
                assert pulling.finish(partial, file) == digest(WEIGHTS)
            stored = pulling.publish()
        assert library.find(reference) == stored
        assert stored.files[0].digest == digest(WEIGHTS)


class TestUnfinished:
    def test_a_part_is_told_and_never_listed_as_a_model(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling, 0.7)
        assert library.all() == ()
        assert library.find(ONE) is None
        (part,) = library.partials()
        assert (part.reference, part.file, part.size, part.active) == (str(ONE), "m.gguf", len(WEIGHTS), False)
        assert part.done == int(len(WEIGHTS) * 0.7)

    def test_all_blobs_without_publishing_are_no_model(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling)
            with pytest.raises(StoreError, match="not here yet"):
                pulling.publish()
        assert library.all() == ()

    def test_removing_the_name_removes_the_part(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling, 0.5)
        swept = library.remove(ONE)
        assert swept.items == (f"part of {ONE} (m.gguf)",)
        assert files_in(library.root) == []

    def test_two_at_once_fetch_it_once(self, library: Library):
        """The second one waits for the first, sees how far it is, and finds the blob."""
        with library.pulling(remote()) as first, library.pulling(remote()) as second:
            file = first.wanted()[0]
            partial = first.begin(file)
            assert partial is not None
            assert second.begin(file) is None
            with partial.filling(0, 5000) as filler:
                filler.write(WEIGHTS[:5000])
            assert second.fetched_by_others(file) == 5000
            assert library.partials()[0].active
            with partial.filling(5000, len(WEIGHTS) - 5000) as filler:
                filler.write(WEIGHTS[5000:])
            first.finish(partial, file)
            assert second.here(file)
            assert [file.path for file in second.wanted()] == ["mmproj.gguf"]

    def test_the_one_who_waits_goes_on_where_the_other_died(self, library: Library):
        with library.pulling(remote()) as second:
            with library.pulling(remote()) as first:
                begin_one(first, 0.5)
            partial = second.begin(second.wanted()[0])
            assert partial is not None
            with partial:
                assert partial.done == len(WEIGHTS) // 2


class TestRemove:
    def test_nothing_is_left(self, library: Library):
        into(library, remote(), BLOBS)
        library.remove(ONE)
        assert files_in(library.root) == []
        with pytest.raises(NotFound):
            library.remove(ONE)

    def test_what_another_model_needs_stays(self, library: Library):
        into(library, remote(), BLOBS)
        other = into(library, remote(TWO, ("m.gguf", WEIGHTS)), BLOBS)
        library.remove(ONE)
        assert contents(other) == {"m.gguf": WEIGHTS}
        assert library.verify(other) == ()
        assert not library.blob(digest(PROJECTOR)).exists()

    def test_another_name_of_the_same_model_keeps_it(self, library: Library):
        stored = into(library, remote(), BLOBS)
        library.tag(stored, TWO)
        library.remove(ONE)
        assert contents(library.ready(TWO)) == {"m.gguf": WEIGHTS, "mmproj.gguf": PROJECTOR}

    def test_a_model_in_use_stays(self, library: Library):
        stored = into(library, remote(), BLOBS)
        with library.using(stored), library.using(stored):
            with pytest.raises(Refused, match="being served"):
                library.remove(ONE)
            assert library.find(ONE) is not None
        library.remove(ONE)
        assert library.find(ONE) is None

    def test_force_takes_it_anyway(self, library: Library):
        stored = into(library, remote(), BLOBS)
        with library.using(stored):
            library.remove(ONE, force=True)
        assert library.all() == ()

    def test_what_another_pull_needs_stays(self, library: Library):
        """A model is removed while another pull that shares its blob is under way."""
        into(library, remote(), BLOBS)
        with library.pulling(remote(TWO, ("m.gguf", WEIGHTS))) as pulling:
            swept = library.remove(ONE)
            assert swept.kept == (f"blob {digest(WEIGHTS)[7:19]}",)
            stored = pulling.publish()
        assert contents(stored) == {"m.gguf": WEIGHTS}


class TestSweep:
    def test_a_tidy_store_gives_nothing(self, library: Library):
        stored = into(library, remote(), BLOBS)
        assert library.gc().items == ()
        assert library.verify(stored) == ()
        assert Library(library.root / "none").gc().items == ()

    def test_an_older_version_that_is_still_served_stays(self, library: Library):
        """Its name went to a newer one; it goes when nobody uses it any more."""
        old = into(library, remote(), BLOBS)
        with library.using(old):
            into(library, remote(ONE, ("m.gguf", WEIGHTS)), BLOBS)
            swept = library.gc()
            assert (swept.items, swept.kept) == ((), (f"model {old.digest[7:19]}",))
            assert contents(old) == {"m.gguf": WEIGHTS, "mmproj.gguf": PROJECTOR}
        assert f"model {old.digest[7:19]}" in library.gc().items
        assert not old.folder.exists()

    def test_blobs_that_nothing_names(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling)
            assert library.gc().kept == (f"blob {digest(WEIGHTS)[7:19]}",)
        dry = library.gc(dry=True)
        assert dry.items == (f"blob {digest(WEIGHTS)[7:19]}",)
        assert dry.bytes >= len(WEIGHTS)
        assert library.blob(digest(WEIGHTS)).exists()
        assert library.gc() == dry
        assert files_in(library.root) == []

    def test_parts_are_kept_until_they_are_stale(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling, 0.5)
        assert library.gc().items == ()
        assert library.gc(now=lambda: time.time() + 8 * 86400).items == (f"part of {ONE} (m.gguf)",)

    def test_parts_that_are_being_fetched_are_never_taken(self, library: Library):
        with library.pulling(remote()) as pulling:
            partial = pulling.begin(pulling.wanted()[0])
            assert partial is not None
            with partial:
                assert library.gc(stale_s=-1e9).items == ()
                assert partial.missing() == [(0, len(WEIGHTS))]

    def test_what_is_half_written_or_broken(self, library: Library):
        stored = into(library, remote(), BLOBS)
        (library.root / "refs" / ".x.json.1.ab").write_text("{")
        (library.root / "refs" / "broken.json").write_text("{")
        (library.root / "models" / "0000").mkdir()
        (library.root / "work" / "dead").mkdir()
        (library.root / "partial" / "stray.part").write_bytes(b"x")
        assert library.all() == (stored,)
        assert len(library.gc().items) == 5
        assert library.gc().items == ()
        assert library.find(ONE) == stored

    def test_a_model_whose_card_is_broken_is_not_listed(self, library: Library):
        stored = into(library, remote(), BLOBS)
        (stored.folder.parent / "model.json").chmod(0o644)
        (stored.folder.parent / "model.json").write_text('{"files": [{"path": "../../evil"}]}')
        assert library.all() == ()
        assert library.gc().items


class TestVerify:
    def flip(self, path: Path) -> None:
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))

    def test_a_flipped_byte_is_found_and_the_model_is_not_served(self, library: Library):
        stored = into(library, remote(), BLOBS)
        self.flip(stored.entry)
        (fault,) = library.verify(stored)
        assert (fault.path, "its bytes changed" in fault.why) == ("m.gguf", True)
        with pytest.raises(Damaged, match="greenroom pull"):
            library.ready(ONE)
        assert library.all()[0].damaged == ("m.gguf",)

    def test_pulling_again_mends_it(self, library: Library):
        """Only the damaged file is fetched again, also when it was a link to the damaged blob."""
        stored = into(library, remote(), BLOBS)
        self.flip(stored.entry)
        library.verify(stored)
        with library.pulling(remote()) as pulling:
            assert [file.path for file in pulling.wanted()] == ["m.gguf"]
        mended = into(library, remote(), BLOBS)
        assert library.verify(mended) == ()
        assert library.ready(ONE).damaged == ()

    def test_another_model_that_shares_the_bytes_is_damaged_too(self, library: Library):
        stored = into(library, remote(), BLOBS)
        into(library, remote(TWO, ("m.gguf", WEIGHTS)), BLOBS)
        self.flip(stored.entry)
        library.verify(stored)
        with pytest.raises(Damaged):
            library.ready(TWO)
        assert library.verify(into(library, remote(TWO, ("m.gguf", WEIGHTS)), BLOBS)) == ()
        with pytest.raises(Damaged):
            library.ready(ONE)

    def test_a_file_that_is_gone_or_cut(self, library: Library):
        stored = into(library, remote(), BLOBS)
        os.truncate(stored.entry, 10) if os.geteuid() == 0 else stored.entry.unlink()
        with pytest.raises(Damaged, match=r"m\.gguf"):
            library.ready(ONE)
        assert library.verify(stored)[0].path == "m.gguf"


class TestAdopt:
    def test_all_parts_and_the_projector_beside_it(self, tmp_path: Path, library: Library):
        for part in (1, 2):
            (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(gguf(5000, seed=part))
        (tmp_path / "mmproj-m.gguf").write_bytes(PROJECTOR)
        (tmp_path / "notes.txt").write_text("mine")
        stored = library.adopt(parse(str(tmp_path / "m-00001-of-00002.gguf")))
        assert [file.path for file in stored.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"]
        assert stored.entry.name == "m-00001-of-00002.gguf"

    def test_with_several_models_beside_it_no_projector_is_guessed(self, tmp_path: Path, library: Library):
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(gguf(100))
        (tmp_path / "mmproj.gguf").write_bytes(PROJECTOR)
        assert [file.path for file in library.adopt(parse(str(tmp_path / "a.gguf"))).files] == ["a.gguf"]

    def test_a_folder(self, tmp_path: Path, library: Library):
        folder = tmp_path / "model"
        (folder / ".git").mkdir(parents=True)
        for name, data in {"config.json": b"{}", "model.safetensors": safetensors(), ".git/x.json": b"", "run.sh": b""}.items():
            (folder / name).write_bytes(data)
        stored = library.adopt(parse(str(folder)))
        assert [file.path for file in stored.files] == ["config.json", "model.safetensors"]
        assert stored.entry == stored.folder

    def test_the_original_keeps_its_mode_and_its_bytes(self, tmp_path: Path, library: Library):
        path = tmp_path / "m.gguf"
        path.write_bytes(WEIGHTS)
        path.chmod(0o640)
        library.adopt(parse(str(path)))
        library.remove(parse(str(path)))
        assert path.read_bytes() == WEIGHTS
        assert path.stat().st_mode & 0o777 == 0o640

    def test_a_copy_is_on_its_own(self, tmp_path: Path, library: Library):
        path = tmp_path / "m.gguf"
        path.write_bytes(WEIGHTS)
        stored = library.adopt(parse(str(path)), link=False)
        path.write_bytes(b"other")
        assert library.verify(stored) == ()

    @pytest.mark.parametrize("name", ["passwd", "missing.gguf", "text.gguf", "empty"])
    def test_what_is_no_model(self, tmp_path: Path, library: Library, name: str):
        (tmp_path / "passwd").write_text("root:x:0:0")
        (tmp_path / "text.gguf").write_text("root:x:0:0")
        (tmp_path / "empty").mkdir()
        with pytest.raises(StoreError):
            library.adopt(parse(str(tmp_path / name)))
        assert library.all() == ()
        assert files_in(library.root) == []

    def test_missing_parts(self, tmp_path: Path, library: Library):
        (tmp_path / "m-00001-of-00002.gguf").write_bytes(gguf(100))
        with pytest.raises(StoreError, match=r"without m-00002-of-00002\.gguf"):
            library.adopt(parse(str(tmp_path / "m-00001-of-00002.gguf")))


class TestDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        """A disk of 1 MiB."""
        folder = tmp_path / "small"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, check=False).returncode != 0:
            pytest.skip("a tmpfs cannot be mounted here: it needs root")
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)

    def test_what_does_not_fit_is_refused_before_the_first_byte(self, small_disk: Path):
        library = Library(small_disk / "store")
        big = gguf(2 << 20)
        with library.pulling(remote(ONE, ("m.gguf", big))) as pulling, pytest.raises(NoRoom, match=r"[\d,]+ bytes.*[\d,]+ free"):
            pulling.need_room()
        assert files_in(library.root) == []

    def test_a_disk_that_fills_up_meanwhile(self, small_disk: Path):
        """A clear error; the part is gone, other models stay and are served."""
        library = Library(small_disk / "store")
        stored = into(library, remote(), BLOBS)
        big = gguf(900_000, seed=9)
        with library.pulling(remote(TWO, ("m.gguf", big))) as pulling:
            partial = pulling.begin(pulling.wanted()[0])
            assert partial is not None
            with partial, pytest.raises(NoRoom, match="is full"):
                fill(partial, 0, len(big), big, piece=50_000)
        assert library.partials() == ()
        assert library.all() == (stored,)
        assert library.verify(stored) == ()
        assert library.gc().items == ()

    def test_taking_in_a_file_that_does_not_fit(self, tmp_path: Path, small_disk: Path):
        """From another disk it must be copied: refused before, and nothing is left."""
        library = Library(small_disk / "store")
        (tmp_path / "m.gguf").write_bytes(gguf(2 << 20))
        with pytest.raises(NoRoom, match="free"):
            library.adopt(parse(str(tmp_path / "m.gguf")))
        assert files_in(library.root) == []

    def test_an_image_that_fits_packed_but_not_unpacked(self, small_disk: Path):
        """Its layer is here, what is in it does not fit: nothing of either is left."""
        from greenroom.store.layouts import OCI_MANIFEST

        from .models import descriptor
        from .test_tars import archive

        library = Library(small_disk / "store")
        stored = into(library, remote(), BLOBS)
        layer = gzip.compress(archive(("models/m.gguf", gguf(900_000)[:-800_000] + bytes(800_000))))
        config = json.dumps({"config": {"Labels": {"org.containers.type": "ai.image.model.raw"}}}).encode()
        head = descriptor(config, "application/vnd.oci.image.config.v1+json")
        entry = descriptor(layer, "application/vnd.oci.image.layer.v1.tar+gzip")
        manifest = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": head, "layers": [entry]}).encode()
        before = files_in(library.root)
        with pytest.raises((NoRoom, Refused), match=r"is full|unpacks to more"):
            into(library, read_manifest(TWO, manifest, config), {digest(layer): layer})
        assert files_in(library.root) == before
        assert library.verify(stored) == ()

    def test_taking_in_a_file_of_another_disk(self, tmp_path: Path, small_disk: Path):
        """No link leads from one disk to another: it is copied."""
        (tmp_path / "m.gguf").write_bytes(WEIGHTS)
        stored = Library(small_disk / "store").adopt(parse(str(tmp_path / "m.gguf")))
        (tmp_path / "m.gguf").write_bytes(b"other")
        assert contents(stored) == {"m.gguf": WEIGHTS}

    def test_several_writers_meet_a_full_disk(self, small_disk: Path):
        """All of them are told; nothing is left, and the next one may begin."""
        library = Library(small_disk / "store")
        big = gguf(2 << 20, seed=9)
        with library.pulling(remote(TWO, ("m.gguf", big))) as pulling:
            partial = pulling.begin(pulling.wanted()[0])
            assert partial is not None
            with partial, ThreadPoolExecutor(4) as threads:
                ranges = partial.missing(300_000)
                writing = [threads.submit(fill, partial, offset, length, big, 50_000) for offset, length in ranges]
                faults = [one.exception() for one in writing]
            assert any(isinstance(fault, NoRoom) for fault in faults)
            assert all(fault is None or isinstance(fault, NoRoom) for fault in faults)
            assert list((library.root / "partial").iterdir()) == []
            again = pulling.begin(pulling.wanted()[0])
            assert again is not None
            again.discard()

    def test_a_disk_that_is_wholly_full(self, small_disk: Path):
        library = Library(small_disk / "store")
        stored = into(library, remote(), BLOBS)
        with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with pytest.raises(NoRoom), library.pulling(remote(TWO)) as pulling:
            pulling.publish()
        assert library.all() == (stored,)
        library.remove(ONE)
        assert library.all() == ()

    def test_a_store_that_cannot_be_written_is_still_read(self, tmp_path: Path):
        """A store mounted read-only, as in a cluster."""
        library = Library(tmp_path / "store")
        into(library, remote(), BLOBS)
        if subprocess.run(["mount", "--bind", str(library.root), str(library.root)], capture_output=True, check=False).returncode != 0:
            pytest.skip("nothing can be mounted here: it needs root")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(library.root)], check=True)
            stored = library.ready(ONE)
            with library.using(stored):
                assert library.verify(stored) == ()
            assert library.partials() == ()
            with pytest.raises(StoreError, match="cannot be written"):
                library.remove(ONE)
        finally:
            subprocess.run(["umount", "-l", str(library.root)], check=True)


CHILD = """
import sys, os
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.store.test_library import BLOBS, remote, ONE
from tests.store.test_packing import into
from greenroom.store.library import Library
library = Library(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    into(library, remote(), BLOBS)
    library.remove(ONE)
    print("round", flush=True)
"""


@pytest.mark.slow
class TestProcesses:
    def child(self, root: Path) -> subprocess.Popen[str]:
        cwd = Path(__file__).resolve().parents[2]
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdout=subprocess.PIPE, text=True, cwd=cwd)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    def test_killed_at_any_moment_nothing_half_made_is_listed(self, tmp_path: Path):
        """A process pulls and removes in a loop and is killed at 20 random moments; what is listed each time is whole."""
        library = Library(tmp_path / "store")
        chance = random.Random(7)
        for _ in range(20):
            child = self.child(library.root)
            assert child.stdout is not None
            child.stdout.readline()  # one round: the killing is not always in the first
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(chance.uniform(0.0, 0.05))
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            for stored in library.all():
                assert library.verify(stored) == ()
                assert library.ready(ONE) == stored
            for part in library.partials():
                assert not part.active
        assert contents(into(library, remote(), BLOBS)) == {"m.gguf": WEIGHTS, "mmproj.gguf": PROJECTOR}
        library.gc(stale_s=0.0, now=lambda: time.time() + 1)
        assert library.verify(library.ready(ONE)) == ()
        library.remove(ONE)
        library.gc(stale_s=0.0, now=lambda: time.time() + 1)
        assert files_in(library.root) == []

    def test_several_processes_at_once(self, tmp_path: Path):
        """Two pull and remove the same model, this one sweeps and pulls: nobody fails, nobody sees half a model."""
        library = Library(tmp_path / "store")
        children = [self.child_of_two(library.root, n) for n in range(2)]
        rounds = 0
        while any(child.poll() is None for child in children):
            library.gc()
            for stored in library.all():
                assert stored.files
            rounds += 1
        for child in children:
            assert child.wait() == 0
        assert rounds > 0
        assert library.verify(library.ready(TWO)) == ()

    def child_of_two(self, root: Path, number: int) -> subprocess.Popen[bytes]:
        """Pulls a model of its own that shares all blobs with the other's, twenty times, and leaves the last one there."""
        code = CHILD.split("print(")[0] + (
            "from greenroom.store.references import parse\n"
            f"mine = parse('oci://h.example/mine{number}:v1')\n"
            "two = parse('oci://h.example/team/two:v1')\n"
            "for _ in range(20):\n"
            "    stored = pull(library, mine)\n"
            "    assert library.verify(stored) == (), library.verify(stored)\n"
            "    library.remove(mine)\n"
            "pull(library, two)\n"
        )
        helper = (
            "import time\n"
            "def pull(library, reference):\n"
            "    with library.pulling(remote(reference)) as pulling:\n"
            "        while wanted := pulling.wanted():\n"
            "            for file in wanted:\n"
            "                partial = pulling.begin(file)\n"
            "                if partial is None:\n"
            "                    continue\n"
            "                with partial:\n"
            "                    for offset, length in partial.missing(30_000):\n"
            "                        with partial.filling(offset, length) as filler:\n"
            "                            filler.write(BLOBS[file.digest][offset:offset + length])\n"
            "                    pulling.finish(partial, file)\n"
            "        return pulling.publish()\n"
        )
        cwd = Path(__file__).resolve().parents[2]
        return subprocess.Popen([sys.executable, "-c", code.replace("library = ", helper + "library = ", 1), str(root)], cwd=cwd)


class TestRoot:
    def test_where_it_lies(self):
        assert default_root({"GREENROOM_MODELS": "/srv/models"}) == Path("/srv/models")
        assert default_root({"XDG_DATA_HOME": "/data"}) == Path("/data/greenroom/models")

    def test_an_empty_place_is_an_empty_store(self, tmp_path: Path):
        library = Library(tmp_path / "nowhere")
        assert (library.all(), library.partials(), library.find(ONE)) == ((), (), None)
        assert not library.root.exists()

    def test_a_file_in_its_place_is_said(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be written"):
            Library(tmp_path / "file" / "store").tag(
                Stored(ONE, "sha256:" + "0" * 64, "files", (), tmp_path, remote().description, 0.0), ONE
            )

    def test_cards_are_json_that_others_can_read(self, library: Library):
        stored = into(library, remote(), BLOBS)
        card = json.loads((stored.folder.parent / "model.json").read_bytes())
        assert (card["version"], card["digest"], card["reference"]) == (1, stored.digest, str(ONE))
        shutil.rmtree(library.root)
