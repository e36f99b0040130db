"""`greenroom check`, `config convert` and `serve`: what they say of a configuration."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from greenroom.cli import text
from greenroom.cli.check import ModelNeed, candidates_of, named, never_fits, page, place, problems_of, together
from greenroom.cli.check_sleep import Naps, crowding, lines, of_many
from greenroom.config.load import load_config, load_config_text
from greenroom.config.model import Config, DeviceConfig, ModelConfig, SizeSpec
from greenroom.core.facts import SleepTier
from greenroom.engines.base import Costs, Estimate
from greenroom.host.gpus import GpuInfo
from tests.cli.conftest import run

ROOMS = {"gpu0": 78 * 1024, "gpu1": 20 * 1024, "ram": 48 * 1024}


def a_need(id: str, mib: int | None, *candidates: str, count: int = 1, host_mib: int = 0, problem: str = "", detail: str = "") -> ModelNeed:
    where = candidates or ("gpu0", "gpu1")
    return ModelNeed(id, "llama_server", where, count, mib, host_mib, "unknown" if mib is None else "estimated", detail, problem)


def a_device(id: str, gib: int | None, *, headroom_mib: int | None = None, probe: str = "auto") -> DeviceConfig:
    return DeviceConfig(id, SizeSpec(None if gib is None else gib * 1024, headroom_mib, probe))


LEVEL_1, LEVEL_2 = SleepTier(1, 1536, 18_432, 4.0, 1.0), SleepTier(2, 1536, 3072, 0.2, 15.0)


class FakeEngine:
    """Needs 3 GiB; cannot start when its command says so."""

    kind = "llama_server"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def estimate(self, devices: object) -> Estimate:
        return Estimate(3072, 200, "estimated", "weights 2,048 + KV 900 + overhead 124 MiB")

    def costs(self, estimate: Estimate) -> Costs:
        return Costs(2.0, 0.2, (LEVEL_1, LEVEL_2) if "--can-sleep" in self.config.argv else ())

    def no_sleep(self) -> str:
        return "" if self.config.sleep == "off" else "--can-sleep is not given"

    def sleep_notes(self) -> tuple[str, ...]:
        return ("--can-sleep is young.",) if "--can-sleep" in self.config.argv else ()

    def missing(self) -> str:
        return "there is no file /models/gone.gguf" if "/models/gone.gguf" in self.config.argv else ""


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.engines.detect.describe", FakeEngine)


@pytest.fixture
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A server that reads its configuration, remembers how it was called, and ends with 3."""
    calls: list[tuple[object, ...]] = []

    def fake_run(config_path: str, listen: str | None, state_dir: str | None, no_auth: bool, strict: bool) -> int:
        calls.append((config_path, listen, state_dir, no_auth, strict))
        load_config(config_path, strict=strict)
        return 3

    serve = ModuleType("greenroom.serve")
    serve.run = fake_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "greenroom.serve", serve)
    return calls


def written(folder: Path, content: str) -> str:
    path = folder / "greenroom.yaml"
    path.write_text(content)
    return str(path)


TWO = """
devices:
  ram: {memory: 5GiB}
models:
  chat: {cmd: "llama-server --model /models/chat.gguf --port ${PORT}"}
  embed: {cmd: "llama-server --model /models/embed.gguf --port ${PORT}", memory: 1GiB}
"""


# ------------------------------------------------------------------------------------------------------------ it all fits


def test_everything_finds_a_place() -> None:
    """The largest goes first, to the emptiest device; host RAM is counted beside."""
    needs = [a_need("small", 10_000), a_need("big", 60_000, host_mib=1000), a_need("cpu", 4000, "ram")]
    placed = place(needs, ROOMS)
    assert placed.homes == {"big": ("gpu0",), "small": ("gpu1",), "cpu": ("ram",)}
    assert placed.used_mib == {"gpu0": 60_000, "gpu1": 10_000, "ram": 5000}
    assert together(needs, placed) is True


def test_what_does_not_fit_beside_the_others_takes_turns() -> None:
    """It is named with what it lacks, and is no error."""
    needs = [a_need("a", 60_000), a_need("b", 50_000, "gpu0")]
    placed = place(needs, ROOMS)
    assert placed.homeless == {"b": 60_000 + 50_000 - 78 * 1024}
    assert together(needs, placed) is False
    assert problems_of(needs, ROOMS) == {}
    assert page(Config("g.yaml", ()), needs, ROOMS, placed, {})[-1] == (
        "Not all fit together (b lacks 29.4 GiB): they take turns as requests arrive."
    )


