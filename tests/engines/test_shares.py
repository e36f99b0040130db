"""Memory needs that flags say exactly: vLLM, SGLang, TEI."""

from __future__ import annotations

from pathlib import Path

from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from tests.engines.builders import GPU0, RAM, a_model

CARD_22G = DeviceRef("gpu0", "gpu", "nvidia", "GPU-a", 0, 22_579)


def test_a_vllm_wants_its_fraction_of_the_whole_card() -> None:
    """0.90 of 22,579 MiB is 20,322 whatever is free; a second one at 0.35 wants 0.35 of the total (B27)."""
    estimate = describe(a_model("vllm serve m --gpu-memory-utilization 0.90")).estimate([CARD_22G])

    assert (estimate.device_mib, estimate.source) == (20_322, "flags")
    assert describe(a_model("vllm serve m --gpu_memory_utilization=0.35")).estimate([CARD_22G]).device_mib == 7_903


def test_a_vllm_without_the_flag_wants_nearly_all() -> None:
    """Its default is 0.92, and the detail says whose figure that is."""
    estimate = describe(a_model("vllm serve m")).estimate([GPU0])

    assert estimate.device_mib == 75_367
    assert "vLLM's default" in estimate.detail


def test_a_fixed_kv_size_does_not_lower_what_must_be_free_at_start(tmp_path: Path) -> None:
    """The start-up check compares the fraction with the free memory also then; a KV beyond the fraction counts in full."""
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    command = f"vllm serve {tmp_path} --gpu-memory-utilization 0.1 --kv-cache-memory-bytes"

    assert describe(a_model(f"{command} 1GiB")).estimate([GPU0]).device_mib == 8_192
    assert describe(a_model(f"{command} 8GiB")).estimate([GPU0]).device_mib == 3 + 8_192 + 2_048


def test_a_vllm_on_the_cpu_needs_weights_kv_and_its_processes(tmp_path: Path) -> None:
    """VLLM_CPU_KVCACHE_SPACE is whole GiB and beats the flag."""
    (tmp_path / "model.safetensors").write_bytes(bytes(5 << 20))
    engine = describe(a_model(f"vllm serve {tmp_path} --kv-cache-memory-bytes 64M", env=(("VLLM_CPU_KVCACHE_SPACE", "2"),)))

    assert engine.estimate([RAM]).device_mib == 5 + 2_048 + 1_536
    assert describe(a_model(f"vllm serve {tmp_path} --kv-cache-memory-bytes 64M")).estimate([RAM]).device_mib == 5 + 64 + 1_536
    assert describe(a_model(f"vllm serve {tmp_path}")).estimate([RAM]).device_mib == 22_080


def test_an_unknown_card_size_gives_no_number() -> None:
    """Better none than a wrong one."""
    for command in ("vllm serve m", "python -m sglang.launch_server"):
        assert describe(a_model(command)).estimate([]).device_mib is None


def test_sglang_holds_more_than_its_static_share() -> None:
    """Graphs and activations lie beside it; never more than the card."""
    assert describe(a_model("python -m sglang.launch_server --mem-fraction-static 0.5")).estimate([GPU0]).device_mib == 40_960 + 3_072
    assert describe(a_model("python -m sglang.launch_server --mem-fraction-static 0.99")).estimate([GPU0]).device_mib == 81_920


def test_tei_is_estimated_from_its_weights(tmp_path: Path) -> None:
    """On a GPU once plus a context, in RAM twice; unknown while they are not on this host."""
    (tmp_path / "model.safetensors").write_bytes(bytes(7 << 20))
    engine = describe(a_model(f"text-embeddings-router --model-id {tmp_path}"))

    assert engine.estimate([GPU0]).device_mib == 7 + 1_536
    assert engine.estimate([RAM]).device_mib == 14 + 512
    assert describe(a_model("text-embeddings-router --model-id BAAI/bge-m3")).estimate([GPU0]).device_mib is None
