"""The project as files: locks that agree with pyproject.toml, nothing that ties it to one machine, documents in order."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements.lock", "requirements-dev.lock", "models.lock")
IGNORED = frozenset(
    {".git", ".venv", ".cache", "runs", "build", "dist", "__pycache__"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".import_linter_cache"}
)
# Written in two parts, so that this file does not hold what it looks for.
FORBIDDEN = tuple(
    a + b
    for a, b in (
        ("/work/", "main"),
        ("/work/", "shared"),
        ("/work/", "."),
        ("/root", "/"),
        ("file:///", "opt"),
        ("/opt/", "wheels"),
        ("/opt/", "pypi"),
        ("pypi", ".org"),
        ("python", "hosted"),
        ("npmjs", ".org"),
        ("deb.debian", ".org"),
        ("--index", "-url "),
        ("--find", "-links "),
        ("trusted", "-host "),
    )
)


def text_files() -> Iterator[tuple[Path, str]]:
    for path in sorted(ROOT.rglob("*")):
        if path.is_file() and not IGNORED & set(path.relative_to(ROOT).parts):
            try:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def locked(name: str) -> Mapping[str, str]:
    """Package -> version of a lock file."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(match[1]): match[2] for line in lines if (match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line))}


def wanted() -> Mapping[str, list[str]]:
    """Lock file -> the requirements it was made from."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    run = [*data["project"]["dependencies"], *data["project"]["optional-dependencies"]["demo"], *data["build-system"]["requires"]]
    dev = [item for item in data["dependency-groups"]["dev"] if not item.startswith("greenroom")]
    return {"requirements.lock": run, "requirements-dev.lock": run + dev}


@pytest.mark.parametrize("words", FORBIDDEN)
def test_no_file_is_tied_to_one_machine(words: str) -> None:
    """A clone works anywhere: no path of a development machine, no registry's address."""
    found = [str(path) for path, text in text_files() if words in text and path.name != "test_project.py"]

    assert found == []


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_locks_satisfy_the_project(name: str) -> None:
    """Every requirement in pyproject.toml is locked at a version that satisfies it; after a change run `make lock`."""
    versions = locked(name)
    for text in wanted()[name]:
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))

        assert version is not None, f"{requirement.name} is not in {name}"
        assert requirement.specifier.contains(version, prereleases=True), f"{name} has {requirement.name} {version}, asked is {requirement}"


def test_locks_agree_with_each_other() -> None:
    """What tests run with is what users run with."""
    dev = locked("requirements-dev.lock")

    assert {name: dev.get(name) for name in locked("requirements.lock")} == dict(locked("requirements.lock"))


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_file_has_a_hash(name: str) -> None:
    """pip installs exactly the files that were locked, and the lock says nothing of where they come from."""
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text(encoding="utf-8").strip())
    packages = [entry for entry in entries if not entry.startswith("#")]

    assert packages
    for entry in packages:
        assert re.match(r"[A-Za-z0-9._-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", entry), entry[:120]
        assert "://" not in entry


def test_decisions_are_numbered_and_short() -> None:
    """One page each, numbered without gaps, with context, decision and consequences."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert [page.name[:4] for page in pages] == [f"{number:04d}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        headings = re.findall(r"^## (\w+)", text, re.MULTILINE)
        assert [heading for heading in headings if heading in ("Context", "Decision", "Consequences")] == [
            "Context",
            "Decision",
            "Consequences",
        ]
        assert len(text.splitlines()) <= 70, f"{page.name} is longer than a page"


def test_make_knows_its_targets() -> None:
    """`demo`, `test`, `check` and `bench` exist, and ARGS is passed on."""
    for target in ("demo", "test", "check", "bench"):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
    printed = subprocess.run(["make", "-n", "demo", "ARGS=--once"], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "greenroom demo --once" in printed


def test_ci_runs_checks_and_tests() -> None:
    """What a change must pass is what a developer runs by hand."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert "make check" in script
    assert "make test" in script
