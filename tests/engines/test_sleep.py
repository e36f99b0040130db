"""How engines sleep: which levels they have as configured, the calls, the priors, the questions asked after a wake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.model import AsleepConfig, CallConfig, ContainerConfig, SleepConfig
from greenroom.core.facts import SleepTier
from greenroom.engines.base import AsleepCheck, Call, Canary, Engine, SleepRecipe
from greenroom.engines.detect import describe
from tests.engines.builders import BENCH0, GPU0, RAM, a_model

VLLM = "vllm serve o/m --enable-sleep-mode"
SGLANG = "python -m sglang.launch_server --model-path o/m"
LATEST = (0, 32, 0)
DEV_MODE = "VLLM_SERVER_DEV_MODE"


@pytest.fixture(autouse=True)
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No model of this machine's own hub cache is seen."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def an_engine(command: str | list[str], **settings: Any) -> Engine:
    return describe(a_model(command, **settings))


def levels(engine: Engine) -> list[int]:
    return [tier.level for tier in engine.costs(engine.estimate([GPU0])).tiers]


def dev_mode(engine: Engine) -> str | None:
    return engine.launch(1, [GPU0]).env.get(DEV_MODE)


def weights(folder: Path, mib: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(mib << 20)
    return folder


def in_hub(hub: Path, name: str, mib: int, revision: str = "main") -> None:
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / revision).write_text(f"commit-of-{revision}")
    weights(model / "snapshots" / f"commit-of-{revision}", mib)


# ---------------------------------------------------------------------------------------------- declared by the operator

DECLARED = SleepConfig(
    sleep=(CallConfig("/doze", body={"deep": True}),),
    wake=(CallConfig("/rise", "GET"), CallConfig("/warm")),
    asleep=AsleepConfig("/state", "engine.state", "asleep"),
    residue_mib=700,
    sleep_s=3.0,
    wake_s=4.0,
)


def test_an_unknown_engine_sleeps_by_the_operators_calls() -> None:
    """In order, JSON bodies, bare paths whatever the proxy's prefix is."""
    engine = an_engine("engine", sleep_calls=DECLARED, proxy="http://127.0.0.1:${PORT}/base", memory_mib=9_000)

    assert engine.sleep_recipe(1, ()) == SleepRecipe(
        1,
        (Call("/doze", "POST", b'{"deep":true}'),),
        (Call("/rise", "GET"), Call("/warm")),
        AsleepCheck("/state", "engine.state", "asleep"),
    )
    assert engine.costs(engine.estimate([GPU0])).tiers == (SleepTier(1, 700, 9_000, 3.0, 4.0),)
    assert (engine.no_sleep(), engine.version_call(), engine.dozes()) == ("", None, None)


@pytest.mark.parametrize(
    ("settings", "devices", "host_mib"),
    [
        ({"memory_mib": 9_000}, [GPU0], 9_000),
        ({}, [GPU0], 0),
        ({"memory_mib": 9_000}, [RAM], 0),
        ({"memory_mib": 9_000, "declared_host_mib": 12}, [RAM], 12),
        ({"memory_mib": 9_000, "declared_host_mib": 0}, [GPU0], 0),
    ],
)
def test_a_declared_sleeper_copies_what_it_books_unless_told(settings: dict[str, Any], devices: list[Any], host_mib: int) -> None:
    """On host RAM the residue says it all."""
    declared = SleepConfig((), (), host_mib=settings.pop("declared_host_mib", None))
    engine = an_engine("engine", sleep_calls=declared, **settings)

    assert engine.costs(engine.estimate(devices)).tiers[0].host_mib == host_mib


def test_declared_calls_go_before_what_greenroom_knows() -> None:
    """Also for a vLLM; then its switches are the operator's."""
    engine = an_engine("vllm serve o/m", sleep_calls=DECLARED)

    assert engine.sleep_recipe(1, LATEST).sleep[0].path == "/doze"
    assert (dev_mode(engine), "--enable-sleep-mode" in engine.launch(1, [GPU0]).argv) == (None, False)


