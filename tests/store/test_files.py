"""What files are for, by name and by what is in them; and which models are whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.store.facts import Damaged, Description, ModelFile, Refused, StoreError
from greenroom.store.gguf_files import about_others, count_of, examine, local_files
from greenroom.store.library import Library
from greenroom.store.paths import safe_path
from greenroom.store.references import parse
from greenroom.store.roles import entry_of, missing_parts, role_of, stem_of

from .models import gguf, safetensors


def files(*paths: str, size: int = 1) -> tuple[ModelFile, ...]:
    return tuple(ModelFile(path, size, role=role_of(path)) for path in paths)


def examined(folder: Path, data: Mapping[str, bytes]) -> tuple[dict[str, str], Description]:
    for path, content in data.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    found, told = examine(folder, tuple(ModelFile(path, len(content), role=role_of(path)) for path, content in data.items()), Description())
    return {file.path: file.role for file in found}, told


class TestRoles:
    @pytest.mark.parametrize(
        ("path", "role"),
        [
            ("m.gguf", "weights"),
            ("d/model-00001-of-00002.safetensors", "weights"),
            ("pytorch_model.bin", "weights"),
            ("training_args.bin", "other"),
            ("mmproj-m-f16.gguf", "projector"),
            ("m-draft.gguf", "draft"),
            ("adapter_model.safetensors", "adapter"),
            ("my-lora.gguf", "adapter"),
            ("colorado.gguf", "weights"),
            ("config.json", "config"),
            ("generation_config.json", "config"),
            ("tokenizer.json", "tokenizer"),
            ("tokenizer_config.json", "tokenizer"),
            ("merges.txt", "tokenizer"),
            ("qwen.tiktoken", "tokenizer"),
            ("chat_template.jinja", "template"),
            ("LICENSE", "license"),
            ("LICENSE-2", "license"),
            ("README.md", "doc"),
            ("modeling_x.py", "other"),
        ],
    )
    def test_by_name(self, path: str, role: str):
        assert role_of(path) == role

    def test_what_is_in_a_file_wins_over_its_name(self, tmp_path: Path):
        roles, _ = examined(
            tmp_path,
            {
                "m.gguf": gguf(),
                "vision.gguf": gguf(fields={"general.architecture": "clip"}),
                "p.gguf": gguf(fields={"general.type": "mmproj"}),
                "a.gguf": gguf(fields={"general.type": "adapter"}),
            },
        )
        assert roles == {"m.gguf": "weights", "vision.gguf": "projector", "p.gguf": "projector", "a.gguf": "adapter"}


class TestEntry:
    @pytest.mark.parametrize(
        ("paths", "entry"),
        [
            (("m.gguf", "mmproj.gguf"), "m.gguf"),
            (("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"), "m-00001-of-00002.gguf"),
            (("q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"), "q/m-00001-of-00002.gguf"),
            (("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), ""),
            (("sub/model.safetensors", "sub/config.json"), "sub"),
        ],
    )
    def test_what_an_engine_is_given(self, paths: tuple[str, ...], entry: str):
        assert entry_of(files(*paths)) == entry

    def test_the_largest_of_several(self):
        """All parts of a split one count."""
        several = (*files("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", size=6), *files("b.gguf", size=10))
        assert entry_of(several) == "a-00001-of-00002.gguf"

    def test_no_weights(self):
        with pytest.raises(StoreError, match="no model"):
            entry_of(files("README.md", "mmproj.gguf"))

    def test_missing_parts(self):
        assert missing_parts(["x/m-00001-of-00003.gguf", "x/m-00003-of-00003.gguf"]) == ("x/m-00002-of-00003.gguf",)
        assert missing_parts(["m.gguf"]) == ()
        assert stem_of("x/m-00001-of-00003.gguf") == "x/m"


class TestDescription:
    def test_of_a_gguf(self, tmp_path: Path):
        fields: dict[str, str | int] = {"general.file_type": 15, "general.license": "mit", "general.name": "Tiny 2"}
        _, told = examined(tmp_path, {"m.gguf": gguf(8_000_000, fields=fields)})
        assert told == Description("gguf", "llama", "2M", "Q4_K_M", "Tiny 2", ("mit",), 2048)

    def test_of_a_folder(self, tmp_path: Path):
        config = json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "max_position_embeddings": 4096}).encode()
        _, told = examined(tmp_path, {"model.safetensors": safetensors(2000), "config.json": config})
        assert told == Description("safetensors", "LlamaForCausalLM", "2K", "bfloat16", context_length=4096)

    @pytest.mark.parametrize(
        "config", [b"", b"[]", b"{", b'{"architectures": 5, "max_position_embeddings": "x", "quantization_config": []}']
    )
    def test_a_broken_configuration_is_no_fault_of_the_store(self, tmp_path: Path, config: bytes):
        assert examined(tmp_path, {"model.safetensors": safetensors(), "config.json": config})[1].format == "safetensors"

    @pytest.mark.parametrize(
        ("values", "text"),
        [(0, ""), (999, "999"), (134_515_008, "135M"), (8_030_261_248, "8B"), (1_240_000_000, "1.2B"), (999_999_999, "1B")],
    )
    def test_counts(self, values: int, text: str):
        assert count_of(values) == text


class TestWhole:
    def test_parts_that_are_called_otherwise(self, tmp_path: Path):
        """Pushed under another name: the engine would not find the others, so it is said before it is served."""
        with pytest.raises(Damaged, match="one of 3 parts"):
            examined(tmp_path, {"model.gguf": gguf(fields={"split.count": 3})})

    def test_parts_that_are_missing(self, tmp_path: Path):
        with pytest.raises(Damaged, match="without m-00002-of-00002"):
            examined(tmp_path, {"m-00001-of-00002.gguf": gguf()})

    def test_all_parts(self, tmp_path: Path):
        parts = {f"m-0000{part}-of-00002.gguf": gguf(seed=part, fields={"split.count": 2}) for part in (1, 2)}
        assert examined(tmp_path, parts)[1].format == "gguf"

    def test_shards_that_an_index_names(self, tmp_path: Path):
        index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
        data = {"model-1.safetensors": safetensors(), "model.safetensors.index.json": index}
        with pytest.raises(Damaged, match=r"without model-2\.safetensors"):
            examined(tmp_path, data)
        assert examined(tmp_path, {**data, "model-2.safetensors": safetensors()})[1].format == "safetensors"

    @given(st.binary(max_size=200))
    def test_any_bytes_called_safetensors(self, tmp_path_factory: pytest.TempPathFactory, data: bytes):
        from greenroom.store.gguf_files import check_safetensors

        path = tmp_path_factory.getbasetemp() / "any.safetensors"
        for content in (data, len(data).to_bytes(8, "little") + data):
            path.write_bytes(content)
            try:
                check_safetensors(path)
            except Damaged:
                continue


class TestLocal:
    def test_a_folder_that_holds_everything_is_no_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """Somebody names the root of the disk: it is not read to its end."""
        monkeypatch.setattr("greenroom.store.gguf_files.ENTRIES_MAX", 10)
        for number in range(11):
            (tmp_path / f"{number}.gguf").write_bytes(b"")
        with pytest.raises(StoreError, match="name the folder of one model"):
            local_files(tmp_path)

    def test_a_folder_of_several_models_tells_which_one_is_meant(self, tmp_path: Path):
        """The largest; the others are named, of a split one the first part."""
        for name in ("chat.gguf", "embed.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
            (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "m" / name).write_bytes(gguf())
        stored = Library(tmp_path / "store").adopt(parse(str(tmp_path / "m")))
        assert about_others(stored) == (
            "it holds 3 models, of which big-00001-of-00002.gguf is served; for another (chat.gguf, embed.gguf) name that one's own path"
        )
        assert about_others(Library(tmp_path / "store").adopt(parse(str(tmp_path / "m" / "chat.gguf")))) == ""

    def test_many_models_in_a_folder_are_not_all_told(self, tmp_path: Path):
        (tmp_path / "m").mkdir()
        for number in range(9):
            (tmp_path / "m" / f"{number}.gguf").write_bytes(gguf())
        assert "(1.gguf, 2.gguf, 3.gguf, 4.gguf, 5.gguf and 3 more)" in about_others(
            Library(tmp_path / "store").adopt(parse(str(tmp_path / "m")))
        )

    def test_what_belongs_to_one_model_makes_no_second(self, tmp_path: Path):
        """Parts, projectors, adapters and drafts, told by their names or by their heads."""
        heads: dict[str, dict[str, str | int]] = {
            "m-00001-of-00002.gguf": {"general.type": "model"},
            "m-00002-of-00002.gguf": {},
            "mmproj-m.gguf": {},
            "eyes.gguf": {"general.architecture": "clip"},
            "manners.gguf": {"general.type": "adapter"},
            "m-imatrix.gguf": {"general.type": "imatrix"},
            "voice.gguf": {"general.architecture": "wavtokenizer-dec"},
            "m-draft.gguf": {},
        }
        (tmp_path / "m").mkdir()
        for name, fields in heads.items():
            (tmp_path / "m" / name).write_bytes(gguf(fields=fields))
        stored = Library(tmp_path / "store").adopt(parse(str(tmp_path / "m")))
        assert {file.path for file in stored.files} == set(heads)
        assert about_others(stored) == ""

    def test_folders_with_a_configuration_each_are_several_models(self, tmp_path: Path):
        """One above them makes them the parts of one, as image models are kept."""
        for name in ("chat", "embed"):
            (tmp_path / "m" / name).mkdir(parents=True)
            (tmp_path / "m" / name / "config.json").write_text("{}")
            (tmp_path / "m" / name / "model.safetensors").write_bytes(safetensors())
        library, reference = Library(tmp_path / "store"), parse(str(tmp_path / "m"))
        assert about_others(library.adopt(reference)).startswith("it holds 2 models, of which chat is served; for another (embed)")
        (tmp_path / "m" / "model_index.json").write_text("{}")
        assert about_others(library.adopt(reference)) == ""

    def test_a_glob_in_a_name_is_only_a_name(self, tmp_path: Path):
        for part in (1, 2):
            (tmp_path / f"m[12]*-0000{part}-of-00002.gguf").write_bytes(gguf())
        (tmp_path / "m1x-00001-of-00002.gguf").write_bytes(gguf())
        found = local_files(tmp_path / "m[12]*-00001-of-00002.gguf")
        assert [name for name, _ in found] == ["m[12]*-00001-of-00002.gguf", "m[12]*-00002-of-00002.gguf"]


class TestSafePath:
    @given(st.text(max_size=40))
    def test_whatever_is_accepted_stays_inside(self, text: str):
        try:
            path = safe_path(text)
        except Refused:
            return
        inside = Path("/a/b/c") / path
        assert inside.is_relative_to("/a/b/c")
        assert ".." not in inside.parts
        assert safe_path(path) == path
