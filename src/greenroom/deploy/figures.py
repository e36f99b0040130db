"""The page of an engine's own figures, which Prometheus and endpoint pickers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from greenroom.config.errors import one_line
from greenroom.deploy.commands import dialect_of, has_key, takes_words
from greenroom.deploy.intent import Workload

OWN_PAGE = "/metrics"  # of greenroom
SWITCHES: Mapping[str, str] = {"llama_server": "--metrics", "sglang": "--enable-metrics"}  # others have it always, or never


def switched_on(workload: Workload) -> Workload:
    """With its page, where a word of its command makes one."""
    switch = SWITCHES.get(workload.kind)
    if switch is None or page(workload) or not takes_words(workload.argv):
        return workload
    asked = replace(workload, argv=(*workload.argv, switch))
    return asked if page(asked) else workload


def page(workload: Workload) -> str:
    """Its path; "" where there is none, or none that may be asked: a llama-server that sleeps by itself would not get to."""
    if not workload.model:
        return OWN_PAGE
    engine = dialect_of(workload)
    call = engine.metrics_call()
    if call is None or (workload.kind == "llama_server" and has_key(engine)):  # one that no Secret holds
        return ""
    return f"{engine.readiness().base_path}{call.path}"


def key(workload: Workload) -> str:
    """The key in the set's secrets that opens its page; "" where it is open: llama-server's alone is locked."""
    names = dialect_of(workload).key_variables if workload.kind == "llama_server" else ()
    return next((key for name, key in workload.secret_env if name in names), "")


def left_out(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """A sentence about those that are not watched; () where all are."""
    names = [one_line(one.model) for one in workloads if not page(one)]
    return (f"Without a monitor, for their engines have no page of figures that may be asked: {', '.join(names)}.",) if names else ()
