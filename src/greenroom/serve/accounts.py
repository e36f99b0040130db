"""Counts of what became of requests, since the server started; and the latest of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from time import monotonic

from greenroom.ledger.metrics import class_of
from greenroom.proxy.record import Record

LATEST_KEPT = 256  # more would be told no page, and each that leaves would be fetched into the processor's cache again


class Accounts:
    """Told of every request's end by the data plane (its Hooks); read by the control plane."""

    __slots__ = ("_by_model", "_peer_answers", "_peer_tokens", "latest")

    def __init__(self) -> None:
        self.latest: deque[tuple[float, Record]] = deque(maxlen=LATEST_KEPT)  # (monotonic s, how it ended), oldest first
        self._by_model: dict[str, dict[str, int]] = {}
        self._peer_tokens: dict[str, tuple[int, int]] = {}
        self._peer_answers: dict[str, Counter[str]] = {}

    def on_request_end(self, record: Record) -> None:
        """One more of its outcome; requests that named no model of ours are not counted."""
        model, outcome = record.model, record.outcome
        if not model:
            return
        self.latest.append((monotonic(), record))
        try:
            self._by_model[model][outcome] += 1
        except KeyError:  # the first of its kind
            self._by_model.setdefault(model, {})[outcome] = 1
        if record.peer:
            before_in, before_out = self.tokens_of_peer(record.peer)
            self._peer_tokens[record.peer] = before_in + (record.tokens_in or 0), before_out + (record.tokens_out or 0)
            if outcome == "ok" and record.status:
                self._peer_answers.setdefault(record.peer, Counter())[class_of(record.status)] += 1

    def tokens_of_peer(self, peer: str) -> tuple[int, int]:
        """Tokens that went through a peer, as it told them: of prompts, of answers."""
        return self._peer_tokens.get(peer, (0, 0))

    def answers_of_peer(self, peer: str) -> Mapping[str, int]:
        """Class of status -> requests that ended ok with an answer of this peer."""
        return self._peer_answers.get(peer, {})

    def of(self, model: str) -> dict[str, int]:
        """Outcome -> requests of this model: ok, client_gone, engine_broke, cut, refused."""
        return dict(self._by_model.get(model, {}))
