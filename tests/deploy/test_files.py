"""Files are written all or none, and nothing of anybody else's is overwritten unasked."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from greenroom.deploy import files
from greenroom.deploy.files import FilesError

SOME = {"a.txt": "one\n", "deep/er/b.txt": "two\n", "c.txt": "without an end"}


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_all_are_written_and_nothing_else_stays(tmp_path: Path) -> None:
    """Every file is there with its text, folders are made, nothing temporary is left, everybody may read them."""
    written = files.write(SOME, tmp_path / "new" / "folder")
    assert tree(tmp_path / "new" / "folder") == SOME
    assert [path.name for path in written] == ["a.txt", "b.txt", "c.txt"]
    assert stat.S_IMODE(written[0].stat().st_mode) & 0o444


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    """A second run over equal files is no overwriting."""
    files.write(SOME, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.txt")}
    files.write(SOME, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.txt")} == before


def test_what_is_there_is_named_and_kept(tmp_path: Path) -> None:
    """Each file that would be lost is named, and no other is written either."""
    (tmp_path / "a.txt").write_text("mine")
    (tmp_path / "c.txt").write_text("mine too")
    with pytest.raises(FilesError, match=r"a\.txt.*c\.txt would be overwritten.*--force"):
        files.write(SOME, tmp_path)
    assert tree(tmp_path) == {"a.txt": "mine", "c.txt": "mine too"}


def test_force_overwrites(tmp_path: Path) -> None:
    """With --force they are replaced, and what was there leaves no copy."""
    (tmp_path / "a.txt").write_text("mine")
    files.write(SOME, tmp_path, force=True)
    assert tree(tmp_path) == SOME


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    """A link where a file is to be is not written through."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.txt").symlink_to(elsewhere)
    with pytest.raises(FilesError):
        files.write(SOME, folder)
    files.write(SOME, folder, force=True)
    assert elsewhere.read_text() == "precious"
    assert not (folder / "a.txt").is_symlink()


def test_a_folder_in_the_way_is_told(tmp_path: Path) -> None:
    """A folder where a file is to be is not removed, --force or not."""
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(FilesError, match="is a folder"):
        files.write(SOME, tmp_path, force=True)
    assert tree(tmp_path) == {}


def test_a_file_in_the_way_of_a_folder_leaves_nothing(tmp_path: Path) -> None:
    """Files that could have been written are taken back when one cannot be."""
    (tmp_path / "deep").write_text("a file")
    with pytest.raises(FilesError, match=r"cannot be written.*nothing was written"):
        files.write(SOME, tmp_path)
    assert tree(tmp_path) == {"deep": "a file"}


def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room half-way: old files are still there, new ones are not, folders neither."""
    (tmp_path / "a.txt").write_text("mine")
    calls = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FilesError, match="no space left"):
        files.write(SOME, tmp_path, force=True)
    assert tree(tmp_path) == {"a.txt": "mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_a_rename_that_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the fault comes between two of the files, the earlier one is as it was."""
    (tmp_path / "a.txt").write_text("mine")
    replace = os.replace

    def once_too_often(source: Path, target: Path) -> None:
        if Path(target).name == "c.txt":
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", once_too_often)
    with pytest.raises(FilesError, match="input/output error"):
        files.write(SOME, tmp_path, force=True)
    assert tree(tmp_path) == {"a.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle is no half-written set."""

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write(SOME, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_difference_is_a_patch(tmp_path: Path) -> None:
    """`diff` shows new files whole and changed ones by lines; equal ones are not in it."""
    assert files.diff(SOME, tmp_path).count("--- /dev/null") == 3
    files.write(SOME, tmp_path)
    assert files.diff(SOME, tmp_path) == ""
    (tmp_path / "a.txt").write_text("none\n")
    assert files.diff(SOME, tmp_path) == "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-none\n+one\n"


def test_one_stream_tells_the_files_apart() -> None:
    """Several files are printed behind their paths; a single one as it is."""
    assert files.stream(SOME) == "# --- a.txt\none\n# --- deep/er/b.txt\ntwo\n# --- c.txt\nwithout an end\n"
    assert files.stream({"a.txt": "one\n"}) == "one\n"


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Whatever a name became, no file lands beside the folder."""
    for name in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(FilesError, match="not a path inside"):
            files.write({name: ""}, tmp_path)


def test_a_comment_stays_a_comment() -> None:
    """Line ends in what is put into a comment begin new comments, never text of the file."""
    assert files.commented(["one\nExecStart=/bin/false", ""]) == "# one\n# ExecStart=/bin/false\n#\n"


def test_two_texts_of_one_name_are_a_fault() -> None:
    """Equal files may be merged, different ones of one name may not."""
    assert files.merged({"a": "1"}, {"a": "1", "b": "2"}) == {"a": "1", "b": "2"}
    with pytest.raises(FilesError, match="would be called a"):
        files.merged({"a": "1"}, {"a": "2"})