@pytest.mark.parametrize("command", ["engine", VLLM, f"{SGLANG} --enable-memory-saver", "llama-server -m x", "text-embeddings-router"])
def test_sleep_off_means_none_and_nothing_to_explain(command: str) -> None:
    """And no control routes are opened for it."""
    engine = an_engine(command, sleep="off")

    assert (levels(engine), engine.no_sleep(), engine.version_call(), dev_mode(engine)) == ([], "", None, None)
    assert an_engine(command, sleep="off", sleep_calls=DECLARED).costs(engine.estimate([])).tiers == ()


@pytest.mark.parametrize("command", ["engine", "text-embeddings-router --model-id m"])
def test_an_engine_without_known_routes_says_so(command: str) -> None:
    """With what would help."""
    engine = an_engine(command)

    assert (levels(engine), engine.no_sleep()) == (
        [],
        "greenroom knows no sleep routes of this engine; declare its `sleep` and `wake` calls",
    )
    assert engine.sleep_recipe(1, ()).unfit


# -------------------------------------------------------------------------------------------------------------- vLLM


def test_a_vllm_sleeps_at_level_1_and_wakes_with_its_copy() -> None:
    """In sleep mode; the routes only exist in its development mode."""
    engine = an_engine(VLLM)

    assert (levels(engine), engine.no_sleep(), dev_mode(engine)) == ([1, 2], "", "1")
    assert engine.version_call() == Call("/version", "GET")
    assert engine.sleep_recipe(1, LATEST) == SleepRecipe(
        1,
        (Call("/sleep?level=1&mode=wait"),),
        (Call("/wake_up"), Call("/reset_prefix_cache", optional=True)),
        AsleepCheck("/is_sleeping", "is_sleeping", True),
    )


def test_a_vllm_at_level_2_gets_its_weights_back_before_its_cache() -> None:
    """A plain wake would answer nonsense: the weights are read again, and the answer is compared."""
    recipe = an_engine(VLLM).sleep_recipe(2, LATEST)

    assert recipe == SleepRecipe(
        2,
        (Call("/sleep?level=2&mode=wait"),),
        (
            Call("/wake_up?tags=weights"),
            Call("/collective_rpc", body=b'{"method":"reload_weights"}'),
            Call("/wake_up?tags=kv_cache"),
            Call("/reset_prefix_cache", optional=True),
        ),
        AsleepCheck("/is_sleeping", "is_sleeping", True),
        verify=True,
    )


@pytest.mark.parametrize(
    ("version", "sleep", "unfit"),
    [
        ((), "/sleep?level=2", ""),
        ((0, 1), "/sleep?level=2", ""),
        ((0, 10, 2), None, "vLLM 0.10.2 has no route that reloads its weights"),
        ((0, 11), "/sleep?level=2", ""),
        ((0, 16, 9), "/sleep?level=2", ""),
        ((0, 17), "/sleep?level=2&mode=wait", ""),
        ((1, 0), "/sleep?level=2&mode=wait", ""),
    ],
)
def test_the_calls_follow_the_version(version: tuple[int, ...], sleep: str | None, unfit: str) -> None:
    """An unknown one gets what all understand; a build that calls itself 0.1 does not know its own."""
    recipe = an_engine(VLLM).sleep_recipe(2, version)

    assert (recipe.sleep, recipe.unfit) == ((Call(sleep),) if sleep else (), unfit)
    assert an_engine(VLLM).sleep_recipe(1, version).unfit == ""


@pytest.mark.parametrize(
    ("command", "settings", "level"),
    [("vllm serve o/m", {}, 1), (VLLM, {"sleep": "off"}, 1), (VLLM, {"sleep": "1"}, 2), (f"{VLLM} --enable-lora", {}, 2)],
)
def test_a_level_it_does_not_have_has_no_calls(command: str, settings: dict[str, Any], level: int) -> None:
    """Whoever asks for it is told that there is none."""
    recipe = an_engine(command, **settings).sleep_recipe(level, LATEST)

    assert (recipe.sleep, recipe.wake, recipe.unfit == "") == ((), (), False)


