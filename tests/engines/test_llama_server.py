"""What a llama-server's flags mean for its booking."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom import demo_models
from greenroom.engines.base import AsleepCheck, Call, DeviceRef
from greenroom.engines.detect import describe
from greenroom.engines.llama_memory import Options
from greenroom.engines.llama_server import LlamaServer
from tests.engines.builders import BENCH0, GPU0, RAM, a_model


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("", Options()),
        ("-c 4096 -np 2 -ub 256", Options(ctx=4096, parallel=2, ubatch=256, fits_itself=False)),
        ("--ctx-size 4096 --parallel 2 --fit off", Options(ctx=4096, parallel=2, fits_itself=False)),
        ("-b 128", Options(ubatch=128)),
        ("-ctk q8_0 -ctv q4_0", Options(cache_k=34 / 32, cache_v=18 / 32)),
        ("-ngl 0", Options(gpu_layers=0)),
        ("--n-gpu-layers 99", Options(gpu_layers=99)),
        ("-ngl all", Options()),
        ("-dev none", Options(gpu_layers=0)),
        ("-cmoe", Options(cpu_moe_layers=1 << 16)),
        ("--n-cpu-moe 3", Options(cpu_moe_layers=3)),
        ("-fa off", Options(flash=False)),
        ("--reranking", Options(embedding=True)),
        ("--embeddings -nr", Options(embedding=True, repack=False)),
        ("--load-mode none", Options(mapped=False)),
        ("--no-mmap", Options(mapped=False)),
        ("--cache-ram 100 -nkvo", Options(cache_ram_mib=100, kv_offload=False)),
    ],
)
def test_flags_are_read(flags: str, options: Options) -> None:
    """Short and long; the server's own defaults where there are none."""
    assert LlamaServer(a_model(f"llama-server -m x {flags}")).options() == options


def test_the_environment_is_read_where_flags_are_silent() -> None:
    """LLAMA_ARG_*."""
    env = (("LLAMA_ARG_CTX_SIZE", "512"), ("LLAMA_ARG_N_PARALLEL", "3"), ("LLAMA_ARG_EMBEDDINGS", "1"), ("LLAMA_ARG_MMAP", "0"))

    assert LlamaServer(a_model("llama-server -c 256", env=env)).options() == Options(
        ctx=256, parallel=3, embedding=True, mapped=False, fits_itself=False
    )


def test_an_estimate_says_what_it_is_made_of(tmp_path: Path) -> None:
    """For `check` and `why`."""
    model = demo_models.tiny_llama(tmp_path / "a.gguf")
    estimate = describe(a_model(f"llama-server -m {model} -c 2048")).estimate([RAM])

    assert estimate.source == "estimated"
    assert estimate.detail.startswith("weights 1 + KV 1 + compute ")
    assert (estimate.host_mib, estimate.device_mib is not None) == (0, True)


