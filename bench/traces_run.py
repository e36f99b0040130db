"""The traces through greenroom with fake engines: mean of several seeded runs, next to what is asked for.

    python -m bench.traces_run [--seeds 5] [--only a2,c] [--out FILE.json]

One 1,000 MiB model fits into 1,500 MiB; a start takes 2 s plus or minus 0.5 (seeded by model and number of the start),
8 slots, 4,000 prompt tokens a second, 10 ms a token.  `c200` is the chain with retrieval models of 200 MiB: all three
fit, and nothing in the configuration says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import drive
from .harness import ENGINE, HERE, greenroom, median, percentile, print_table, workplace

CAPACITY_MIB = 1500
MODEL_MIB = 1000
SLOTS = 8
STARTUP_S, JITTER_S = 2.0, 0.5
TOKEN_DELAY_S = 0.01
PREFILL_TPS = 4000
VISITOR = "m2"
GAP_S_MAX = 0.020

Measure = Callable[[drive.Report], float]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure, as a mean over the seeds, may be at most."""

    what: str
    measure: Measure
    at_most: float


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    file: str
    retrieval_mib: int
    goals: tuple[Goal, ...]


def p50(report: drive.Report) -> float:
    return median(report.latencies())


def mean(report: drive.Report) -> float:
    return statistics.fmean(report.latencies())


def starts(report: drive.Report) -> float:
    return float(report.starts)


def makespan(report: drive.Report) -> float:
    return report.makespan_s


def chain_p50(report: drive.Report) -> float:
    return median(report.chains())


def visitor_worst(report: drive.Report) -> float:
    return max(report.latencies(VISITOR))


CASES = (
    Case("a1", "a1_alternate_open.csv", MODEL_MIB, (Goal("mean latency s", mean, 2.8),)),
    Case("a2", "a2_alternate_closed.csv", MODEL_MIB, (Goal("starts", starts, 2), Goal("makespan s", makespan, 13))),
    Case("b", "b_bursty_zipf4.csv", MODEL_MIB, (Goal("p50 latency s", p50, 4.6), Goal("starts", starts, 25))),
    Case("c", "c_rag_chain.csv", MODEL_MIB, (Goal("chain p50 s", chain_p50, 10),)),
    Case("c200", "c_rag_chain.csv", 200, (Goal("starts", starts, 3), Goal("chain p50 s", chain_p50, 1.1))),
    Case("d", "d_rare_visitor.csv", MODEL_MIB, (Goal("mean latency s", mean, 1.8), Goal("visitor's worst s", visitor_worst, 11))),
)


def configuration(case: Case, seed: int, work: Path, api_key: str = "") -> str:
    """The simplest file a user could write for these models."""
    lines = ["devices:", f"  bench0: {{memory: {CAPACITY_MIB}MiB, headroom: 0MiB, probe: none}}", "models:"]
    for model in sorted({row.model for row in drive.read_trace(HERE / "traces" / case.file)}):
        mib = case.retrieval_mib if model in ("emb", "rr") else MODEL_MIB
        flags = f"--model {model} --startup {STARTUP_S} --startup-jitter {JITTER_S} --jitter-seed {seed} --vram {mib}"
        flags += f" --vram-total {CAPACITY_MIB} --ledger {work}/ledger --events {work}/events.jsonl --slots {SLOTS}"
        flags += f" --token-delay {TOKEN_DELAY_S} --prefill-tps {PREFILL_TPS}"
        command = " ".join([*ENGINE, "--port ${PORT}", flags])
        lines += [f"  {model}:", f"    cmd: {command}", f"    memory: {mib}MiB", "    device: bench0", f"    parallel: {SLOTS}"]
    if api_key:
        lines.append(f"apiKeys: [{api_key}]")
    return "\n".join(lines) + "\n"


def run_case(case: Case, seed: int) -> drive.Report:
    with workplace() as work, greenroom(configuration(case, seed, work), work) as server:
        return drive.run(HERE / "traces" / case.file, server.port, work / "events.jsonl")


def rows_of(case: Case, reports: Sequence[drive.Report]) -> list[list[str]]:
    failed = sum(len(report.seen) - len(report.latencies()) for report in reports)
    asked = sum(len(report.seen) for report in reports)
    rows = []
    for goal in case.goals:
        values = [goal.measure(report) for report in reports]
        verdict = "ok" if statistics.fmean(values) <= goal.at_most and not failed else "MISSED"
        spread = f"{min(values):.2f} .. {max(values):.2f}"
        rows.append(
            [case.name, goal.what, f"{statistics.fmean(values):.2f}", spread, f"<= {goal.at_most:g}", f"{failed} of {asked}", verdict]
        )
    return rows


def details(case: Case, reports: Sequence[drive.Report]) -> list[str]:
    """Everything else worth knowing, as means over the seeds."""

    def over(measure: Measure) -> str:
        return f"{statistics.fmean(measure(report) for report in reports):.2f}"

    def p95(report: drive.Report) -> float:
        return percentile(report.latencies(), 0.95)

    def worst(report: drive.Report) -> float:
        return max(report.latencies())

    chain = over(chain_p50) if any(row.client for row in drive.read_trace(HERE / "traces" / case.file)) else "-"
    return [case.name, over(starts), over(makespan), over(mean), over(p50), over(p95), over(worst), chain]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="comma-separated names of traces")
    parser.add_argument("--out", type=Path, help="also write every request of every run, as JSON")
    options = parser.parse_args()
    wanted = [case for case in CASES if not options.only or case.name in options.only.split(",")]
    goals: list[list[str]] = [["trace", "figure", "mean", "single runs", "asked", "failed", "verdict"]]
    whole: list[list[str]] = [["trace", "starts", "makespan", "mean", "p50", "p95", "worst", "chain p50"]]
    swaps: list[float] = []
    kept: dict[str, list[list[dict[str, object]]]] = {}
    for case in wanted:
        reports = []
        for seed in range(1, options.seeds + 1):
            reports.append(run_case(case, seed))
            print(
                f"{case.name} seed {seed}: {len(reports[-1].latencies())} of {len(reports[-1].seen)} ok, {reports[-1].starts} starts",
                file=sys.stderr,
            )
            for error, count in reports[-1].failed.items():
                print(f"  {count} x {error}", file=sys.stderr)
        goals += rows_of(case, reports)
        whole.append(details(case, reports))
        swaps += [gap for report in reports for gap in report.ready_to_first_request_s]
        kept[case.name] = [
            [{"model": s.row.model, "at": s.row.at_s, "latency_s": round(s.latency_s, 4), "error": s.error} for s in report.seen]
            for report in reports
        ]
    gap_s = statistics.fmean(swaps) if swaps else float("nan")
    verdict = "ok" if gap_s <= GAP_S_MAX else "MISSED"
    spread = f"{min(swaps) * 1e3:.1f} .. {max(swaps) * 1e3:.1f}" if swaps else "-"
    goals.append(["all", "ready to first request ms", f"{gap_s * 1e3:.1f}", spread, f"<= {GAP_S_MAX * 1e3:g}", "", verdict])
    print()
    print_table(goals)
    print()
    print_table(whole)
    if options.out:
        options.out.write_text(json.dumps(kept), encoding="utf-8")
    sys.exit(any(row[-1] == "MISSED" for row in goals))


if __name__ == "__main__":
    main()
