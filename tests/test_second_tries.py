"""`scripts/test`: a few failures are tried a second time alone; a fault stays a fault."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTY = "def test_{0}():\n    assert 0\n"
UNSTEADY = """def test_{0}():
    from pathlib import Path
    seen = Path(__file__).with_name('seen')
    assert seen.exists() or seen.touch()
"""


def tried(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """A project of these tests, its tests run as `make test` runs ours."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", folder / "scripts" / "test")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text("".join(text.format(number) for number, text in enumerate(tests)))
    return subprocess.run(["scripts/test", "-q"], cwd=folder, check=False, capture_output=True, text=True)


def test_what_passes_alone_is_named_and_lets_the_rest_pass(tmp_path: Path) -> None:
    done = tried(tmp_path, UNSTEADY, "def test_{0}():\n    pass\n")

    assert done.returncode == 0, done.stdout
    assert "UNSTEADY" in done.stdout
    assert done.stdout.endswith("  test_it.py::test_0\n")


def test_what_fails_again_fails(tmp_path: Path) -> None:
    done = tried(tmp_path, FAULTY, UNSTEADY)

    assert done.returncode == 1, done.stdout
    assert "UNSTEADY" not in done.stdout


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    done = tried(tmp_path, *[FAULTY] * 4)

    assert done.returncode == 1, done.stdout
    assert "4 tests failed, more than the 3" in done.stderr


def test_tests_that_cannot_be_read_fail(tmp_path: Path) -> None:
    assert tried(tmp_path, "def test_{0}(:\n").returncode == 2
