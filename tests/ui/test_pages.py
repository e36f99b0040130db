"""The dashboard's files: what is served, how, and what must not be in them.  No browser needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from greenroom.control import pages
from greenroom.control.app import make_app
from tests.control.fake import FakeFacade

FILES = pages.read_pages()
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
SHEETS = sorted(name for name in FILES if name.endswith(".css"))


def source(name: str) -> str:
    return FILES[name].body.decode()


@pytest.mark.parametrize("name", ["", *FILES])
async def test_every_file_is_served_with_its_type_and_the_strict_policy(name: str) -> None:
    async with TestClient(TestServer(make_app(FakeFacade()))) as client:
        answer = await client.get(f"/ui/{name}")
        assert answer.status == 200
        assert await answer.read() == FILES[name or "index.html"].body
        assert answer.headers["Content-Type"] == pages.TYPES[Path(name or "index.html").suffix]
        assert answer.headers["Content-Security-Policy"].startswith(
            "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:"
        )
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        again = await client.get(f"/ui/{name}", headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status, await again.read()) == (304, b"")
        assert again.headers["Content-Security-Policy"] == pages.POLICY


@pytest.mark.parametrize(
    "path",
    [
        "/ui/nothing.js",
        "/ui/views",
        "/ui/views/",
        "/ui//main.js",
        "/ui/../control/app.py",
        "/ui/%2e%2e/control/app.py",
        "/ui/..%2fcontrol%2fapp.py",
        "/ui/views/..%2f..%2f__init__.py",
        "/ui/%2fetc%2fpasswd",
        "/ui//etc/passwd",
        "/ui/main.js%00",
        "/ui/main.js/",
    ],
)
async def test_no_path_leads_out_of_the_folder(path: str) -> None:
    from yarl import URL

    async with TestClient(TestServer(make_app(FakeFacade()))) as client:
        answer = await client.get(URL(path, encoded=True), allow_redirects=False)
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "not_found"


async def test_a_page_can_be_asked_about_but_not_changed() -> None:
    async with TestClient(TestServer(make_app(FakeFacade()))) as client:
        head = await client.head("/ui/main.js")
        assert (head.status, await head.read()) == (200, b"")
        assert (await client.post("/ui/main.js")).status == 405


async def test_serving_the_page_does_not_even_look_at_the_models() -> None:
    facade = FakeFacade()
    async with TestClient(TestServer(make_app(facade))) as client:
        for name in FILES:
            await client.get(f"/ui/{name}")
    assert facade.looks == 0


def test_the_wheel_has_every_file_of_the_folder() -> None:
    found = {path.relative_to(pages.FOLDER).as_posix() for path in pages.FOLDER.rglob("*") if path.is_file()}
    assert set(FILES) == found
    assert "index.html" in FILES


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_small_and_makes_no_markup_out_of_text(name: str) -> None:
    text = source(name)
    assert len(text.splitlines()) < 250
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setAttribute\('style'", text)
    assert not re.search(r"\beval\(|new Function|\bimport\(", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "nothing is asked of other servers"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_import_is_there(name: str) -> None:
    for found in re.findall(r"from '([^']+)'", source(name)):
        assert found.startswith("."), found
        assert (pages.FOLDER / name).parent.joinpath(found).resolve().relative_to(pages.FOLDER).as_posix() in FILES


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_parses(name: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    copy = tmp_path / ("script.js" if name == "theme.js" else "script.mjs")
    copy.write_bytes(FILES[name].body)
    done = subprocess.run([node, "--check", str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_has_no_inline_script_or_style() -> None:
    html = source("index.html")
    assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", html)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    assert not re.search(r"(?:src|href)=\"(?!#|[\w./-]+\")", html), "addresses are relative: any path prefix works"


@pytest.mark.parametrize("name", SHEETS)
def test_a_sheet_fetches_nothing(name: str) -> None:
    assert not re.search(r"url\(|@import", source(name))
