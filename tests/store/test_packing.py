"""Layouts that are written: read back by ourselves and by the tools that others use, the same bytes every time."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from greenroom.store.facts import Refused, Remote, Stored
from greenroom.store.layouts import OCI_INDEX, OCI_MANIFEST, digest_of, read_manifest
from greenroom.store.library import Library
from greenroom.store.packing import Packed, pack, read_layer
from greenroom.store.references import parse
from tests.validators import tool

from .models import gguf, safetensors

LAYOUTS = ("modelpack", "docker", "image")
MODELS: Mapping[str, Mapping[str, bytes]] = {
    "one": {"tiny.gguf": gguf(70_000)},
    "split": {f"big-0000{part}-of-00003.gguf": gguf(30_000, seed=part) for part in (1, 2, 3)},
    "seeing": {
        "m.gguf": gguf(9000),
        "mmproj-m.gguf": gguf(5000, fields={"general.type": "mmproj", "general.architecture": "clip"}),
        "LICENSE": b"MIT",
    },
    "folder": {"model.safetensors": safetensors(), "config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "sub/x.json": b"{}"},
}


def adopted(library: Library, folder: Path, files: Mapping[str, bytes]) -> Stored:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return library.adopt(parse(str(folder)))


def into(library: Library, remote: Remote, blobs: Mapping[str, bytes]) -> Stored:
    """Pull without a registry."""
    with library.pulling(remote) as pulling:
        for file in pulling.wanted():
            partial = pulling.begin(file)
            assert partial is not None
            with partial:
                for offset, length in partial.missing():
                    with partial.filling(offset, length) as filler:
                        filler.write(blobs[file.digest][offset : offset + length])
                pulling.finish(partial, file)
        return pulling.publish(now=1.0)


def contents(stored: Stored) -> dict[str, bytes]:
    return {file.path: (stored.folder / file.path).read_bytes() for file in stored.files}


def blobs_of(packed: Packed) -> dict[str, bytes]:
    return {layer.digest: b"".join(read_layer(layer)) for layer in (*packed.layers, packed.config)}


def oci_layout(folder: Path, packed: Packed, tag: str = "v1") -> Path:
    """What we would push, as an OCI layout on disk: the tools read it as they read a registry."""
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for digest, data in {**blobs_of(packed), packed.digest: packed.manifest}.items():
        (folder / "blobs" / "sha256" / digest.removeprefix("sha256:")).write_bytes(data)
    entry = {"mediaType": OCI_MANIFEST, "digest": packed.digest, "size": len(packed.manifest)}
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return folder


def from_layout(folder: Path, reference: str = "oci://h.example/m:v1") -> tuple[Remote, dict[str, bytes]]:
    """A model that others wrote into an OCI layout."""
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (folder / "blobs" / "sha256").iterdir()}
    manifest = blobs[json.loads((folder / "index.json").read_bytes())["manifests"][0]["digest"]]
    config = blobs[json.loads(manifest)["config"]["digest"]]
    return read_manifest(parse(reference), manifest, config), blobs


def run(*argv: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=110, check=False, cwd=cwd)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "store")


class TestOurselves:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("model", MODELS)
    def test_what_is_written_is_read_back_byte_for_byte(self, tmp_path: Path, library: Library, layout: str, model: str):
        stored = adopted(library, tmp_path / "model", MODELS[model])
        packed = pack(stored, layout)
        remote = read_manifest(parse(f"oci://h.example/{model}:v1"), packed.manifest, b"".join(packed.config.pieces), packed.digest)  # type: ignore[arg-type]
        other = into(Library(tmp_path / "other"), remote, blobs_of(packed))
        assert contents(other) == dict(MODELS[model])
        assert (other.layout, other.digest, other.entry.name) == (layout, packed.digest, stored.entry.name)
        assert {file.path: file.role for file in other.files} == {file.path: file.role for file in stored.files}

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_same_model_gives_the_same_digest(self, tmp_path: Path, layout: str):
        """Wherever and whenever it was taken in."""
        digests = {
            pack(adopted(Library(tmp_path / f"store{n}"), tmp_path / f"model{n}" / "m", MODELS["seeing"]), layout).digest for n in range(2)
        }
        assert len(digests) == 1

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layers_are_what_they_say(self, tmp_path: Path, library: Library, layout: str):
        """Sizes and digests of all pieces, also when reading begins in the middle of one."""
        packed = pack(adopted(library, tmp_path / "model", MODELS["seeing"]), layout)
        for layer in (*packed.layers, packed.config):
            data = b"".join(read_layer(layer))
            assert (len(data), digest_of(data)) == (layer.size, layer.digest)
            for offset in (1, 511, 512, 513, len(data) - 1, len(data)):
                assert b"".join(read_layer(layer, offset)) == data[offset:]

    @pytest.mark.parametrize("layout", ["modelpack", "docker"])
    def test_what_was_pulled_is_pushed_with_its_own_manifest(self, tmp_path: Path, library: Library, layout: str):
        """So that signatures still hold: even where another tool would write that manifest differently."""
        packed = pack(adopted(library, tmp_path / "model", MODELS["one"]), layout)
        manifest = json.dumps(json.loads(packed.manifest) | {"annotations": {"made": "elsewhere"}}, indent=3).encode()
        config = b"".join(read_layer(packed.config))
        stored = into(Library(tmp_path / "other"), read_manifest(parse("oci://h.example/m:v1"), manifest, config), blobs_of(packed))
        assert pack(stored).manifest == manifest
        assert pack(stored, layout).manifest == manifest
        assert pack(stored, "image").layout == "image"

    def test_docker_models_are_gguf_or_safetensors(self, tmp_path: Path, library: Library):
        stored = adopted(library, tmp_path / "model", {"pytorch_model.bin": b"x", "config.json": b"{}"})
        with pytest.raises(Refused, match="push it as modelpack"):
            pack(stored, "docker")


class TestOtherTools:
    """Real skopeo, umoci, buildah and oras, on an OCI layout on disk."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_skopeo_copies_it_unchanged(self, tmp_path: Path, library: Library, layout: str):
        packed = pack(adopted(library, tmp_path / "model", MODELS["split"]), layout)
        source = oci_layout(tmp_path / "oci", packed)
        run(tool("skopeo"), "copy", "--insecure-policy", "--preserve-digests", f"oci:{source}:v1", f"oci:{tmp_path / 'copy'}:v1")
        remote, blobs = from_layout(tmp_path / "copy")
        assert remote.digest == packed.digest
        assert contents(into(Library(tmp_path / "other"), remote, blobs)) == dict(MODELS["split"])

    def test_what_skopeo_compresses_on_the_way_is_read(self, tmp_path: Path, library: Library):
        source = oci_layout(tmp_path / "oci", pack(adopted(library, tmp_path / "model", MODELS["split"]), "image"))
        run(tool("skopeo"), "copy", "--insecure-policy", f"oci:{source}:v1", f"oci:{tmp_path / 'copy'}:v1")
        remote, blobs = from_layout(tmp_path / "copy")
        assert all(file.media_type.endswith("+gzip") for file in remote.files)
        assert contents(into(Library(tmp_path / "other"), remote, blobs)) == dict(MODELS["split"])

    def test_umoci_unpacks_the_image(self, tmp_path: Path, library: Library):
        source = oci_layout(tmp_path / "oci", pack(adopted(library, tmp_path / "model", MODELS["split"]), "image"))
        run(tool("umoci"), "unpack", "--rootless", "--image", f"{source}:v1", tmp_path / "bundle")
        models = tmp_path / "bundle" / "rootfs" / "models"
        assert {name: (models / name).read_bytes() for name in MODELS["split"]} == dict(MODELS["split"])
        assert os.readlink(models / "model.file") == "big-00001-of-00003.gguf"

    @pytest.mark.parametrize("layout", ["modelpack", "docker"])
    def test_oras_pulls_the_files_under_their_names(self, tmp_path: Path, library: Library, layout: str):
        source = oci_layout(tmp_path / "oci", pack(adopted(library, tmp_path / "model", MODELS["seeing"]), layout))
        run(tool("oras"), "pull", "--oci-layout", f"{source}:v1", "--output", tmp_path / "out")
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == dict(MODELS["seeing"])

    def test_what_oras_pushes_is_read(self, tmp_path: Path, library: Library):
        (tmp_path / "m.gguf").write_bytes(MODELS["one"]["tiny.gguf"])
        run(tool("oras"), "push", "--oci-layout", f"{tmp_path / 'oci'}:v1", "m.gguf:application/octet-stream", cwd=tmp_path)
        remote, blobs = from_layout(tmp_path / "oci")
        assert contents(into(library, remote, blobs)) == {"m.gguf": MODELS["one"]["tiny.gguf"]}

    @pytest.mark.parametrize("compress", ["--disable-compression", ""])
    def test_what_buildah_makes_of_a_ramalama_image_is_read(self, tmp_path: Path, library: Library, compress: str):
        """Raw: from scratch, /models/FILE and the link beside it, layers plain or gzip."""
        data = MODELS["one"]["tiny.gguf"]
        (tmp_path / "tiny.gguf").write_bytes(data)
        (tmp_path / "model.file").symlink_to("tiny.gguf")
        buildah = (tool("buildah"), "--root", tmp_path / "root", "--runroot", tmp_path / "run", "--storage-driver", "vfs")
        container = run(*buildah, "from", "scratch").strip()
        run(*buildah, "copy", container, tmp_path / "tiny.gguf", "/models/tiny.gguf")
        mounted = Path(run(*buildah, "mount", container).strip())
        (mounted / "models" / "model.file").symlink_to("tiny.gguf")
        run(*buildah, "config", "--label", "org.containers.type=ai.image.model.raw", container)
        run(*buildah, "commit", "--disable-compression=false", container, "model")
        run(*buildah, "umount", container)
        run(*buildah, "push", *([compress] if compress else []), "model", f"oci:{tmp_path / 'oci'}:v1")
        shutil.rmtree(tmp_path / "root")
        remote, blobs = from_layout(tmp_path / "oci")
        stored = into(library, remote, blobs)
        assert (contents(stored), stored.layout, stored.entry.name) == ({"tiny.gguf": data}, "image", "tiny.gguf")