def test_an_unknown_need_leaves_the_question_open() -> None:
    """Neither yes nor no is made up."""
    needs = [a_need("a", 1000), a_need("b", None)]
    placed = place(needs, ROOMS)
    assert together(needs, placed) is None
    assert page(Config("g.yaml", ()), needs, ROOMS, placed, {})[-1].endswith("nothing is known yet of b.")


def test_of_many_names_a_few_are_shown() -> None:
    """300 models do not make one enormous line."""
    needs = [a_need(f"m{n}", None) for n in range(300)]
    said = page(Config("g.yaml", ()), needs, ROOMS, place(needs, ROOMS), {})[-1]
    assert said.endswith("nothing is known yet of m0, m1, m2, m3, m4 and 295 more.")
    assert text.shortened(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d, e, f"


@pytest.mark.parametrize("why", ["chat: the file is gone", "chat has no command", "models.chat.ttl: is not a duration", "the file is gone"])
def test_a_sentence_names_its_model_once(why: str) -> None:
    """Whether or not it began with the name."""
    assert named("chat", why).count("chat") == 1


def test_a_model_on_several_devices_takes_its_share_of_each() -> None:
    """Tensor parallel: each of two devices carries it, and both must be able to."""
    need = a_need("tp", 15_000, count=2)
    assert place([need], ROOMS).used_mib == {"gpu0": 15_000, "gpu1": 15_000, "ram": 0}
    assert never_fits(a_need("tp", 30_000, count=2), ROOMS) == "it needs 2 devices with 29.3 GiB each and 1 can give that"


def test_what_can_never_fit_is_a_problem() -> None:
    """How much it needs, how much there is at most, and where."""
    assert never_fits(a_need("huge", 90_000), ROOMS) == "it needs 87.9 GiB and at most 78.0 GiB can ever be free on gpu0, gpu1"
    assert never_fits(a_need("fine", 60_000), ROOMS) == ""
    assert never_fits(a_need("measured elsewhere", 90_000, "gpu0", "gpu7"), ROOMS) == ""


@pytest.mark.parametrize(
    ("own", "devices", "wanted"),
    [
        ((), ["gpu0", "gpu1", "ram"], ("gpu0", "gpu1")),
        ((), ["ram"], ("ram",)),
        (("any",), ["gpu0", "ram"], ("gpu0",)),
        (("ram",), ["gpu0", "ram"], ("ram",)),
        ((), [], ()),
    ],
)
def test_candidates(own: tuple[str, ...], devices: list[str], wanted: tuple[str, ...]) -> None:
    """`any` is every GPU, or ram when there is nothing else."""
    assert candidates_of(ModelConfig("m", (), devices=own), [a_device(id, 8) for id in devices]) == wanted


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("why", "many"),
    [
        ("it has no sleep routes", "they have no sleep routes"),
        ("it falls asleep by itself only, 5 s after its last request", "they fall asleep by themselves only, 5 s after their last request"),
        ("greenroom knows no sleep routes of this engine; declare its `sleep` and `wake` calls",
         "greenroom knows no sleep routes of their engines; declare their `sleep` and `wake` calls"),
        ("--can-sleep is not given", "--can-sleep is not given"),
    ],
)  # fmt: skip
def test_what_an_engine_says_of_itself_is_said_well_of_several(why: str, many: str) -> None:
    """`chat, embed do not sleep: they have no sleep routes`."""
    assert of_many(why) == many


@pytest.mark.usefixtures("fake_engines")
def test_check_tells_what_each_model_needs_and_whether_all_fit(tmp_path: Path) -> None:
    """The page for two models that fit."""
    path = written(tmp_path, TWO)
    result = run("check", path)
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if not line.startswith("warning")] == [
        f"{path}: 2 models, no errors",
        "",
        "MODEL  ENGINE        DEVICE   MEMORY  SLEEP  HOW WE KNOW",
        "chat   llama_server  ram     3.0 GiB  no     estimated: weights 2,048 + KV 900 + overhead 124 MiB",
        "embed  llama_server  ram     1.0 GiB  no     declared",
        "",
        "chat, embed do not sleep: --can-sleep is not given",
        "",
        "ram  [███████████████████░░░░░] 4.0 GiB of 5.0 GiB",
        "All fit together.",
    ]


