"""Before any test of this folder starts something."""

from __future__ import annotations

import pytest

from .engines import children_before


@pytest.fixture(scope="module", autouse=True)
def _other_children() -> None:
    children_before.cache_clear()
    children_before()
