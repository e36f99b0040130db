"""`greenroom list`, `inspect`, `rm`, `gc` and `verify`, on a store made by the library."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import Result

from greenroom.cli.pull_cmd import SIZE
from greenroom.config.units import size_bytes
from greenroom.store.facts import Stored
from greenroom.store.library import Library
from greenroom.store.references import parse
from tests.cli.conftest import run
from tests.store.models import gguf
from tests.store.test_library import BLOBS, ONE, TWO, WEIGHTS, begin_one, remote
from tests.store.test_packing import into


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "store")


@pytest.fixture
def stored(library: Library) -> Stored:
    return into(library, remote(), BLOBS)


def greenroom(library: Library, *args: str) -> Result:
    return run(*args, GREENROOM_MODELS=str(library.root))


class TestPull:
    @pytest.mark.parametrize("written", ["20GiB", "1.5GiB", "24GB", "800mb", "1500 MiB", "100B"])
    def test_a_size_is_what_the_configuration_calls_so(self, written: str):
        assert SIZE.convert(written, None, None) == size_bytes(written)

    @pytest.mark.parametrize(
        ("written", "sentence"),
        [
            ("-5GiB", '"-5GiB" is negative, and a size cannot be. Write 80GiB or 1500MiB.'),
            ("0GiB", '"0GiB" is nothing at all. Write 80GiB or 1500MiB.'),
            ("20G", '"20G" has no full unit. Write 20GiB (or 20GB for the decimal one).'),
            ("1000000", "1000000 has no unit. Write 1000000GiB or 1000000MiB."),
            ("lots\x1b[2J", '"lots\\x1b[2J" is not a size. Write 80GiB or 1500MiB.'),
        ],
    )
    def test_what_is_no_size_is_refused_before_anybody_is_asked(self, library: Library, written: str, sentence: str):
        result = greenroom(library, "pull", "oci://127.0.0.1:1/team/one:v1", "--max-size", written)
        assert result.exit_code == 2
        assert result.stderr.endswith(f"Error: Invalid value for '--max-size': {sentence}\n")


class TestList:
    def test_one_line_a_model(self, library: Library, stored: Stored):
        lines = greenroom(library, "list").stdout.splitlines()
        assert lines[0].split() == ["NAME", "SIZE", "FORMAT", "PARAMS", "LAYOUT", "PULLED", "ID"]
        words = lines[1].split()
        assert (words[0], words[-1], "modelpack" in words) == (str(ONE), stored.digest[7:19], True)
        assert len(lines) == 2

    def test_the_option_wins_over_the_environment(self, tmp_path: Path, library: Library, stored: Stored):
        assert str(ONE) in run("list", "--store", str(library.root), GREENROOM_MODELS=str(tmp_path / "other")).stdout
        assert "no models here" in run("list", GREENROOM_MODELS=str(tmp_path / "other")).stdout

    def test_what_is_not_finished_and_what_is_damaged_is_said(self, library: Library, stored: Stored):
        with library.pulling(remote(TWO, ("other.gguf", gguf(8 << 10, seed=3)))) as pulling:
            begin_one(pulling, 0.5, gguf(8 << 10, seed=3))
        stored.entry.chmod(0o644)
        os.truncate(stored.entry, 100)
        greenroom(library, "verify")
        printed = greenroom(library, "list").stdout
        assert f"{ONE} is damaged and not served: `greenroom pull {ONE}` mends it" in printed
        assert f"{TWO}: 4 KiB of 8 KiB, was not pulled wholly; `greenroom pull {TWO}` goes on" in printed

    def test_commands_that_are_told_can_be_pasted(self, tmp_path: Path, library: Library):
        """Whatever a file is called."""
        path = tmp_path / "$(touch evil);'x'.gguf"
        path.write_bytes(WEIGHTS)
        stored = library.adopt(parse(str(path)))
        stored.entry.unlink()
        greenroom(library, "verify")
        told = re.findall(r"`greenroom pull (.*)`", greenroom(library, "list").stdout)
        assert [shlex.split(command) for command in told] == [[str(stored.reference)]]

    def test_json(self, library: Library, stored: Stored):
        (model,) = json.loads(greenroom(library, "list", "--json").stdout)["models"]
        assert (model["name"], model["short_name"], model["size"]) == (str(ONE), "one", stored.size)
        assert Path(model["path"]).read_bytes() == WEIGHTS

    def test_quiet(self, library: Library, stored: Stored):
        assert greenroom(library, "list", "-q").stdout == f"{ONE}\n"

    def test_a_store_that_is_none(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        result = run("list", "--store", str(tmp_path / "file"))
        assert (result.exit_code, "cannot be read" in result.stderr) == (1, True)

    def test_hostile_words_from_a_manifest_do_not_reach_the_terminal(self, library: Library):
        from greenroom.store.layouts import read_manifest
        from tests.store.models import modelpack, named

        config = json.dumps({"config": {"quantization": "Q4\x1b[2J", "paramSize": "1\n2"}}).encode()
        manifest = modelpack(named(WEIGHTS, "m.gguf"), config=config, annotations={"x\x1b[31m": "y\r\nz"})
        into(library, read_manifest(ONE, manifest, config), BLOBS)
        for command in (("list",), ("inspect", "one")):
            printed = greenroom(library, *command).stdout
            assert "\x1b" not in printed
            assert "\r" not in printed


class TestInspect:
    @pytest.mark.parametrize("name", ["one", str(ONE), "h.example/team/one:v1"])
    def test_all_that_is_known(self, library: Library, stored: Stored, name: str):
        printed = greenroom(library, "inspect", name).stdout
        for words in (stored.digest, str(stored.entry), "llama", "2,048 tokens", "mmproj.gguf  projector", stored.files[0].digest):
            assert words in printed

    def test_json(self, library: Library, stored: Stored):
        said = json.loads(greenroom(library, "inspect", stored.digest[7:19], "--json").stdout)
        assert [file["role"] for file in said["files"]] == ["weights", "projector"]
        assert (said["gguf"]["tensors"], said["gguf"]["chat_template"]) == (1, False)

    def test_what_is_not_here(self, library: Library, stored: Stored):
        result = greenroom(library, "inspect", "two")
        assert (result.exit_code, "greenroom list" in result.stderr) == (1, True)

    def test_a_pull_that_is_not_finished(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling, 0.5)
        for name in ("one", str(ONE)):
            assert "goes on with it" in greenroom(library, "inspect", name).stderr


class TestRm:
    def test_by_short_name(self, library: Library, stored: Stored):
        assert greenroom(library, "rm", "one").stdout.startswith(f"{ONE}: removed, ")
        assert library.all() == ()

    def test_one_that_is_unknown_does_not_keep_the_others(self, library: Library, stored: Stored):
        result = greenroom(library, "rm", "nope", "one")
        assert (result.exit_code, library.all()) == (1, ())
        assert "nope" in result.stderr

    def test_json(self, library: Library, stored: Stored):
        """What went, in the words of `gc`; what could not is told apart, and alone where nothing went."""
        result = greenroom(library, "rm", "nope", "one", "--json")
        (told,) = json.loads(result.stdout)
        assert (result.exit_code, told["name"], told["kept"]) == (1, str(ONE), [])
        assert told["bytes"] >= stored.size
        assert told["removed"]
        assert "no model 'nope'" in result.stderr
        again = greenroom(library, "rm", "one", "--json")
        assert (again.exit_code, again.stdout) == (1, "")

    def test_one_that_is_served(self, library: Library, stored: Stored):
        with library.using(stored):
            result = greenroom(library, "rm", "one")
            assert (result.exit_code, "being served" in result.stderr) == (1, True)
            assert greenroom(library, "rm", "--force", "one").exit_code == 0
        assert library.all() == ()

    def test_an_id_with_two_names_is_asked_about(self, library: Library, stored: Stored):
        library.tag(stored, TWO)
        result = greenroom(library, "rm", stored.digest[7:19])
        assert (result.exit_code, "has 2 names" in result.stderr, len(library.all())) == (1, True, 2)

    def test_parts_of_an_interrupted_pull(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling, 0.5)
        assert greenroom(library, "rm", "one").exit_code == 0
        assert library.partials() == ()

    def test_a_link_to_a_file_that_stays_gives_nothing_back(self, tmp_path: Path, library: Library):
        """Taken in by a hard link: the bytes are still the original's."""
        (tmp_path / "m.gguf").write_bytes(gguf(5 << 20))
        taken = library.adopt(parse(str(tmp_path / "m.gguf")))
        if taken.entry.stat().st_nlink < 3:
            pytest.skip("this file system clones instead of linking")
        assert re.search(r"removed, \d+ KiB are free", greenroom(library, "rm", "m").stdout)


