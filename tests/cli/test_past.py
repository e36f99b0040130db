"""`greenroom thrash`, `ttl` and `replay` on a ledger file, written by a play in virtual time; no server runs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.cli.replay import verdict
from greenroom.cli.thrash import story
from greenroom.core.facts import Action, Event
from greenroom.ledger.store import Ledger
from greenroom.planner.replay import Exactly, Scene
from greenroom.planner.virtual import Play
from tests.cli.conftest import run
from tests.planner.test_thrash import AGENT, CODER, SMALL, alternating, rare_turns, scene_with, setup_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def written(path: Path, scene: Scene, *, ago_s: float = 0.0) -> Path:
    """The ledger as a server would have left it, `ago_s` before now."""
    clock, began = Clock(), time.time() - scene.seconds - ago_s
    ledger = Ledger(path, clock=clock, wall=lambda: began + clock.now, gather_s=0.0)

    def hear(event: Event, actions: Sequence[Action]) -> None:
        clock.now = event.at
        ledger.saw(event, actions)
        if len(ledger._queue) > 1000:
            ledger.flush(10.0)

    ledger.boot(scene.setup, "0")
    Play(scene.setup, scene.load, scene.truths, hear=[hear]).run()
    assert ledger.flush(10.0)
    ledger.close()
    return path


@pytest.fixture(scope="module")
def thrashing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thrashing")
    written(folder / "journal.sqlite", scene_with(setup_of(AGENT, CODER, SMALL), alternating(seconds=1800.0), 1800.0))
    return folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    written(folder / "journal.sqlite", rare_turns())
    return folder


CONFIG = """models:
  agent: {cmd: "vllm serve /m/agent --port ${PORT} --gpu-memory-utilization 0.55"}
  coder: {cmd: "llama-server --model /m/c.gguf --port ${PORT} --ctx-size 32768"}
  small: {cmd: "llama-server --model /m/s.gguf --port ${PORT}"}