@pytest.mark.usefixtures("fake_engines")
def test_check_json(tmp_path: Path) -> None:
    """The same for scripts."""
    body = json.loads(run("check", written(tmp_path, TWO), "--json").output)
    assert (body["fits_together"], body["problems"]) == (True, [])
    assert body["devices"] == [{"id": "ram", "room_mib": 5120, "used_mib": 4096}]
    assert [(one["id"], one["memory_mib"], one["source"], one["placed_on"]) for one in body["models"]] == [
        ("chat", 3072, "estimated", ["ram"]),
        ("embed", 1024, "declared", ["ram"]),
    ]


SLEEPERS = """
devices:
  gpu0: {memory: 80GiB, probe: none}
  ram: {memory: 30GiB}
models:
  agent: {cmd: "engine --can-sleep --port ${PORT}"}
  coder: {cmd: "engine --can-sleep --port ${PORT}"}
  plain: {cmd: "engine --port ${PORT}"}
  fixed: {cmd: "engine --can-sleep --port ${PORT}", pin: true}
  whole: {cmd: "engine --port ${PORT}", sleep: off}
"""


@pytest.mark.usefixtures("fake_engines")
def test_check_tells_how_each_model_sleeps_and_whether_ram_holds_them_all(tmp_path: Path) -> None:
    """Levels and what they hold, who cannot and why, and a warning when all copies at level 1 together are too large."""
    path = written(tmp_path, SLEEPERS)
    result = run("check", path)
    warning = "agent, coder asleep at level 1 take 36.0 GiB of host RAM, which has 29.4 GiB for that: the rest sleeps at level 2 or stops"
    held = "asleep: 1.5 GiB on its device and 18.0 GiB in host RAM at level 1, 1.5 GiB on its device and 3.0 GiB in host RAM at level 2"
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == f"warning: {warning}"
    table, told = result.output.split("\n\n")[1:3]
    assert [line.split()[5] for line in table.splitlines()[1:]] == ["1,", "1,", "no", "pinned", "off"]
    assert told.splitlines() == [
        f"agent {held}",
        "agent: --can-sleep is young.",
        f"coder {held}",
        "coder: --can-sleep is young.",
        "plain does not sleep: --can-sleep is not given",
    ]
    body = json.loads(run("check", path, "--json").output)
    naps = {one["id"]: one["sleep"] for one in body["models"]}
    assert body["warnings"] == [warning]
    assert [tier["host_mib"] for tier in naps["agent"]["levels"]] == [18_432, 3072]
    assert (naps["plain"]["levels"], naps["plain"]["why_not"], naps["fixed"]["why_not"]) == ([], "--can-sleep is not given", "it is pinned")


def test_ram_is_large_enough_or_is_not() -> None:
    """Models that live in RAM leave less for sleepers; level 2 is named only where somebody has it."""
    one, other = (replace(a_need(name, 20_000), sleep=Naps((LEVEL_1,))) for name in ("a", "b"))
    cpu = a_need("cpu", 20_480, "ram")
    needs, ram = [one, other, cpu], [a_device("ram", 64)]
    assert crowding(needs[:2], ram, place(needs[:2], ROOMS)) == ""
    assert crowding(needs, ram, place(needs, {"gpu0": 78 * 1024, "ram": 64 * 1024})) == ""
    small = [a_device("ram", 50)]
    said = crowding(needs, small, place(needs, {"gpu0": 78 * 1024, "ram": 50 * 1024}))
    assert said == "a, b asleep at level 1 take 36.0 GiB of host RAM, which has 30.0 GiB for that: the rest stops"
    assert crowding([cpu], small, place([cpu], ROOMS)) == ""
    assert "which has" in crowding([replace(one, sleep=Naps((SleepTier(1, 1, 1 << 40, 1.0, 1.0),)))], [], place([one], ROOMS))


def test_what_sleepers_hold_is_said_as_it_is_known() -> None:
    """In RAM it is one figure; of several devices it is said for each; by itself is said; an unknown need is a lower bound."""
    held = SleepTier(1, 38, 0, 0.1, 0.2)
    in_ram = replace(a_need("r", 200, "ram"), sleep=Naps((), held))
    wide = replace(a_need("w", 20_000, count=2), sleep=Naps((LEVEL_2,)))
    unknown = replace(a_need("u", None), sleep=Naps((LEVEL_2,)))
    assert list(lines([in_ram, wide, unknown])) == [
        "r falls asleep by itself: 38 MiB in host RAM",
        "w asleep: 1.5 GiB on each of its devices and 3.0 GiB in host RAM at level 2",
        "u asleep: 1.5 GiB on its device and at least 3.0 GiB in host RAM at level 2",
    ]