def test_a_vllm_is_never_resumed_and_never_put_deeper() -> None:
    """Resuming runs on memory that is not there; a second sleep is ignored by it."""
    for level in (1, 2):
        recipe = an_engine(VLLM).sleep_recipe(level, LATEST)

        assert len(recipe.sleep) == 1
        assert not any("resume" in call.path for call in (*recipe.sleep, *recipe.wake))


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        ("vllm serve o/m", {"sleep": "1"}, [1]),
        ("vllm serve o/m", {"sleep": "2"}, [2]),
        (VLLM, {"sleep": "1"}, [1]),
        (VLLM.replace("-mode", "_mode"), {}, [1, 2]),
        (f"{VLLM} -tp 2", {}, [1, 2]),
        (f"{VLLM} --load-format runai_streamer", {}, [1, 2]),
        (f"{VLLM} --load-format tensorizer", {}, [1]),
        (f"{VLLM} --load-format dummy", {}, [1]),
        (f"{VLLM} --quantization bitsandbytes", {}, [1]),
        (f"{VLLM} --quantization fp8", {}, [1, 2]),
        (f"{VLLM} --enable-lora", {}, [1]),
        (f"{VLLM} --enable-expert-parallel", {}, [1]),
        (f"{VLLM} --speculative-config.model o/d --speculative-config.num_speculative_tokens 2", {}, [1]),
        ([*VLLM.split(), "--speculative-config", '{"method": "eagle3", "model": "o/d"}'], {}, [1]),
        ([*VLLM.split(), "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], {}, [1, 2]),
        ("vllm serve o/m-GGUF:Q4_K_M --enable-sleep-mode", {}, [1]),
    ],
)
def test_a_vllm_has_the_levels_that_are_right_for_it(command: str | list[str], settings: dict[str, Any], expected: list[int]) -> None:
    """Level 2 only where everything that is lost comes back."""
    engine = an_engine(command, **settings)

    assert (levels(engine), engine.no_sleep(), dev_mode(engine)) == (expected, "", "1")
    assert [item for item in engine.launch(1, [GPU0]).argv if item.replace("_", "-") == "--enable-sleep-mode"] != []
    assert any("level 1 only" in note for note in engine.sleep_notes()) is (expected == [1] and "sleep" not in settings)