def test_smaller_contexts_are_told_with_what_they_free(tmp_path: Path) -> None:
    """In eighths of the one that is set, by the same arithmetic as the estimate; nothing where no context is set or no file is there."""
    model = demo_models.tiny_llama(tmp_path / "a.gguf", layers=8, embd=512, heads=8, kv_heads=8, ff=1024)
    engine = describe(a_model(f"llama-server -m {model} -c 32768"))
    told = dict(engine.contexts([GPU0]))

    assert list(told) == [32768 * part // 8 for part in range(7, 0, -1)]
    half = describe(a_model(f"llama-server -m {model} -c 16384")).estimate([GPU0])
    assert told[16384] == engine.estimate([GPU0]).device_mib - half.device_mib > 100
    assert describe(a_model(f"llama-server -m {model}")).contexts([GPU0]) == ()
    assert describe(a_model("llama-server -m /nowhere.gguf -c 4096")).contexts([GPU0]) == ()
    assert describe(a_model("vllm serve /m/a")).contexts([GPU0]) == ()


def test_a_declared_device_counts_as_ram_unless_layers_are_offloaded_by_name(tmp_path: Path) -> None:
    """Nobody can read what it stands for."""
    model = demo_models.tiny_llama(tmp_path / "a.gguf")
    plain = describe(a_model(f"llama-server -m {model}"))
    offloaded = describe(a_model(f"llama-server -m {model} -ngl 99"))

    assert plain.estimate([BENCH0]) == plain.estimate([RAM])
    assert offloaded.estimate([BENCH0]).host_mib > 0


def test_on_a_gpu_part_of_it_is_host_memory(tmp_path: Path) -> None:
    """Context, weights and compute on the device; token table, output rows and kept prompts in RAM."""
    model = demo_models.tiny_llama(tmp_path / "a.gguf", layers=4, embd=256, heads=4, kv_heads=4, ff=1024)
    estimate = describe(a_model(f"llama-server -m {model} -c 2048")).estimate([GPU0])

    assert estimate.device_mib is not None
    assert 480 < estimate.device_mib < 520
    assert 512 < estimate.host_mib < 540


@pytest.mark.parametrize("command", ["llama-server -hf user/repo", "llama-server -m /no/such.gguf", "sh -c 'llama-server -m $MODEL'"])
def test_a_model_that_cannot_be_read_has_no_estimate(command: str) -> None:
    """It is learned at the first start."""
    estimate = describe(a_model(command)).estimate([GPU0])

    assert (estimate.device_mib, estimate.source) == (None, "unknown")
    assert "learned at the first start" in estimate.detail


def test_the_prompt_cache_is_held_to_its_booking_on_ram_only(tmp_path: Path) -> None:
    """Where host RAM is the budget; the operator's own limit stays."""
    model = demo_models.tiny_llama(tmp_path / "a.gguf", layers=8, embd=512, heads=4, kv_heads=4)
    command = f"/x/llama-server -m {model} -c 2048"

    assert describe(a_model(command)).launch(1, [RAM]).env["LLAMA_ARG_CACHE_RAM"] == "24"
    assert describe(a_model(command)).launch(1, [BENCH0]).env["LLAMA_ARG_CACHE_RAM"] == "24"
    assert "LLAMA_ARG_CACHE_RAM" not in describe(a_model(command)).launch(1, [GPU0]).env
    assert "LLAMA_ARG_CACHE_RAM" not in describe(a_model(command + " -cram 99")).launch(1, [RAM]).env


def test_a_start_is_priced_by_its_weights(tmp_path: Path) -> None:
    """1 GiB a second and up to a second of set-up; a tiny one takes 0.3 s."""
    sparse = tmp_path / "a.gguf"
    demo_models.tiny_llama(sparse)
    with sparse.open("r+b") as file:
        file.truncate(4 << 30)
    engine = describe(a_model(f"llama-server -m {sparse}"))
    tiny = describe(a_model(f"llama-server -m {demo_models.tiny_llama(tmp_path / 'tiny.gguf')}"))

    assert tiny.costs(tiny.estimate([])).up_s == pytest.approx(0.3, abs=0.01)
    assert engine.costs(engine.estimate([])).up_s == pytest.approx(5.0)


def test_the_last_device_named_sets_vendor_and_size(tmp_path: Path) -> None:
    """A card of another maker has another context size."""
    model = demo_models.tiny_llama(tmp_path / "a.gguf")
    other = DeviceRef("gpu0", "gpu", "", "", 0, 8_192)
    engine = describe(a_model(f"llama-server -m {model} -c 256"))
    nvidia, unknown = engine.estimate([GPU0]).device_mib, engine.estimate([other]).device_mib

    assert nvidia is not None
    assert unknown is not None
    assert nvidia - unknown == 480 - 256


def test_model_makers_are_seeded_and_leave_nothing_half_made(tmp_path: Path) -> None:
    """The same file twice; a failed one leaves no file."""
    one = demo_models.tiny_bert(tmp_path / "a.gguf", rank=True).read_bytes()
    two = demo_models.tiny_bert(tmp_path / "b.gguf", rank=True).read_bytes()
    assert one == two
    with pytest.raises(demo_models.ModelFilesMissing, match="MiniLM cannot be converted"):
        demo_models.minilm(tmp_path, tmp_path / "c.gguf", rank=False)
    (tmp_path / "config.json").write_text(json.dumps({}))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "config.json"]


def test_a_server_told_to_sleep_when_idle_dozes() -> None:
    """It cannot be told to sleep, only woken: by a call that every kind of server has."""
    engine = describe(a_model("llama-server -m x --sleep-idle-seconds 60"))
    costs = engine.costs(engine.estimate([RAM]))
    recipe = engine.sleep_recipe(1, ())

    assert (costs.tiers, engine.no_sleep()) == ((), "it falls asleep by itself only, 60 s after its last request")
    assert costs.doze is not None
    assert (costs.doze.level, costs.doze.residue_mib, costs.doze.host_mib, costs.doze.sleep_s) == (1, 64, 0, 0.0)
    assert engine.costs(engine.estimate([GPU0])).doze == replace(costs.doze, residue_mib=512)
    assert engine.dozes() == AsleepCheck("/props", "is_sleeping", True)
    assert (recipe.sleep, recipe.wake) == ((), (Call("/tokenize", "POST", b'{"content":""}'),))
    assert (recipe.check, recipe.repeatable, recipe.unfit) == (engine.dozes(), False, "")


@pytest.mark.parametrize("arguments", ["-m x", "-m x --sleep-idle-seconds -1", "--models-dir /m --sleep-idle-seconds 5"])
def test_other_servers_stay_awake(arguments: str) -> None:
    """Without the flag, with it off, and a router (whose children may sleep, not itself)."""
    engine = describe(a_model(f"llama-server {arguments}"))

    assert engine.costs(engine.estimate([RAM])).doze is None
    assert (engine.dozes(), engine.no_sleep()) == (None, "it has no sleep routes")
