"""The stand-in is true to what it stands for: a vLLM server whose sleep gives memory back and whose answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .rig import PretendGpu, Server, memfd_mib, rss_mib, weights_mib

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KV_MIB = 1024
TOTAL_MIB = 3000
RELOAD = {"method": "reload_weights"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A chat model of 0.8 GB with 1 GB of KV cache; each test leaves it awake and with its own weights."""
    with (
        PretendGpu(tmp_path_factory.mktemp("chat"), TOTAL_MIB) as gpu,
        Server(gpu, gpu.model_entry("chat", kv_mib=KV_MIB)) as server,
    ):
        print(f"cold start {server.took_s:.1f} s")
        yield server


@pytest.fixture(scope="module")
def rerank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        PretendGpu(tmp_path_factory.mktemp("rerank"), TOTAL_MIB) as gpu,
        Server(gpu, gpu.model_entry("rerank", kind="rerank", kv_mib=16)) as server,
    ):
        yield server


def wake_after_level_2(server: Server) -> None:
    """The order that brings the right weights back."""
    server.must("/wake_up?tags=weights")
    server.must("/collective_rpc", RELOAD)
    server.must("/wake_up?tags=kv_cache")
    server.must("/reset_prefix_cache")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_back(chat: Server, level: int) -> None:
    """RSS of the worker falls by weights and KV, the ledger to the context; level 1 keeps the weights in host RAM."""
    worker, context_mib, weights = chat.worker, chat.gpu.context_mib, weights_mib("mid-1")
    before_mib, held_mib = rss_mib([worker]), chat.gpu.held_mib([worker])

    slept = chat.must(f"/sleep?level={level}")
    asleep_mib, copy_mib = rss_mib([worker]), memfd_mib([worker])
    asleep_held_mib = chat.gpu.held_mib([worker])
    if level == 1:
        woken_s = chat.must("/wake_up").took_s
    else:
        wake_after_level_2(chat)
        woken_s = 0.0
    awake_mib = rss_mib([worker])
    print(
        f"level {level}: RSS {before_mib} -> {asleep_mib} -> {awake_mib} MiB, copy {copy_mib} MiB, "
        f"ledger {held_mib} -> {asleep_held_mib} MiB, sleep {slept.took_s:.2f} s, wake {woken_s:.2f} s"
    )

    assert held_mib - context_mib >= 0.99 * (weights + KV_MIB)
    assert before_mib - asleep_mib >= 0.9 * (weights + KV_MIB)
    assert asleep_held_mib == context_mib
    assert (copy_mib >= 0.99 * weights) if level == 1 else (copy_mib == 0)
    assert awake_mib - asleep_mib >= 0.9 * (weights + KV_MIB)
    assert memfd_mib([worker]) == 0
    assert chat.gpu.held_mib([worker]) == held_mib


def test_answers_are_the_same_after_each_level(chat: Server) -> None:
    """Level 1 by itself, level 2 with the weights reloaded."""
    before = chat.greedy()
    chat.must("/sleep?level=1")
    chat.must("/wake_up")
    after_level_1 = chat.greedy()
    chat.must("/sleep?level=2")
    wake_after_level_2(chat)

    assert len(set(before)) > 1
    assert after_level_1 == before
    assert chat.greedy() == before


def test_level_2_without_reload_answers_wrongly(chat: Server) -> None:
    """The weights are really gone, and a late reload brings them back."""
    before = chat.greedy()
    chat.must("/sleep?level=2")
    chat.must("/wake_up")
    without_weights = chat.greedy()
    chat.must("/collective_rpc", RELOAD)
    chat.must("/reset_prefix_cache")

    assert without_weights != before
    assert chat.greedy() == before


def test_a_wake_without_room_fails_and_can_be_repeated(chat: Server) -> None:
    """500 with CUDA's words, still asleep and healthy; what was mapped by then stays, as on a GPU without rollback."""
    before = chat.greedy()
    chat.must("/sleep?level=1")
    with chat.gpu.taken_outside(TOTAL_MIB - chat.gpu.context_mib - weights_mib("mid-1") - 10):
        refused = chat.post("/wake_up")
        sleeping, healthy = chat.is_sleeping(), chat.get("/health").status
        held_mib = chat.gpu.held_mib([chat.worker])
    chat.must("/wake_up")

    assert refused.status == 500
    assert b"CUDA Error: out of memory at" in refused.body
    assert any("out of memory at /workspace/csrc/cumem_allocator.cpp" in line for line in chat.lines)
    assert sleeping
    assert healthy == 200
    assert held_mib >= chat.gpu.context_mib + 0.9 * weights_mib("mid-1")
    assert not chat.is_sleeping()
    assert chat.greedy() == before


def test_models_of_different_seeds_answer_differently(chat: Server, tmp_path: Path) -> None:
    """So a test can tell which of two models answered."""
    with PretendGpu(tmp_path, TOTAL_MIB) as gpu, Server(gpu, gpu.model_entry("other", seed=2, kv_mib=64)) as other:
        assert other.greedy() != chat.greedy()


@pytest.mark.parametrize("level", [1, 2])
def test_a_reranker_scores_the_same_after_each_level(rerank: Server, level: int) -> None:
    """To the last digit."""
    before = rerank.scores()
    rerank.must(f"/sleep?level={level}")
    if level == 2:
        wake_after_level_2(rerank)
    else:
        rerank.must("/wake_up")

    assert before[0] != before[1]
    assert rerank.scores() == before


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.5, "ValueError: Free memory on device cuda:0"),
        (0.01, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
    ],
)
def test_a_start_without_room_fails(tmp_path: Path, share: float, words: str) -> None:
    """Refused by vLLM's own check when its share is not free; out of memory when the share was understated."""
    with PretendGpu(tmp_path, TOTAL_MIB) as gpu, gpu.taken_outside(TOTAL_MIB - gpu.context_mib - 100):
        server = Server(gpu, gpu.model_entry("late", kind="tiny", kv_mib=512, share=share))
        try:
            code = server.exit_code()
        finally:
            server.end()

        assert code != 0
        assert any(words in line for line in server.lines), "".join(server.lines[-40:])
        assert gpu.held_mib() == 0