@pytest.mark.parametrize(
    ("command", "settings", "why"),
    [
        ("vllm serve o/m", {}, "--enable-sleep-mode is not given (write it, or `sleep: 1`)"),
        ("vllm serve o/m --no-enable-sleep-mode", {"sleep": "1"}, "--no-enable-sleep-mode is given"),
        (f"{VLLM} --no-enable-sleep-mode", {}, "--no-enable-sleep-mode is given"),
        (["sh", "-c", "vllm serve o/m --host 127.0.0.1"], {"sleep": "1"}, "greenroom adds nothing inside a script"),
        (["sh", "-c", VLLM], {}, "open to the network (no --host in its script)"),
        (VLLM, {"env": ((DEV_MODE, "0"),)}, f"{DEV_MODE} is switched off"),
        (f"{VLLM} --host 0.0.0.0", {}, "its control routes would be open to the network (--host 0.0.0.0); let it listen on 127.0.0.1"),
        (f"{VLLM} --host ::", {}, "(--host ::)"),
        (VLLM, {"proxy": "http://10.0.0.5:${PORT}"}, "(--host 10.0.0.5)"),
        (f"{VLLM} -dp 2", {}, "data parallel"),
        (f"{VLLM} --nnodes 2", {}, "several machines"),
        (f"{VLLM} --headless", {}, "several machines"),
        (f"{VLLM} --kv-offloading-backend native", {}, "native KV offloading"),
        (f"{VLLM} --kv-offloading-size 8", {}, "native KV offloading"),
        ([*VLLM.split(), "--kv-transfer-config", "{}"], {}, "KV connector"),
        (f"{VLLM} --load-format tensorizer", {"sleep": "2"}, "weights of the format tensorizer cannot be reloaded after level 2"),
        (f"docker run vllm/vllm-openai --model o/m {VLLM.split()[-1]}", {}, f"its container does not get {DEV_MODE}=1"),
        ("docker run vllm/vllm-openai --model o/m", {"sleep": "1"}, "greenroom adds nothing inside a script or a container command"),
    ],
)
def test_a_vllm_that_cannot_sleep_says_why_and_stays_closed(command: str | list[str], settings: dict[str, Any], why: str) -> None:
    """No level, no switch added, and its development mode is not turned on."""
    engine = an_engine(command, **settings)
    launch = engine.launch(1, [GPU0])

    assert levels(engine) == []
    assert why in engine.no_sleep()
    assert launch.env.get(DEV_MODE) == dict(settings.get("env", ())).get(DEV_MODE)
    assert launch.argv.count("--enable-sleep-mode") == (engine.config.argv.count("--enable-sleep-mode"))
    assert (engine.version_call(), engine.sleep_notes()) == (None, ())


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_a_loopback_address_is_closed_enough(address: str) -> None:
    """Whatever its name."""
    assert levels(an_engine(f"{VLLM} --host {address}")) == [1, 2]


def test_routes_the_operator_has_opened_are_used_with_a_word_about_it() -> None:
    """It is his choice; the check says what it means."""
    engine = an_engine(f"{VLLM} --host 0.0.0.0", env=((DEV_MODE, "1"),))

    assert levels(engine) == [1, 2]
    assert engine.sleep_notes() == (f"{DEV_MODE} opens its control routes to the network (--host 0.0.0.0); let it listen on 127.0.0.1.",)


def test_expandable_segments_are_worth_a_word() -> None:
    """Old versions do not start with them."""
    notes = an_engine(VLLM, env=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)).sleep_notes()

    assert [note for note in notes if "vLLM 0.11" in note] != []


def test_a_container_of_ours_gets_the_mode_and_stays_closed() -> None:
    """It listens everywhere inside, and is published on the loopback address only."""
    engine = an_engine("vllm serve o/m", sleep="1", container=ContainerConfig("podman", "vllm/vllm-openai"))
    launch = engine.launch(5801, [GPU0], generation=1)

    assert (levels(engine), engine.no_sleep()) == ([1], "")
    assert launch.env[DEV_MODE] == "1"
    assert ("--env", DEV_MODE) in zip(launch.argv, launch.argv[1:], strict=False)
    assert ("--publish", "127.0.0.1:5801:5801") in zip(launch.argv, launch.argv[1:], strict=False)
    assert launch.argv[-3:] == ("--host", "0.0.0.0", "--enable-sleep-mode")
    assert engine.sleep_recipe(1, LATEST) == an_engine(VLLM).sleep_recipe(1, LATEST)
    assert (engine.canaries(), engine.control_headers(), engine.dozes()) == (an_engine("vllm serve o/m").canaries(), (), None)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--network", "host"), "open to the network (--network host)"),
        (("--net=host",), "open to the network (--net host)"),
        (("-p", "8000:8000"), "open to the network (-p 8000:8000)"),
        (("--publish=0.0.0.0:8000:8000",), "(--publish 0.0.0.0:8000:8000)"),
        (("-P",), "(-P)"),
        (("-p", "127.0.0.1:8000:8000"), ""),
        (("-e", f"{DEV_MODE}=0"), f"{DEV_MODE} is switched off"),
        (("--network", "inner", "--memory", "8g"), ""),
    ],
)
def test_a_container_that_is_published_wider_does_not_sleep(arguments: tuple[str, ...], why: str) -> None:
    """The operator's own arguments of `run` may open it."""
    engine = an_engine(VLLM, container=ContainerConfig("docker", "vllm/vllm-openai", arguments))

    assert (levels(engine) == []) is bool(why)
    assert why in engine.no_sleep()