class TestGc:
    def test_nothing_to_do(self, library: Library, stored: Stored):
        assert greenroom(library, "gc").stdout == "There is nothing to remove.\n"

    def test_dry_run_then_real(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling)
        dry = greenroom(library, "gc", "--dry-run").stdout
        assert dry.startswith("would remove blob ")
        assert greenroom(library, "gc", "--dry-run").stdout == dry
        assert greenroom(library, "gc").stdout.startswith("removed blob ")
        assert greenroom(library, "gc").stdout == "There is nothing to remove.\n"

    def test_fresh_parts_only_when_asked(self, library: Library):
        with library.pulling(remote()) as pulling:
            begin_one(pulling, 0.5)
        assert json.loads(greenroom(library, "gc", "--json").stdout)["removed"] == []
        assert json.loads(greenroom(library, "gc", "--parts", "--json").stdout)["removed"] == [f"part of {ONE} (m.gguf)"]


class TestVerify:
    def test_as_pulled(self, library: Library, stored: Stored):
        result = greenroom(library, "verify")
        assert (result.exit_code, result.stdout.startswith(f"{ONE}: 2 files, ")) == (0, True)

    def test_a_flipped_byte(self, library: Library, stored: Stored):
        stored.entry.chmod(0o644)
        with stored.entry.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff\x00\xff")
        result = greenroom(library, "verify", "one")
        assert (result.exit_code, "m.gguf is damaged" in result.stdout) == (1, True)
        (said,) = json.loads(greenroom(library, "verify", "--json").stdout)
        assert said["damaged"][0]["path"] == "m.gguf"

    def test_an_empty_store(self, library: Library):
        assert greenroom(library, "verify").stdout == "There are no models here.\n"
