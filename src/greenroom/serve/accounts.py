"""Counts of what became of requests, since the server started; and the latest of them."""

from __future__ import annotations

import time
from collections import deque

from greenroom.proxy.record import Record

LATEST_KEPT = 1024


class Accounts:
    """Told of every request's end by the data plane (its Hooks); read by the control plane."""

    __slots__ = ("_by_model", "latest")

    def __init__(self) -> None:
        self.latest: deque[tuple[float, Record]] = deque(maxlen=LATEST_KEPT)  # (monotonic s, how it ended), oldest first
        self._by_model: dict[str, dict[str, int]] = {}

    def on_request_end(self, record: Record) -> None:
        """One more of its outcome; requests that named no model of ours are not counted."""
        if not record.model:
            return
        self.latest.append((time.monotonic(), record))
        counts = self._by_model.get(record.model)
        if counts is None:
            counts = self._by_model[record.model] = {}
        counts[record.outcome] = counts.get(record.outcome, 0) + 1

    def of(self, model: str) -> dict[str, int]:
        """Outcome -> requests of this model: ok, client_gone, engine_broke, cut, refused."""
        return dict(self._by_model.get(model, {}))