def test_a_container_command_of_the_operators_sleeps_when_he_hands_the_mode_in() -> None:
    """`docker run` as the command: by value or by name."""
    for handed, env in ((f"{DEV_MODE}=1", ()), (DEV_MODE, ((DEV_MODE, "1"),))):
        command = f"docker run -p 127.0.0.1:8000:8000 -e {handed} vllm/vllm-openai --model o/m --enable-sleep-mode"
        engine = an_engine(command, env=env)

        assert (levels(engine), engine.sleep_notes()) == ([1, 2], ())
    assert "(-p 8000:8000)" in an_engine(command.replace("127.0.0.1:", ""), env=env).sleep_notes()[0]


def test_priors_of_a_vllm_on_a_gpu(tmp_path: Path) -> None:
    """The context stays; level 1 keeps a copy in host RAM, level 2 reads the weights again."""
    engine = an_engine(f"vllm serve {weights(tmp_path / 'model', 8_192)} --enable-sleep-mode")
    for device, residue_mib in ((GPU0, 1_536), (BENCH0, 1_380)):  # no more than its share of so small a device
        assert engine.costs(engine.estimate([device])).tiers == (
            SleepTier(1, residue_mib, 3_072 + 8_192, 2.0, 0.5),
            SleepTier(2, residue_mib, 3_072, 0.2, 8.5),
        )


@pytest.mark.parametrize(("memory_mib", "residue_mib"), [(48, 48), (500, 64), (None, 64)])
def test_a_sleeper_holds_no_more_than_it_holds_awake(memory_mib: int | None, residue_mib: int) -> None:
    """Put to sleep or fallen asleep by itself; where its need is known."""
    doze = an_engine("llama-server -hf o/r --sleep-idle-seconds 30", memory_mib=memory_mib)
    costs = doze.costs(doze.estimate([RAM]))
    assert costs.doze is not None
    assert costs.doze.residue_mib == residue_mib
    declared = an_engine("engine", memory_mib=memory_mib, sleep_calls=replace(DECLARED, residue_mib=64))
    assert [tier.residue_mib for tier in declared.costs(declared.estimate([RAM])).tiers] == [residue_mib]


def test_priors_of_a_vllm_on_host_ram(tmp_path: Path) -> None:
    """There the copy lies on its own device."""
    engine = an_engine(f"vllm serve {weights(tmp_path / 'model', 1_024)} --enable-sleep-mode --kv-cache-memory-bytes 64M")
    tiers = engine.costs(engine.estimate([RAM])).tiers

    assert [(tier.level, tier.residue_mib, tier.host_mib) for tier in tiers] == [(1, 1_536 + 1_024, 0), (2, 1_536, 0)]


def test_weights_of_a_hub_model_are_found_in_the_cache(empty_hub: Path, tmp_path: Path) -> None:
    """By revision; the command's own environment and folder go before this machine's; else the need bounds them."""
    in_hub(empty_hub, "o/m", 1_024)
    in_hub(empty_hub, "o/m", 2_048, "v2")
    in_hub(tmp_path / "other" / "hub", "o/m", 3_072)
    in_hub(tmp_path / "loads", "o/m", 4_096)

    def host_mib(command: str, **settings: Any) -> int:
        engine = an_engine(command, **settings)
        return engine.costs(engine.estimate([GPU0])).tiers[0].host_mib - 3_072

    assert host_mib(VLLM) == 1_024
    assert host_mib(f"{VLLM} --revision v2") == 2_048
    assert host_mib(f"{VLLM} --revision commit-of-v2") == 2_048
    assert host_mib(VLLM, env=(("HF_HOME", str(tmp_path / "other")),)) == 3_072
    assert host_mib(f"{VLLM} --download-dir {tmp_path / 'loads'}") == 4_096
    assert host_mib(VLLM.replace("o/m", "o/never-fetched"), memory_mib=9_000) == 9_000
    assert host_mib(VLLM.replace("o/m", "o/never-fetched") + " -tp 2 --gpu-memory-utilization 0.1") == 2 * 8_192


