"""What became of requests is counted."""

from greenroom.proxy.record import Record
from greenroom.serve.accounts import Accounts


def record(model: str, outcome: str) -> Record:
    return Record(model, "inference", "POST", "/v1/chat/completions", "key-1", 200, outcome, "hot", 10, 20, 0, 0.1, 0.2)


def test_outcomes_are_counted_by_model() -> None:
    """Each end once."""
    accounts = Accounts()
    for outcome in ("ok", "ok", "refused"):
        accounts.on_request_end(record("a", outcome))
    accounts.on_request_end(record("b", "cut"))

    assert (accounts.of("a"), accounts.of("b")) == ({"ok": 2, "refused": 1}, {"cut": 1})


def test_requests_of_no_model_are_not_counted() -> None:
    """Names come from clients: only ours may take room."""
    accounts = Accounts()
    accounts.on_request_end(record("", "refused"))

    assert accounts.of("") == {}
