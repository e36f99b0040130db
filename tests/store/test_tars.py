"""Archives: what is read from honest ones, what is refused of the others, and that ours are the same every time."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.store import tars
from greenroom.store.facts import Damaged, Refused, StoreError
from greenroom.store.tars import END, FOLDER, SYMLINK, header_of, link_target, members, opened, padding_of


def archive(*entries: tuple[str, bytes | str], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Bytes are a file, a text is a symbolic link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def read(data: bytes, **more: int) -> list[tuple[str, str, bytes]]:
    return [(member.path, member.kind, body.read(1 << 20)) for member, body in members(io.BytesIO(data), what="a layer", **more)]


class TestReading:
    @pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_what_others_write(self, form: int):
        name = "models/" + "d" * 60 + "/" + "f" * 60 + ".gguf"
        assert read(archive((name, b"abc"), ("models/model.file", "x.gguf"), ("models/b", b"z" * 1000), form=form)) == [
            (name, "file", b"abc"),
            ("models/model.file", "symlink", b""),
            ("models/b", "file", b"z" * 1000),
        ]

    def test_long_and_foreign_names(self):
        name = "models/" + "é" * 90 + ".gguf"
        for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            assert [entry[0] for entry in read(archive((name, b"x"), form=form))] == [name]

    def test_bytes_that_are_not_asked_for_are_passed_over(self):
        found = [member.path for member, _ in members(io.BytesIO(archive(("a", b"1" * 5000), ("b", b"2"))), what="a layer")]
        assert found == ["a", "b"]

    def test_gzip_is_told_by_its_bytes(self, tmp_path: Path):
        data = archive(("a", b"first"), ("b", b"second"))
        for name, content in (("plain", data), ("packed", gzip.compress(data))):
            (tmp_path / name).write_bytes(content)
            with opened(tmp_path / name) as stream:
                assert [body.read(99) for _, body in members(stream, what=name)] == [b"first", b"second"]


class TestRefusals:
    @pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\b", "a\nb", "a/" + "b" * 300])
    def test_names_that_lead_out_or_mislead(self, name: str):
        with pytest.raises(Refused):
            read(archive((name, b"x")))

    @pytest.mark.parametrize(
        ("path", "target"),
        [("models/x", "/etc/passwd"), ("models/x", "../../etc"), ("models/x", "../y"), ("models/a/x", "../../b"), ("models/x", "")],
    )
    def test_links_that_lead_out_of_the_model(self, path: str, target: str):
        with pytest.raises(Refused, match="leads to"):
            link_target(tars.Member(path, "symlink", 0, target), "models")

    @pytest.mark.parametrize(
        ("target", "expected"), [("m.gguf", "models/m.gguf"), ("/models/m.gguf", "models/m.gguf"), ("./a/../m.gguf", "models/m.gguf")]
    )
    def test_links_that_stay_inside(self, target: str, expected: str):
        assert link_target(tars.Member("models/model.file", "symlink", 0, target), "models") == expected

    def test_an_archive_that_ends_in_a_file(self):
        with pytest.raises(Damaged, match="ends in the middle"):
            read(archive(("a", b"1" * 5000))[:2048])

    def test_what_is_no_archive(self):
        with pytest.raises(Damaged, match="no tar archive"):
            read(b"x" * 1024)

    def test_a_header_that_claims_a_name_of_gigabytes(self):
        """It is refused by its claim: nothing of that size is ever read into memory."""
        with pytest.raises(Refused, match="header of"):
            read(tars._block("x", 7 << 30, b"L", ""))

    def test_more_than_the_disk_holds(self):
        """Ten megabytes of zeros in ten kilobytes of gzip: the bound is on what comes out."""
        packed = gzip.compress(archive(("a", bytes(10 << 20))))
        with gzip.open(io.BytesIO(packed)) as stream, pytest.raises(Refused, match="unpacks to more"):
            list(members(stream, what="a layer", bytes_max=1 << 20))

    def test_a_broken_gzip(self, tmp_path: Path):
        (tmp_path / "x").write_bytes(gzip.compress(archive(("a", bytes(9000))))[:-30])
        with opened(tmp_path / "x") as stream, pytest.raises(Damaged):
            list(members(stream, what="x"))

    def test_sparse_files(self):
        with pytest.raises(Refused, match="sparse"):
            read(tars._block("x", 0, b"S", ""))

    def test_zstd(self, tmp_path: Path):
        (tmp_path / "x").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
        with pytest.raises(Refused, match="zstd"):
            opened(tmp_path / "x")

    @given(st.binary(max_size=1200), st.integers(0, 511), st.integers(0, 255))
    def test_any_bytes_are_an_archive_or_a_store_error(self, tail: bytes, place: int, value: int):
        """One changed byte in a header, anything behind it: read, or refused with a sentence."""
        good = bytearray(archive(("a", b"abc")))
        good[place] = value
        for data in (bytes(good), tail, archive(("a", b"abc"))[:1024] + tail):
            try:
                read(data)
            except StoreError:
                continue


class TestWriting:
    @given(
        st.lists(
            st.tuples(
                st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="/\\"), min_size=1, max_size=150),
                st.binary(max_size=700),
            ),
            max_size=4,
            unique_by=lambda entry: entry[0],
        )
    )
    def test_python_reads_what_we_write(self, entries: list[tuple[str, bytes]]):
        data = b"".join(header_of(f"models/{name}", size=len(body)) + body + padding_of(len(body)) for name, body in entries) + END
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            found = [(info.name, tar.extractfile(info).read(), info.mtime, info.uid, info.mode) for info in tar]  # type: ignore[union-attr]
        assert found == [(f"models/{name}", body, 0, 0, 0o644) for name, body in entries]

    def test_folders_links_and_sizes_beyond_8_gib(self):
        data = header_of("models/", kind=FOLDER) + header_of("models/model.file", kind=SYMLINK, target="m.gguf") + END
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert [(info.name, info.isdir(), info.linkname) for info in tar] == [
                ("models", True, ""),
                ("models/model.file", False, "m.gguf"),
            ]
        data = header_of("m.gguf", size=20 << 30)
        assert next(members(io.BytesIO(data), what="a layer"))[0].size == 20 << 30
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert tar.firstmember is not None
            assert tar.firstmember.size == 20 << 30