def test_weights_in_a_containers_cache_are_found_through_its_volumes(empty_hub: Path, tmp_path: Path) -> None:
    """Not this machine's cache unless it is mounted."""
    in_hub(empty_hub, "o/m", 1_024)
    in_hub(tmp_path / "cache" / "huggingface" / "hub", "o/m", 2_048)
    mounted = ContainerConfig("docker", "img", (), (f"{tmp_path}/cache:{Path('/root', '.cache')}",))

    engine = an_engine(VLLM, container=mounted, memory_mib=1)
    assert engine.costs(engine.estimate([GPU0])).tiers[0].host_mib == 3_072 + 2_048
    engine = an_engine(VLLM, container=ContainerConfig("docker", "img"), memory_mib=1)
    assert engine.costs(engine.estimate([GPU0])).tiers[0].host_mib == 3_072 + 1


@pytest.mark.parametrize(
    ("settings", "level", "expected"),
    [
        ({}, 1, (False, True)),
        ({}, 2, (True, True)),
        ({"canary": "always"}, 1, (True, True)),
        ({"canary": "off"}, 2, (False, True)),
        ({"canary": "off"}, 1, (False, False)),
    ],
)
def test_what_is_compared_after_a_wake(settings: dict[str, Any], level: int, expected: tuple[bool, bool]) -> None:
    """A wake that failed half-way may lose weights without a word: it is called again only where that would be seen."""
    recipe = an_engine(VLLM, **settings).sleep_recipe(level, LATEST)

    assert (recipe.verify, recipe.repeatable) == expected


def test_several_ranks_are_not_woken_twice() -> None:
    """Where one was out of memory the others are awake already."""
    assert not an_engine(f"{VLLM} -tp 2").sleep_recipe(1, LATEST).repeatable


# ------------------------------------------------------------------------------------------------------------- SGLang

MEMORY_SAVER = f"{SGLANG} --enable-memory-saver"


def test_an_sglang_with_a_copy_of_its_weights_resumes_what_it_released() -> None:
    """Exactly that, once; it cannot be asked."""
    engine = an_engine(f"{MEMORY_SAVER} --enable-weights-cpu-backup")

    assert (levels(engine), engine.no_sleep(), engine.version_call()) == ([1], "", None)
    assert engine.sleep_recipe(1, ()) == SleepRecipe(
        1,
        (Call("/flush_cache?timeout=5", optional=True), Call("/release_memory_occupation", body=b'{"tags":["kv_cache","weights"]}')),
        (Call("/resume_memory_occupation", body=b'{"tags":["kv_cache","weights"]}'),),
        None,
        repeatable=False,
    )