"""


def test_thrash_names_the_pair_and_the_way_out(thrashing: Path, tmp_path: Path) -> None:
    """Exit code 3; the change is shown as lines of the configuration."""
    path = tmp_path / "greenroom.yaml"
    path.write_text(CONFIG)
    result = run("thrash", "--state-dir", str(thrashing), "-c", str(path))
    assert result.exit_code == 3
    lines = result.output.splitlines()
    assert lines[0].startswith("agent and coder take turns on gpu0: ")
    assert lines[0].endswith("8.0 GiB more would hold both.")
    assert any(line.strip().startswith("*  Lower the memory share of agent from 0.55 to 0.44") for line in lines)
    assert any(line.strip().startswith("+    cmd: vllm serve") and line.endswith("--gpu-memory-utilization 0.44") for line in lines)
    assert any("greenroom replay --set models.agent.memory=" in line for line in lines)


def test_a_command_that_is_told_can_be_pasted_whatever_a_model_is_called() -> None:
    """Quoted for a shell: a name may hold what a shell would run."""
    changes = ["models.a;$(id) 'b.ttl=60"]
    fix = {"text": "x", "swaps": 0, "swaps_h": 0.0, "mean_wait_s": 0.0, "effect": "", "suggested": True, "diff": [], "changes": changes}
    figures = dict.fromkeys(("slow", "slow_total", "waited_requests_h", "waited_s_h", "regret", "swaps"), 0)
    one = {"text": "t", "pair": ["a", "b"], **figures, "fixes": [fix]}
    line = story(one)[-1].strip()
    assert shlex.split(line.removeprefix("try it: ")) == ["greenroom", "replay", "--set", "models.a;$(id) 'b.ttl=60"]


def test_thrash_as_json_is_what_the_page_shows(thrashing: Path) -> None:
    """One object; the exit code stays."""
    result = run("thrash", "--json", "--state-dir", str(thrashing))
    assert result.exit_code == 3
    said = json.loads(result.output)
    assert set(said) == {"seen", "headline", "thrash", "after", "swap_share", "outgrown", "replayed"}
    assert said["thrash"][0]["pair"] == ["agent", "coder"]
    assert said["headline"]["severity"] == "warn"


def test_nobody_thrashes_ends_well(calm: Path) -> None:
    """Exit code 0, and what the swaps took."""
    result = run("thrash", "--since", "2h", "--state-dir", str(calm))
    assert (result.exit_code, result.output.splitlines()[0][:15]) == (0, "Nobody thrashes")


def test_what_happened_long_ago_is_looked_at_when_nothing_did_since(tmp_path: Path) -> None:
    """A server that was stopped yesterday still says why it was slow."""
    scene = scene_with(setup_of(AGENT, CODER), [one for one in alternating(seconds=600.0) if one.model != "small"], 600.0)
    path = written(tmp_path / "old.sqlite", scene, ago_s=90_000.0)
    assert run("thrash", "--ledger", str(path)).exit_code == 3


def test_events_of_the_past_need_no_server(calm: Path) -> None:
    """Oldest first, with the start of the server; the newest where fewer are asked for."""
    lines = run("events", "--since", "7d", "--json", "--state-dir", str(calm)).output.splitlines()
    told = [json.loads(line) for line in lines]
    assert (told[0]["model"], told[0]["text"]) == ("", "greenroom 0 started")
    assert [one["at"] for one in told] == sorted(one["at"] for one in told)
    assert {"starting", "ready", "stopped"} <= {one["kind"] for one in told}
    some = run("events", "--since", "7d", "-n", "2", "--json", "--state-dir", str(calm)).output.splitlines()
    assert some == lines[-2:]
    assert run("events", "--since", "1s", "--state-dir", str(calm)).output == ""


@pytest.mark.parametrize(("args", "says"), [(["--since", "1h", "-f"], "one of them"), (["--ledger", "x"], "--since")])
def test_events_are_asked_of_a_server_or_read_from_a_ledger(args: list[str], says: str) -> None:
    """Not both at once."""
    result = run("events", *args)
    assert (result.exit_code, says in result.stderr) == (2, True)


def test_ttl_shows_gaps_and_choices(calm: Path) -> None:
    """One page a model; the suggested time, the present one, others and auto."""
    result = run("ttl", "agent", "--state-dir", str(calm))
    assert result.exit_code == 0
    assert result.output.startswith("agent: ttl ")
    assert "(now: never stops)" in result.output
    assert "COLD STARTS" in result.output
    said = json.loads(run("ttl", "--json", "--state-dir", str(calm)).output)
    assert [one["model"] for one in said["ttl"]] == ["agent", "coder"]
    gone = run("ttl", "nobody", "--state-dir", str(calm))
    assert (gone.exit_code, "known are agent, coder" in gone.output) == (1, True)


def test_ttl_knows_a_model_by_its_other_names(tmp_path: Path) -> None:
    """As `load` and `why` do; one that is named twice is shown once."""
    scene = rare_turns()
    models = tuple(replace(model, aliases=("gpt-4o",)) if model.id == "agent" else model for model in scene.setup.models)
    path = written(tmp_path / "journal.sqlite", replace(scene, setup=replace(scene.setup, models=models)))
    alone = run("ttl", "agent", "--ledger", str(path))
    assert (alone.exit_code, alone.output[:6]) == (0, "agent:")
    for names in (["gpt-4o"], ["gpt-4o", "agent"]):
        assert run("ttl", *names, "--ledger", str(path)).output.splitlines()[:-1] == alone.output.splitlines()[:-1]
    assert "gpt-5 was not asked for" in run("ttl", "gpt-5", "--ledger", str(path)).stderr


def test_replay_is_the_same_to_the_last_action(thrashing: Path) -> None:
    """Exactly, from the file."""
    result = run("replay", "--state-dir", str(thrashing))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("The same to the last action: ")
    said = json.loads(run("replay", "--exact", "--json", "--state-dir", str(thrashing)).output)
    assert (said["difference"], said["runs"], said["skipped"]) == (None, 1, {})
    assert said["swaps"] > 100


def test_replay_says_what_it_left_out() -> None:
    """A run whose beginning was deleted."""
    assert "1 run is not kept from the beginning" in "\n".join(verdict(Exactly(10, 1, 1, 1, cut=1)))
    assert "2 runs are not kept" in "\n".join(verdict(Exactly(10, 1, 1, 1, cut=2)))
    assert not any("not kept" in line for line in verdict(Exactly(10, 1, 1, 1)))


def test_replay_says_up_to_when_it_has_read(tmp_path: Path) -> None:
    """A server that runs has more to write: the last event and the last request that are in the file are named."""
    scene = scene_with(setup_of(AGENT, CODER), [one for one in alternating(seconds=300.0) if one.model != "small"], 300.0)
    path = written(tmp_path / "journal.sqlite", scene, ago_s=200_000.0)
    said = json.loads(run("replay", "--json", "--ledger", str(path)).output)
    assert time.time() - 200_310 < said["until"] < time.time() - 199_900
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said["until"]))
    assert run("replay", "--ledger", str(path)).output.splitlines()[-1].startswith(f"Read up to {day}: ")
    other = run("replay", "--policy", "fifo", "--ledger", str(path)).output.splitlines()[-1]
    assert other.startswith("Looked at ")
    assert f", until {day[:10]} " in other


def test_a_short_time_is_told_in_counts_not_per_hour(tmp_path: Path) -> None:
    """Some minutes of traffic say nothing of an hour."""
    scene = scene_with(setup_of(AGENT, CODER), [one for one in alternating(seconds=200.0) if one.model != "small"], 200.0)
    path = written(tmp_path / "journal.sqlite", scene)
    result = run("thrash", "--ledger", str(path))
    assert result.exit_code == 3
    assert "an hour" not in result.output
    assert "SWAPS/H" not in result.output
    (one,) = json.loads(run("thrash", "--json", "--ledger", str(path)).output)["thrash"]
    assert f"{one['swaps']} swaps in {one['seconds'] / 60:.0f} min cost" in result.output.splitlines()[0]
    assert f"{one['waited_requests']} requests waited " in result.output
    assert [one[name] for name in one if name.endswith("_h")] == [None] * 5
    assert {fix["swaps_h"] for fix in one["fixes"]} == {None}
    assert all(fix["swaps"] >= 0 for fix in one["fixes"])


def test_replay_under_other_settings_is_compared(thrashing: Path) -> None:
    """What was recorded, the same settings again, and with room for both."""
    result = run("replay", "--set", "device.gpu0.memory=96GiB", "--json", "--state-dir", str(thrashing))
    recorded, again, roomy = json.loads(result.output)
    assert recorded["switches"] == pytest.approx(again["switches"], abs=2)
    assert recorded["mean_s"] == pytest.approx(again["mean_s"], rel=0.02)
    assert roomy["switches"] == 3
    fifo = run("replay", "--policy", "fifo", "--state-dir", str(thrashing))
    shown = [line.split()[0] for line in fifo.output.splitlines() if line]
    assert shown == ["REQUESTS", "recorded", "same", "fifo", "Looked"]


def test_replay_takes_a_trace(tmp_path: Path) -> None:
    """Without a ledger every model takes the device for itself."""
    trace = tmp_path / "trace.csv"
    trace.write_text("time,model,service_s\n" + "".join(f"{n},{'ab'[n % 2]},0.1\n" for n in range(10)))
    result = run("replay", "--trace", str(trace), "--policy", "fifo", "--json", XDG_STATE_HOME=str(tmp_path))
    ours, fifo = json.loads(result.output)
    assert fifo["switches"] == 10 > ours["switches"]
    (alone,) = json.loads(run("replay", "--trace", str(trace), "--json", XDG_STATE_HOME=str(tmp_path)).output)
    assert alone == {**ours, "name": "trace"} == ours


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["replay", "--exact", "--policy", "fifo"], 2, "leave out"),
        (["replay", "--set", "models.agent.tll=1"], 2, "Did you mean 'ttl'?"),
        (["thrash", "--since", "soon"], 2, "is not a duration"),
        (["thrash", "--since", "0"], 2, "no time at all"),
        (["replay", "--trace", "/nowhere.csv"], 1, "cannot be read"),
    ],
)
def test_wrong_usage_is_told(thrashing: Path, args: list[str], code: int, says: str) -> None:
    """In one sentence, without a traceback."""
    result = run(*args, "--state-dir", str(thrashing))
    assert (result.exit_code, says in result.output) == (code, True), result.output


@pytest.mark.parametrize("command", ["thrash", "ttl", "replay", "events --since 1h"])
def test_without_a_ledger_it_says_so(tmp_path: Path, command: str) -> None:
    """And makes none."""
    result = run(*command.split(), "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "there is no ledger" in result.output
    assert not list(tmp_path.iterdir())
