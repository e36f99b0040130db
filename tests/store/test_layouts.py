"""Manifests: what is read from the good ones, and how the bad ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.store.facts import Damaged, NotFound, Refused, StoreError
from greenroom.store.layouts import (
    DOCKER_GGUF,
    MANIFEST_BYTES_MAX,
    OCI_INDEX,
    OCI_MANIFEST,
    PATH_ANNOTATION,
    TITLE_ANNOTATION,
    digest_of,
    is_archive,
    is_index,
    pick,
    read_config_descriptor,
    read_manifest,
)
from greenroom.store.references import parse

from .models import RAW, descriptor, modelpack, named

HERE = parse("oci://registry.example/team/model:v1")
CONFIG = json.dumps(
    {
        "descriptor": {"name": "smol", "licenses": ["Apache-2.0"]},
        "config": {"format": "gguf", "paramSize": "135M", "architecture": "llama", "quantization": "Q4_1"},
    }
).encode()


def manifest(config_type: str, *layers: dict[str, Any], config: bytes = b"{}", **more: Any) -> bytes:
    return json.dumps(
        {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": descriptor(config, config_type), "layers": list(layers), **more}
    ).encode()


class TestModelPack:
    def test_files_roles_and_description(self):
        """Every layer is a file by its annotation; its role is told by its name first, then by its media type."""
        layers = [
            named(b"w", "m.gguf"),
            named(b"p", "mmproj-m.gguf"),
            named(b"c", "config.json", "application/vnd.cncf.model.weight.config.v1.raw"),
            named(b"t", "tokenizer.json", "application/vnd.cncf.model.weight.config.v1.raw"),
            named(b"l", "LICENSE", "application/vnd.cncf.model.doc.v1.raw"),
            named(b"d", "data.csv", "application/vnd.cncf.model.dataset.v1.raw"),
        ]
        remote = read_manifest(HERE, modelpack(*layers, config=CONFIG), CONFIG)
        assert [(file.path, file.role) for file in remote.files] == [
            ("m.gguf", "weights"),
            ("mmproj-m.gguf", "projector"),
            ("config.json", "config"),
            ("tokenizer.json", "tokenizer"),
            ("LICENSE", "license"),
        ]
        assert remote.layout == "modelpack"
        assert (remote.description.parameters, remote.description.licenses, remote.description.name) == ("135M", ("Apache-2.0",), "smol")

    def test_a_packed_layer_is_known_by_its_digest_until_it_is_here(self):
        remote = read_manifest(HERE, modelpack(descriptor(b"tar", "application/vnd.cncf.model.weight.v1.tar+gzip")), b"{}")
        assert [is_archive(file) for file in remote.files] == [True]

    def test_zstd_is_refused_with_what_to_do(self):
        with pytest.raises(Refused, match="pack it again"):
            read_manifest(HERE, modelpack(descriptor(b"tar", "application/vnd.cncf.model.weight.v1.tar+zstd")))

    def test_titles_name_files_too(self):
        """What `oras push` writes: no path annotation, any media type."""
        layer = descriptor(b"w", "application/octet-stream") | {"annotations": {TITLE_ANNOTATION: "m.gguf"}}
        remote = read_manifest(HERE, manifest("application/vnd.oci.empty.v1+json", layer), b"{}")
        assert (remote.layout, [file.path for file in remote.files]) == ("files", ["m.gguf"])


class TestDockerModel:
    @pytest.mark.parametrize("version", ["v1", "v0.1", "v0.2"])
    @pytest.mark.parametrize("kind", DOCKER_GGUF)
    def test_every_version_of_its_types(self, version: str, kind: str):
        config = json.dumps({"config": {"format": "gguf", "quantization": "Q4_1", "parameters": "135M"}}).encode()
        data = manifest(f"application/vnd.docker.ai.model.config.{version}+json", descriptor(b"w", kind), config=config)
        remote = read_manifest(HERE, data, config)
        assert (remote.layout, remote.files[0].path, remote.files[0].role) == ("docker", "model.gguf", "weights")
        assert remote.description.quantization == "Q4_1"

    def test_unnamed_parts_get_the_names_that_llama_cpp_looks_for(self):
        layers = [descriptor(bytes([part]), DOCKER_GGUF[0]) for part in range(3)]
        extra = [
            descriptor(b"p", "application/vnd.docker.ai.mmproj"),
            descriptor(b"l", "application/vnd.docker.ai.license"),
            descriptor(b"m", "application/vnd.docker.ai.license"),
            descriptor(b"t", "application/vnd.docker.ai.chat.template.jinja"),
        ]
        remote = read_manifest(HERE, manifest("application/vnd.docker.ai.model.config.v0.1+json", *layers, *extra))
        assert [file.path for file in remote.files] == [
            "model-00001-of-00003.gguf",
            "model-00002-of-00003.gguf",
            "model-00003-of-00003.gguf",
            "mmproj.gguf",
            "LICENSE",
            "LICENSE-2",
            "chat_template.jinja",
        ]


class TestImage:
    def image(self, *created_by: str, label: str = "", layers: int = 0) -> bytes:
        config = {"history": [{"created_by": step} for step in created_by]}
        labels = {"config": {"Labels": {"org.containers.type": label}}} if label else {}
        self.config = json.dumps({**config, **labels}).encode()
        entries = [
            descriptor(bytes([number]), "application/vnd.oci.image.layer.v1.tar+gzip") for number in range(layers or len(created_by))
        ]
        return manifest("application/vnd.oci.image.config.v1+json", *entries, config=self.config)

    def test_raw(self):
        remote = read_manifest(HERE, self.image(label="ai.image.model.raw", layers=1), self.config)
        assert (remote.layout, len(remote.files)) == ("image", 1)

    def test_what_the_base_image_brings_is_left_out(self):
        """A car: only layers from the first one that touches /models on can hold the model."""
        data = self.image("base", "more base", "COPY m.gguf /models/m.gguf", "LABEL", label="ai.image.model.car")
        assert len(read_manifest(HERE, data, self.config).files) == 2

    def test_without_a_history_all_layers_are_looked_at(self):
        data = self.image("squashed", label="ai.image.model.car", layers=3)
        assert len(read_manifest(HERE, data, self.config).files) == 3

    def test_a_model_image_without_the_label_is_told_by_its_history(self):
        assert len(read_manifest(HERE, self.image("base", "COPY data /models # buildkit"), self.config).files) == 1

    def test_any_other_image_is_no_model(self):
        with pytest.raises(NotFound, match="container image without a model"):
            read_manifest(HERE, self.image("base", "nginx"), self.config)


class TestOllama:
    def test_its_layers_get_names_that_engines_know(self):
        layers = [
            descriptor(kind.encode(), f"application/vnd.ollama.image.{kind}") for kind in ("model", "projector", "template", "license")
        ]
        remote = read_manifest(parse("ollama://smollm2"), manifest("application/vnd.docker.container.image.v1+json", *layers))
        assert [file.path for file in remote.files] == ["model.gguf", "mmproj.gguf", "template", "LICENSE"]

    def test_layers_that_only_ollama_reads_are_refused(self):
        with pytest.raises(Refused, match="only Ollama"):
            read_manifest(HERE, manifest("x", descriptor(b"w", "application/vnd.ollama.image.tensor")))


class TestIndex:
    def index(self, *platforms: dict[str, str]) -> bytes:
        entries = [descriptor(bytes([n]), OCI_MANIFEST) | {"platform": platform} for n, platform in enumerate(platforms)]
        return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()

    def test_the_platform_that_fits_else_the_first(self):
        index = self.index({"architecture": "arm64", "os": "linux"}, {"architecture": "amd64", "os": "linux"})
        assert is_index(index)
        assert pick(index, "amd64").digest == digest_of(b"\x01")
        assert pick(index, "riscv64").digest == digest_of(b"\x00")

    def test_attestations_are_no_models(self):
        with pytest.raises(NotFound):
            pick(self.index({"architecture": "unknown", "os": "unknown"}))

    def test_a_manifest_is_no_index(self):
        assert not is_index(modelpack(named(b"w", "m.gguf")))


class TestPoisoned:
    @pytest.mark.parametrize(
        "path",
        [
            "../evil.gguf",
            "/etc/evil.gguf",
            "a/../../evil.gguf",
            "a\\..\\evil.gguf",
            "C:/x.gguf",
            "x\0.gguf",
            "x\n.gguf",
            "\u202ex.gguf",
            "a" * 300,
            ".",
            "/".join("a" * 20) + ".gguf",
        ],
    )
    def test_unsafe_names_are_refused(self, path: str):
        for data in (
            modelpack(named(b"w", path)),
            manifest("application/vnd.docker.ai.model.config.v1+json", named(b"w", path, DOCKER_GGUF[0])),
        ):
            with pytest.raises(Refused):
                read_manifest(HERE, data)

    @pytest.mark.parametrize(
        "digest",
        ["", "sha256:abc", "md5:" + "a" * 32, "sha256:" + "A" * 64, "sha256:../../../../etc/passwd", "sha256:" + "a" * 64 + "\n", None, 5],
    )
    def test_digests_that_are_none_are_refused(self, digest: object):
        with pytest.raises(Refused, match="digest"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf") | {"digest": digest}))

    @pytest.mark.parametrize("size", [-1, 1.5, "5", None, True])
    def test_sizes_that_are_none_are_refused(self, size: object):
        with pytest.raises(Refused, match="size"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf") | {"size": size}))

    def test_more_bytes_than_allowed_are_refused_before_anything_is_fetched(self):
        with pytest.raises(Refused, match="nothing was fetched"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf") | {"size": 11 << 30}), bytes_max=10 << 30)

    def test_one_digest_with_two_sizes_is_refused(self):
        with pytest.raises(Refused, match="two sizes"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf"), named(b"w", "n.gguf") | {"size": 5}))

    def test_two_files_of_one_name_are_refused(self):
        with pytest.raises(Refused, match="two files"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf"), named(b"v", "./m.gguf")))

    def test_a_name_that_is_a_folder_too_is_refused(self):
        with pytest.raises(Refused, match="both a file and a folder"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf"), named(b"v", "m.gguf/x.gguf")))

    def test_too_many_files_are_refused(self):
        layer = named(b"w", "m.gguf")
        with pytest.raises(Refused, match="limit"):
            read_manifest(HERE, modelpack(*[{**layer, "annotations": {PATH_ANNOTATION: f"{n}.gguf"}} for n in range(5000)]))

    def test_a_manifest_without_end_is_refused(self):
        with pytest.raises(Refused, match="limit"):
            read_manifest(HERE, b" " * (MANIFEST_BYTES_MAX + 1))

    def test_a_configuration_that_claims_too_much_is_refused(self):
        document = json.loads(modelpack(named(b"w", "m.gguf")))
        document["config"]["size"] = 1 << 40
        with pytest.raises(Refused, match="configuration"):
            read_config_descriptor(json.dumps(document).encode())

    def test_a_manifest_that_is_not_what_its_digest_says(self):
        with pytest.raises(Damaged, match="pull again"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf")), digest="sha256:" + "0" * 64)

    def test_a_configuration_that_is_not_what_its_digest_says(self):
        with pytest.raises(Damaged, match="configuration"):
            read_manifest(HERE, modelpack(named(b"w", "m.gguf"), config=CONFIG), b"{ }")

    def test_missing_parts_of_a_split_model(self):
        with pytest.raises(NotFound, match=r"m-00002-of-00002\.gguf"):
            read_manifest(HERE, modelpack(named(b"w", "m-00001-of-00002.gguf")))

    def test_no_weights(self):
        with pytest.raises(NotFound, match="no weights"):
            read_manifest(HERE, modelpack(named(b"w", "README.md", RAW)))

    @pytest.mark.parametrize(
        "data", [b"", b"<html>", b"[]", b"{}", b"[" * 100_000, b'{"schemaVersion": 1}', b"\xff\xfe", b'{"schemaVersion": 2, "layers": 5}']
    )
    def test_what_is_no_manifest(self, data: bytes):
        with pytest.raises(Refused):
            read_manifest(HERE, data)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "config",
                            "layers",
                            "digest",
                            "size",
                            "mediaType",
                            "annotations",
                            "schemaVersion",
                            PATH_ANNOTATION,
                            "history",
                            "Labels",
                        ]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_any_document_is_read_or_refused(self, document: object):
        """Nothing but a StoreError is ever raised, whatever the types."""
        base = json.loads(modelpack(named(b"w", "m.gguf")))
        for data in (document, {**base, **document} if isinstance(document, dict) else document):
            text = json.dumps(data).encode()
            try:
                read_manifest(HERE, text, text)
            except StoreError:
                continue

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["config", "descriptor", "licenses", "history", "created_by", "Labels", "format", "paramSize", "context_size"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_any_configuration_will_do(self, document: object):
        """A configuration only describes: a broken one never stands in the way."""
        config = json.dumps(document).encode()
        assert read_manifest(HERE, modelpack(named(b"w", "m.gguf"), config=config), config).files[0].path == "m.gguf"