def test_an_sglang_without_a_copy_reads_its_weights_again() -> None:
    """Before the cache takes its room."""
    engine = an_engine(MEMORY_SAVER)
    recipe = engine.sleep_recipe(2, ())

    assert levels(engine) == [2]
    assert [(call.path, json.loads(call.body)) for call in recipe.wake] == [
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/update_weights_from_disk", {"model_path": "o/m"}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ]
    assert (recipe.verify, recipe.repeatable, engine.sleep_recipe(1, ()).unfit == "") == (True, False, False)


@pytest.mark.parametrize("level", ["1", "2"])
def test_an_sglang_resumes_the_tags_it_released_and_none_twice(level: str) -> None:
    """It dies of a tag that was not released; graphs are named only where they can be."""
    for env in ((), (("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1"),)):
        recipe = an_engine(SGLANG, sleep=level, env=env).sleep_recipe(int(level), ())
        released = json.loads(recipe.sleep[-1].body)["tags"]
        resumed = [tag for call in recipe.wake if "resume" in call.path for tag in json.loads(call.body)["tags"]]

        assert sorted(released) == sorted(resumed)
        assert ("cuda_graph" in released) is bool(env)


@pytest.mark.parametrize(
    ("command", "settings", "added"),
    [
        (SGLANG, {"sleep": "1"}, ["--enable-memory-saver", "--enable-weights-cpu-backup"]),
        (MEMORY_SAVER, {"sleep": "1"}, ["--enable-weights-cpu-backup"]),
        (SGLANG, {"sleep": "2"}, ["--enable-memory-saver"]),
        (MEMORY_SAVER, {}, []),
        (SGLANG, {}, []),
    ],
)
def test_an_sglang_gets_the_switches_of_the_level_that_is_asked_for(command: str, settings: dict[str, Any], added: list[str]) -> None:
    """Behind what the operator wrote."""
    argv = an_engine(f"{command} --port ${{PORT}}", **settings).launch(1, [GPU0]).argv

    assert list(argv[len(command.split()) + 2 :]) == added


@pytest.mark.parametrize(
    ("command", "settings", "why"),
    [
        (SGLANG, {}, "--enable-memory-saver is not given (write it, or `sleep: 1`)"),
        (["sh", "-c", SGLANG], {"sleep": "1"}, "greenroom adds nothing inside a script"),
        (["sh", "-c", MEMORY_SAVER], {"sleep": "1"}, "--enable-weights-cpu-backup is not given"),
        (f"{MEMORY_SAVER} --enable-weights-cpu-backup", {"sleep": "2"}, "level 1 only"),
        (f"{MEMORY_SAVER} --dp-size 2", {}, "data parallel"),
        (f"{MEMORY_SAVER} --nnodes 2", {}, "several machines"),
        (f"{MEMORY_SAVER} --disaggregation-mode prefill", {}, "disaggregated"),
        (f"{MEMORY_SAVER} --load-format dummy", {}, "weights of the format dummy cannot be reloaded"),
        (f"{MEMORY_SAVER} --quantization gguf", {}, "weights of the format gguf cannot be reloaded"),
        (f"{MEMORY_SAVER} --speculative-algorithm EAGLE", {}, "draft model would be lost at level 2"),
        (
            f"{MEMORY_SAVER} --enable-weights-cpu-backup --speculative-algorithm EAGLE",
            {},
            "lost without --enable-draft-weights-cpu-backup",
        ),
        ("python -m sglang.launch_server --enable-memory-saver", {}, "does not say which weights"),
    ],
)
def test_an_sglang_that_cannot_sleep_says_why(command: str | list[str], settings: dict[str, Any], why: str) -> None:
    """And has no level."""
    engine = an_engine(command, **settings)

    assert levels(engine) == []
    assert why in engine.no_sleep()


@pytest.mark.parametrize(
    "flags",
    [
        "--speculative-algorithm NGRAM",
        "--enable-weights-cpu-backup --speculative-algorithm EAGLE --enable-draft-weights-cpu-backup",
        "--load-format safetensors --tp 2",
    ],
)
def test_an_sglang_whose_weights_all_come_back_sleeps(flags: str) -> None:
    """Drafting without a model, a draft model with its own copy, several ranks."""
    assert levels(an_engine(f"{MEMORY_SAVER} {flags}")) != []


def test_the_key_for_administrators_opens_the_sleep_routes() -> None:
    """It is another than the one for requests, and as secret."""
    engine = an_engine(f"{MEMORY_SAVER} --api-key user-key --admin-api-key admin-key")

    assert engine.readiness().headers == (("Authorization", "Bearer user-key"),)
    assert engine.control_headers() == (("Authorization", "Bearer admin-key"),)
    assert {"user-key", "admin-key"} <= set(engine.launch(1, [GPU0]).secrets)
    assert an_engine(f"{MEMORY_SAVER} --api-key user-key").control_headers() == (("Authorization", "Bearer user-key"),)


def test_sleep_routes_without_a_lock_on_an_open_address_are_worth_a_word() -> None:
    """They exist in every SGLang; a key closes them."""
    command = f"{MEMORY_SAVER} --host 0.0.0.0"

    assert "--host 0.0.0.0" in an_engine(command).sleep_notes()[0]
    assert an_engine(f"{command} --admin-api-key k").sleep_notes() == ()
    assert an_engine(MEMORY_SAVER).sleep_notes() == ()


def test_priors_of_an_sglang(tmp_path: Path) -> None:
    """Graphs stay unless they can be released too."""
    command = f"{SGLANG.replace('o/m', str(weights(tmp_path / 'model', 8_192)))} --enable-memory-saver"
    graphs = (("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true"),)
    engine, lighter = an_engine(command, sleep="1"), an_engine(command, env=graphs)

    assert engine.costs(engine.estimate([GPU0])).tiers == (SleepTier(1, 2_560, 3_072 + 8_192, 2.0, 0.5),)
    assert lighter.costs(lighter.estimate([GPU0])).tiers == (SleepTier(2, 1_536, 3_072, 0.2, 8.5),)


# ----------------------------------------------------------------------------------------------------------- canaries


def bodies(engine: Engine) -> dict[str, dict[str, Any]]:
    return {canary.path: json.loads(canary.body) for canary in engine.canaries()}


def test_a_canary_for_every_kind_of_model() -> None:
    """Greedy, short, and the same each time."""
    engine = an_engine("engine")

    assert [(canary.path, canary.pick) for canary in engine.canaries()] == [
        ("/v1/completions", "choices.0.text"),
        ("/v1/chat/completions", "choices.0.message.content"),
        ("/v1/embeddings", "data.0.embedding"),
        ("/score", "data.*.score"),
        ("/v1/rerank", "results.*.relevance_score"),
    ]
    asked = bodies(engine)["/v1/completions"]
    assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["model"]) == (0, 0, 4, "m")
    assert engine.canaries() == an_engine("engine").canaries()


