"""These tests start servers of a gigabyte for minutes, so they run only when asked for (`-m vllm`, `make test-vllm`)."""

from __future__ import annotations

import pytest

from . import rig


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = rig.missing() or ("" if "vllm" in config.option.markexpr else "takes minutes: make test-vllm")
    if reason:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=reason))
