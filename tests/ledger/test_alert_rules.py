"""What Prometheus itself makes of the shipped files: every expression parses, and each alert fires for what it is for."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.validators import tool

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
BOARD = ROOT / "deploy/grafana/greenroom.json"

# alert -> (series that must set it off, series that must not), in promtool's short form; one value a minute.
BUSY = "0+600x60"
SERIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "GreenroomDown": ({"up": "1x60"}, {"greenroom_build_info": "1x60"}),
    "GreenroomRequestsWaitLong": ({"greenroom_queue_oldest_seconds": "0+60x60"}, {"greenroom_queue_oldest_seconds": "90x60"}),
    "GreenroomSwapsMostOfTheTime": (
        {'greenroom_device_swap_ratio{device="gpu0"}': "0.7x60"},
        {'greenroom_device_swap_ratio{device="gpu0"}': "0.3x60"},
    ),
    "GreenroomModelFails": (
        {'greenroom_failures_total{model="a",cause="crash"}': "_x50 1x2 2x2 3x6"},
        {'greenroom_failures_total{model="a",cause="crash"}': "_x50 1x10"},
    ),
    "GreenroomModelQuarantined": ({'greenroom_model_quarantined{model="a"}': "1x60"}, {'greenroom_model_quarantined{model="a"}': "0x60"}),
    "GreenroomOutOfMemory": (
        {'greenroom_out_of_memory_total{model="a"}': "0x40 1x20"},
        {'greenroom_out_of_memory_total{model="a"}': "4x60"},
    ),
    "GreenroomWakesFail": (
        {'greenroom_wake_failures_total{model="a"}': "0x20 1x10 2x10 3x20"},
        {'greenroom_wake_failures_total{model="a"}': "3x60"},
    ),
    "GreenroomEnginesBreak": (
        {
            'greenroom_requests_total{model="a",outcome="ok"}': BUSY,
            'greenroom_requests_total{model="a",outcome="engine_broke"}': "0+60x60",
        },
        {
            'greenroom_requests_total{model="a",outcome="ok"}': BUSY,
            'greenroom_requests_total{model="a",outcome="engine_broke"}': "0+6x60",
        },
    ),
    "GreenroomEnginesAnswerErrors": (
        {
            'greenroom_answers_total{model="a",status="2xx"}': BUSY,
            'greenroom_answers_total{model="a",status="5xx"}': "0+60x60",
        },
        {
            'greenroom_answers_total{model="a",status="2xx"}': BUSY,
            'greenroom_answers_total{model="a",status="5xx"}': "0+6x60",
        },
    ),
    "GreenroomPeerAnswersErrors": (
        {
            'greenroom_peer_answers_total{peer="big-box",status="2xx"}': BUSY,
            'greenroom_peer_answers_total{peer="big-box",status="5xx"}': "0+60x60",
        },
        {
            'greenroom_peer_answers_total{peer="big-box",status="2xx"}': BUSY,
            'greenroom_peer_answers_total{peer="big-box",status="5xx"}': "0+6x60",
        },
    ),
    "GreenroomRefuses": (
        {'greenroom_requests_total{model="a",outcome="ok"}': BUSY, 'greenroom_requests_total{model="a",outcome="refused"}': "0+300x60"},
        {'greenroom_requests_total{model="a",outcome="ok"}': BUSY, 'greenroom_requests_total{model="a",outcome="refused"}': "0+60x60"},
    ),
    "GreenroomOthersHoldMemory": (
        {
            'greenroom_device_outside_bytes{device="gpu0"}': "30x60",
            'greenroom_device_headroom_bytes{device="gpu0"}': "2x60",
            'greenroom_device_capacity_bytes{device="gpu0"}': "80x60",
        },
        {
            'greenroom_device_outside_bytes{device="gpu0"}': "5x60",
            'greenroom_device_headroom_bytes{device="gpu0"}': "2x60",
            'greenroom_device_capacity_bytes{device="gpu0"}': "80x60",
        },
    ),
    "GreenroomHostMemoryLow": (
        {'greenroom_device_available_bytes{device="ram"}': "500000000x60"},
        {'greenroom_device_available_bytes{device="ram"}': "9000000000x60"},
    ),
    "GreenroomPeerDown": (
        {'greenroom_peer_up{peer="big-box"}': "1x56 0x10", 'greenroom_peer_up{peer="hosted"}': "1x60"},
        {'greenroom_peer_up{peer="big-box"}': "1x40 0x1 1x10 0x1 1x20", 'greenroom_peer_up{peer="hosted"}': "0x30 _x40"},
    ),
    "GreenroomLedgerDropsEntries": ({"greenroom_ledger_dropped_total": "0x50 3x10"}, {"greenroom_ledger_dropped_total": "3x60"}),
}


def promtool(*arguments: str) -> str:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, object]]:
    return [rule for group in YAML(typ="safe").load(RULES)["groups"] for rule in group["rules"]]


def test_prometheus_takes_the_rules() -> None:
    """Also its own check for duplicates and templates."""
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))


def test_every_panel_asks_what_prometheus_understands(tmp_path: Path) -> None:
    """With what Grafana puts in for its variables."""
    found = [target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel.get("targets", ())]
    assert len(found) > 25
    asked = [expr.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$device", ".*") for expr in found]
    assert not [expr for expr in asked if "$" in expr]
    records = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(asked)]
    path = tmp_path / "panels.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": records}]}))
    promtool("check", "rules", str(path))


@pytest.mark.parametrize("alert", [str(rule["alert"]) for rule in rules()])
def test_an_alert_fires_for_what_it_is_for_and_for_nothing_less(alert: str, tmp_path: Path) -> None:
    """After an hour of such series, as Prometheus evaluates them."""
    rule = next(one for one in rules() if one["alert"] == alert)
    for number, (series, fires) in enumerate(zip(SERIES[alert], (True, False), strict=True)):
        told = [{"series": name, "values": values} for name, values in series.items()]
        probe = {"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)', "eval_time": "60m"}
        wanted = {"exp_samples": [{"labels": "{}", "value": 1 if fires else 0}]}
        case = {"interval": "1m", "input_series": told, "promql_expr_test": [{**probe, **wanted}]}
        path = tmp_path / f"{number}.yml"
        path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
        promtool("test", "rules", str(path))
    assert rule["annotations"]


def test_an_installed_greenroom_has_both_files(tmp_path: Path) -> None:
    """The wheel takes them in under the package, as they are."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        for shipped in (BOARD, RULES):
            assert archive.read(f"greenroom/deploy/monitoring/{shipped.parent.name}/{shipped.name}") == shipped.read_bytes()
