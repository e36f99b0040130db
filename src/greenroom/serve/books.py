"""What is told to the ledger: every event of the core with what is booked after it, and every request's end."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom import __version__
from greenroom.core.facts import Action, Event, InstanceReported, MemoryMeasured, RequestArrived, RequestFinished, SetupChanged
from greenroom.ledger.chronicle import SAMPLE_EVERY_S, Book
from greenroom.ledger.store import Ledger
from greenroom.proxy.record import Record
from greenroom.shell.heart import Shell

from .accounts import Accounts

ANEW = "greenroom met an inner fault and started over"


class Books:
    """A hook of the shell and the Hooks of the data plane."""

    def __init__(self, shell: Shell, ledger: Ledger, accounts: Accounts) -> None:
        self._shell, self._ledger = shell, ledger
        self._scheduler = shell.scheduler
        self._sampled: dict[str, float] = {}
        self._count, self._ended, self._hot = accounts.on_request_end, ledger.ended, ledger.saw  # looked up once
        ledger.boot(shell.setup, __version__)
        shell.hooks.append(self.saw)

    def saw(self, event: Event, actions: Sequence[Action]) -> None:
        if (kind := event.__class__) is RequestArrived or kind is RequestFinished:  # nearly all
            self._hot(event, actions)
            return
        if self._shell.scheduler is not self._scheduler:  # the shell has started over; its first event then is a tick
            self._scheduler = self._shell.scheduler
            self._ledger.boot(self._shell.setup, __version__, why=ANEW)
        if isinstance(event, InstanceReported) or (isinstance(event, MemoryMeasured) and self._is_kept(event)):
            self._ledger.saw(event, actions, self._booked(event.at))
            return
        self._ledger.saw(event, actions)
        if isinstance(event, SetupChanged):
            self._ledger.boot(event.setup, __version__)

    def on_request_end(self, record: Record) -> None:
        self._count(record)
        self._ended(record)

    def _is_kept(self, sample: MemoryMeasured) -> bool:
        """Whether the ledger will remember it: a look at the whole book costs a quarter of a millisecond."""
        if sample.at - self._sampled.get(sample.device, -SAMPLE_EVERY_S) < SAMPLE_EVERY_S:
            return False
        self._sampled[sample.device] = sample.at
        return True

    def _booked(self, at: float) -> Book:
        view = self._scheduler.view(at)
        return {model.id: instance.reserved_mib for model in view.models for instance in model.instances}