@pytest.mark.parametrize("command", [VLLM, MEMORY_SAVER, "llama-server -m x"])
def test_a_canary_always_says_something(command: str) -> None:
    """An end token first would leave nothing to compare."""
    assert bodies(an_engine(command))["/v1/completions"]["ignore_eos"] is True


@pytest.mark.parametrize(
    ("command", "settings", "name"),
    [
        ("engine", {}, "m"),
        ("engine", {"use_model_name": "x"}, "x"),
        (VLLM, {}, "o/m"),
        (f"{VLLM} --served-model-name one two", {}, "one"),
        (f"{VLLM} --served-model-name one", {"use_model_name": "two"}, "two"),
        (MEMORY_SAVER, {}, "o/m"),
        (f"{MEMORY_SAVER} --served-model-name one", {}, "one"),
        ("llama-server -m x", {}, "m"),
    ],
)
def test_canaries_name_the_model_as_the_engine_knows_it(command: str, settings: dict[str, Any], name: str) -> None:
    """They do not go through the part that renames requests."""
    assert {body["model"] for body in bodies(an_engine(command, **settings)).values()} == {name}


def test_engines_with_other_shapes_are_asked_in_their_own() -> None:
    """vLLM classifies; SGLang's reranker answers with a bare list."""
    assert Canary("/classify", b'{"model":"o/m","input":"1 2 3 4 5 6 7 8 9"}', "data.0.probs") in an_engine(VLLM).canaries()
    assert [(canary.path, canary.pick) for canary in an_engine(MEMORY_SAVER).canaries()][-1] == ("/v1/rerank", "*.score")


def test_no_canary_when_the_operator_wants_none() -> None:
    """Nothing is sent, nothing compared."""
    assert an_engine(VLLM, canary="off").canaries() == ()