@pytest.mark.usefixtures("fake_engines")
def test_what_can_never_start_is_exit_1(tmp_path: Path) -> None:
    """A missing file and a model larger than its device: one page that does not contradict itself."""
    content = TWO.replace("chat.gguf", "gone.gguf").replace("memory: 1GiB", "memory: 9GiB")
    path = written(tmp_path, content + '  small: {cmd: "llama-server --model /models/s.gguf --port ${PORT}", memory: 1GiB}\n')
    result = run("check", path)
    assert (result.exit_code, result.stderr) == (1, "")
    assert [line for line in result.stdout.splitlines() if not line.startswith("warning")] == [
        f"{path}: 3 models, 2 of them cannot start",
        "",
        "MODEL  ENGINE        DEVICE   MEMORY  SLEEP  HOW WE KNOW",
        "chat   llama_server  ram     3.0 GiB  -      cannot start, see below",
        "embed  llama_server  ram     9.0 GiB  -      cannot start, see below",
        "small  llama_server  ram     1.0 GiB  no     declared",
        "",
        "small does not sleep: --can-sleep is not given",
        "",
        "ram  [█████░░░░░░░░░░░░░░░░░░░] 1.0 GiB of 5.0 GiB",
        "Of the others: All fit together.",
        "",
        f"{path}:5: chat: there is no file /models/gone.gguf",
        f"{path}:6: embed: it needs 9.0 GiB and at most 5.0 GiB can ever be free on ram",
    ]
    problems = json.loads(run("check", path, "--json").stdout)["problems"]
    assert problems[0] == {
        "file": path,
        "line": 5,
        "column": 0,
        "where": "models.chat",
        "message": "chat: there is no file /models/gone.gguf",
    }


@pytest.mark.usefixtures("fake_engines")
def test_a_misconfigured_model_is_told_once(tmp_path: Path) -> None:
    """With --lenient: not as a warning and as a problem, and with the line of the mistake."""
    path = written(tmp_path, TWO + '  bad:\n    cmd: "llama-server --model /m.gguf --port ${PORT}"\n    ttl: 5mins\n')
    result = run("check", path, "--lenient")
    assert (result.exit_code, result.output.count("5mins")) == (1, 1)
    assert result.stdout.splitlines()[-1].startswith(f"{path}:9: models.bad.ttl: ")