class TestImagesOfOthers:
    """Layers by hand: what no tool here makes."""

    def image(self, *layers: bytes) -> tuple[Remote, dict[str, bytes]]:
        from .models import descriptor

        kind = "application/vnd.oci.image.layer.v1.tar"
        config = json.dumps({"config": {"Labels": {"org.containers.type": "ai.image.model.car"}}}).encode()
        entries = [descriptor(layer, kind + ("+gzip" if layer[:2] == b"\x1f\x8b" else "")) for layer in layers]
        head = descriptor(config, "application/vnd.oci.image.config.v1+json")
        manifest = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": head, "layers": entries}).encode()
        blobs = {digest_of(layer): layer for layer in layers}
        return read_manifest(parse("oci://h.example/car:v1"), manifest, config), blobs

    def test_later_layers_win_and_whiteouts_take_away(self, library: Library):
        from .test_tars import archive

        old, new = gguf(3000, seed=1), gguf(3000, seed=2)
        base = gzip.compress(
            archive(("etc/passwd", b"root"), ("usr/bin/sh", "/bin/busybox"), ("models/a.gguf", old), ("models/b.gguf", old))
        )
        remote, blobs = self.image(base, archive(("models/.wh.b.gguf", b""), ("models/a.gguf", new)))
        assert contents(into(library, remote, blobs)) == {"a.gguf": new}

    def test_an_opaque_folder_hides_what_was_below(self, library: Library):
        from .test_tars import archive

        remote, blobs = self.image(
            archive(("models/a.gguf", gguf(3000))), archive(("models/.wh..wh..opq", b""), ("models/c.gguf", gguf(99)))
        )
        assert list(contents(into(library, remote, blobs))) == ["c.gguf"]

    @pytest.mark.parametrize(
        "entry",
        [
            ("models/../../evil.gguf", b"x"),
            ("/models/evil.gguf", b"x"),
            ("models/x.gguf", "/etc/passwd"),
            ("models/x.gguf", "../../etc/passwd"),
        ],
    )
    def test_what_leads_out_is_refused_and_leaves_nothing(self, tmp_path: Path, library: Library, entry: tuple[str, bytes | str]):
        from .test_tars import archive

        remote, blobs = self.image(archive(("models/a.gguf", gguf(3000)), entry))
        with pytest.raises(Refused):
            into(library, remote, blobs)
        assert library.all() == ()
        assert [path for path in library.root.rglob("*") if path.is_file() and "locks" not in path.parts] == []
        assert not (tmp_path / "evil.gguf").exists()

    def test_the_link_tells_which_of_several_models_is_meant(self, library: Library):
        from .test_tars import archive

        remote, blobs = self.image(
            archive(("models/a.gguf", gguf(3000)), ("models/b.gguf", gguf(9000)), ("models/model.file", "/models/a.gguf"))
        )
        assert into(library, remote, blobs).entry.name == "a.gguf"

    def test_devices_are_refused(self, library: Library):
        from greenroom.store.tars import END, header_of

        remote, blobs = self.image(header_of("models/x.gguf", kind=b"4") + END)
        with pytest.raises(Refused, match="device"):
            into(library, remote, blobs)

    def test_the_layer_itself_is_not_kept_twice(self, library: Library):
        """Once the model is out of its layer, the layer is gone: one copy on disk."""
        from .test_tars import archive

        data = gguf(500_000)
        remote, blobs = self.image(archive(("models/a.gguf", data)))
        into(library, remote, blobs)
        assert [path.name for path in (library.root / "blobs" / "sha256").iterdir()] == [hashlib.sha256(data).hexdigest()]