@pytest.mark.usefixtures("fake_engines")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_token_in_a_reference_is_masked(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address itself is told."""
    monkeypatch.setenv("GREENROOM_STORE", str(tmp_path / "store"))
    entry = 'model: "https://h/x.gguf?token=PLAINPW&a=1", cmd: "llama-server --model ${MODEL_PATH} --port ${PORT}"'
    result = run("check", written(tmp_path, f"models:\n  m: {{{entry}}}\n"), *options)
    assert "PLAINPW" not in result.output
    assert "https://h/x.gguf?token=***&a=1 is not here yet" in result.output


CARDS = """models:
  chat: {cmd: "llama-server --model /models/chat.gguf --port ${PORT}"}
  gpu: {cmd: "llama-server --model /models/chat.gguf --port ${PORT}", device: gpu0}
"""


@pytest.fixture
def found_gpus(monkeypatch: pytest.MonkeyPatch) -> list[GpuInfo]:
    """The cards of this machine, as many as the test says."""
    found: list[GpuInfo] = []
    monkeypatch.setattr("greenroom.host.gpus.Gpus.discover", lambda self: tuple(found))
    return found


@pytest.mark.usefixtures("fake_engines")
@pytest.mark.parametrize("devices", ["", "devices: {ram: {memory: 5GiB}}\n"])
def test_a_device_that_is_not_here_is_a_mistake_as_it_is_for_serve(devices: str, tmp_path: Path, found_gpus: list[GpuInfo]) -> None:
    """Exit 2 with the line of the model, also as JSON; where the card is, nothing is wrong."""
    path = written(tmp_path, devices + CARDS)
    result, as_json = run("check", path), run("check", path, "--json")
    line = devices.count("\n") + 3
    why = "there is no device 'gpu0' here; known: ram."
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{path}:{line}: models.gpu.device: {why}\n")
    (problem,) = json.loads(as_json.stdout)["problems"]
    assert (as_json.exit_code, problem["line"], problem["where"], problem["message"]) == (2, line, "models.gpu.device", why)

    found_gpus.append(GpuInfo(0, "GPU-a", "L4", 24_000))
    if not devices:  # what is declared beside ram is all that is used; that is nothing here
        assert run("check", path).exit_code == 0


@pytest.mark.usefixtures("fake_engines", "found_gpus")
def test_with_lenient_a_device_that_is_not_here_marks_its_model(tmp_path: Path) -> None:
    """Exit 1, and the others are checked."""
    path = written(tmp_path, "devices: {gpu0: {headroom: 1GiB}, ram: {memory: 5GiB}}\n" + CARDS.replace("--port", "--port", 1))
    result, as_json = run("check", path, "--lenient"), run("check", path, "--lenient", "--json")
    assert (result.exit_code, as_json.exit_code) == (1, 1)
    assert f"{path}: 2 models, 2 of them cannot start" in result.stdout
    assert "devices.gpu0: is not on this machine" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[-1] == f"{path}:4: models.gpu.device: there is no device 'gpu0' here; known: ram."
    assert [one["where"] for one in json.loads(as_json.stdout)["problems"]] == ["models.chat", "models.gpu"]


@pytest.mark.usefixtures("fake_serve")
def test_a_broken_configuration_is_lines_with_places_and_exit_2(tmp_path: Path) -> None:
    """For check, convert and serve alike; never a traceback."""
    path = written(tmp_path, "models:\n  chat:\n    cmdd: x\n")
    for args in (["check", path], ["serve", "-c", path]):
        result = run(*args)
        assert result.exit_code == 2, args
        assert all(line.startswith(f"{path}:") for line in result.stderr.splitlines()), args
        assert "cmdd" in result.stderr


def test_a_broken_configuration_as_json(tmp_path: Path) -> None:
    """--json prints the same object for a file that cannot be used: where and what, exit 2."""
    path = written(tmp_path, "models:\n  chat:\n    cmd: llama-server --port ${PORT}\n    ttl: 5mins\n")
    result = run("check", path, "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, body["models"]) == (2, "", [])
    (problem,) = body["problems"]
    assert (problem["file"], problem["line"], problem["column"] > 0, problem["where"]) == (path, 4, True, "models.chat.ttl")
    assert "is not a duration" in problem["message"]
    missing = json.loads(run("check", str(tmp_path / "nothing.yaml"), "--json").stdout)["problems"]
    assert [one["message"][:14] for one in missing] == ["does not exist"]


@pytest.mark.usefixtures("fake_serve")
@pytest.mark.parametrize("command", [["check"], ["serve", "-c"], ["config", "convert"]])
@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "not yaml"])
def test_an_unreadable_file_is_exit_2(command: list[str], kind: str, tmp_path: Path) -> None:
    """One line that names the file."""
    path = tmp_path / "greenroom.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(bytes(range(256)))
    elif kind == "not yaml":
        path.write_text("models: [unclosed\n")
    result = run(*command, str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert str(path) in result.stderr


def test_the_schema_is_printed_without_a_file() -> None:
    """For editors; a JSON schema document."""
    body = json.loads(run("check", "--schema").output)
    assert body["$schema"].startswith("https://json-schema.org/")
    assert "models" in body["properties"]


def test_convert_prints_a_configuration_that_loads(tmp_path: Path) -> None:
    """A llama-swap file comes out as a greenroom one."""
    source = written(tmp_path, 'models:\n  chat:\n    cmd: "llama-server --model /m/chat.gguf --port ${PORT}"\n    ttl: 300\n')
    result = run("config", "convert", source)
    assert result.exit_code == 0
    assert [(one.id, one.ttl_s) for one in load_config_text(result.stdout).models] == [("chat", 300.0)]


def test_serve_passes_its_options_on(fake_serve: list[tuple[object, ...]], tmp_path: Path) -> None:
    """And its exit code back."""
    path = written(tmp_path, TWO)
    result = run("serve", "-c", path, "--listen", "0.0.0.0:80", "--state-dir", "/s", "--no-auth", "--lenient")
    assert (result.exit_code, fake_serve) == (3, [(path, "0.0.0.0:80", "/s", True, False)])
    run("serve", "-c", path)
    assert fake_serve[1] == (path, None, None, False, True)
