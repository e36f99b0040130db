"""The hub: which files of a repository make a model, and a server that answers as it does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from aiohttp import web
from yarl import URL

from greenroom.store.facts import Damaged, NotFound, Refused, StoreError
from greenroom.store.hub import Entry, choose, endpoint_of, entries_of, quant_in, token_of
from greenroom.store.library import Library
from greenroom.store.pull import Options, Puller
from greenroom.store.references import parse

from .models import digest, gguf, safetensors
from .servers import Fake, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_SECRETSECRET"
GGUF_REPO = (
    "README.md",
    ".gitattributes",
    "LICENSE",
    "imatrix.gguf",
    "tiny-Q2_K.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-UD-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny-IQ4_XS.gguf",
    "Q8_0/tiny-Q8_0-00001-of-00002.gguf",
    "Q8_0/tiny-Q8_0-00002-of-00002.gguf",
    "mmproj-tiny-F16.gguf",
    "mmproj-tiny-Q8_0.gguf",
)
TENSOR_REPO = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "tf_model.h5",
    "onnx/model.onnx",
    "original/params.json",
    "runs/x/events",
    ".gitattributes",
    "preview.png",
    "README.md",
)


def chosen(names: tuple[str, ...], text: str) -> list[str]:
    return [entry.path for entry in choose([Entry(name, 10) for name in names], parse(text))]


@pytest.mark.parametrize(
    ("tag", "names"),
    [
        ("", ["tiny-Q4_K_M.gguf", "mmproj-tiny-F16.gguf", "LICENSE"]),
        (":q4_k_m", ["tiny-Q4_K_M.gguf", "mmproj-tiny-F16.gguf", "LICENSE"]),
        (":UD-Q4_K_M", ["tiny-UD-Q4_K_M.gguf", "mmproj-tiny-F16.gguf", "LICENSE"]),
        (":Q8_0", ["Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00002-of-00002.gguf", "mmproj-tiny-F16.gguf", "LICENSE"]),
        (":tiny-Q2_K.gguf", ["tiny-Q2_K.gguf", "mmproj-tiny-F16.gguf", "LICENSE"]),
        (
            ":Q8_0/tiny-Q8_0-00002-of-00002.gguf",
            ["Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00002-of-00002.gguf", "mmproj-tiny-F16.gguf", "LICENSE"],
        ),
        (":mmproj-tiny-Q8_0.gguf", ["mmproj-tiny-Q8_0.gguf", "LICENSE"]),
    ],
)
def test_a_gguf_with_all_that_belongs_to_it(tag: str, names: list[str]) -> None:
    """Q4_K_M where nothing is said; split ones whole; one projector taken along."""
    assert chosen(GGUF_REPO, f"hf://org/tiny-GGUF{tag}") == names


def test_a_repository_of_safetensors_without_what_is_there_twice() -> None:
    kept = ["README.md", *TENSOR_REPO[3:4], *TENSOR_REPO[:2], *TENSOR_REPO[4:7], "tokenizer.json"]
    assert sorted(chosen(TENSOR_REPO, "hf://org/tiny")) == sorted(kept)
    assert sorted(chosen((*TENSOR_REPO, "tiny-Q4_K_M.gguf"), "hf://org/tiny:safetensors")) == sorted(kept)
    assert chosen((*TENSOR_REPO, "tiny-Q4_K_M.gguf"), "hf://org/tiny") == ["tiny-Q4_K_M.gguf"]


def test_what_cannot_be_chosen_says_what_there_is() -> None:
    with pytest.raises(NotFound, match=r"'Q5_1'; it has .*tiny-Q2_K"):
        chosen(GGUF_REPO, "hf://org/tiny:Q5_1")
    with pytest.raises(NotFound, match="no GGUF model at all"):
        chosen(TENSOR_REPO, "hf://org/tiny:Q4_K_M")
    with pytest.raises(StoreError, match="any of a-Q4_K_M, b-Q4_K_M"):
        chosen(("a-Q4_K_M.gguf", "b-Q4_K_M.gguf"), "hf://org/two")
    with pytest.raises(NotFound, match="pickled"):
        chosen(("pytorch_model.bin", "config.json"), "hf://org/old")
    with pytest.raises(NotFound, match="lacks 1 parts"):
        chosen(("x-Q4_0-00001-of-00002.gguf",), "hf://org/half")


@pytest.mark.parametrize(
    ("path", "quant", "is_in"),
    [
        ("m-Q4_K_M.gguf", "Q4_K_M", True),
        ("m.q4_k_m.gguf", "Q4_K_M", True),
        ("m-Q4_K_M.gguf", "Q4_K", False),
        ("m-IQ4_K.gguf", "Q4_K", False),
        ("Q4_0/m-00001-of-00002.gguf", "Q4_0", True),
        ("m-Q4_0_4_4.gguf", "Q4_0", False),
        ("m-BF16.gguf", "F16", False),
    ],
)
def test_quantisations_are_whole_words(path: str, quant: str, is_in: bool) -> None:
    assert quant_in(path, quant) == is_in


def test_lists_that_lie_are_refused() -> None:
    reference = parse("hf://org/x")
    with pytest.raises(Refused, match="leads out"):
        entries_of({"siblings": [{"rfilename": "../x.gguf", "size": 1}]}, reference)
    with pytest.raises(Refused, match="limit"):
        entries_of({"siblings": [{"rfilename": f"{number}", "size": 1} for number in range(5000)]}, reference)
    for info in ({}, {"siblings": 5}, {"siblings": [{}]}, {"siblings": ["x"]}):
        with pytest.raises(Damaged):
            entries_of(info, reference)


def test_tokens_and_endpoints(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_file\n")
    assert token_of({"HF_TOKEN": " hf_x "}) == "hf_x"
    assert token_of({"HF_HOME": str(tmp_path)}) == "hf_file"
    assert token_of({"HF_TOKEN": "bad\nheader: x", "HF_HOME": str(tmp_path / "none")}) == ""
    assert endpoint_of({}) == URL("https://huggingface.co")
    for written in ("ftp://x", "nonsense", "https://user:pw@h.example"):
        with pytest.raises(StoreError, match="HF_ENDPOINT"):
            endpoint_of({"HF_ENDPOINT": written})


class Hub(Fake):
    """A hub, and beside it the host that has its bytes."""

    files: dict[str, bytes]
    cdn: Fake
    commit = COMMIT

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(dict(request.headers))
        self.asked.append((request.method, request.path, request.headers.get("Range", "")))
        if request.path.startswith("/api/models/org/"):
            return self._info(request)
        path = request.path.partition(f"/resolve/{self.commit}/")[2]
        data = self.files.get(path)
        if data is None:
            return web.Response(status=404)
        if path.endswith((".gguf", ".safetensors")):
            return web.Response(
                status=302, headers={"Location": f"http://{self.cdn.host}/v2/x/blobs/{digest(data)}?X-Amz-Signature=HIDDEN"}
            )
        return web.Response(body=data, headers={"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _info(self, request: web.Request) -> web.Response:
        if request.path.endswith("/gated/revision/main") and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Repository not found"}, status=401, headers={"X-Error-Code": "RepoNotFound"})
        siblings = []
        for name, data in self.files.items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith((".gguf", ".safetensors")):
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        info: Mapping[str, object] = {"id": "org/tiny", "sha": self.commit, "cardData": {"license": "apache-2.0"}, "siblings": siblings}
        return web.json_response(info)


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    hub = Hub()
    hub.files = {"README.md": b"# tiny", "tiny-Q4_K_M.gguf": gguf(100_000), "tiny-Q8_0.gguf": gguf(200_000, seed=1), "LICENSE": b"free"}
    async with serving(Fake()) as hub.cdn, serving(hub):
        hub.cdn.blobs = {digest(data): data for data in hub.files.values()}
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.host}")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def options(hub: Hub) -> Options:
    return Options(allowed=(hub.cdn.host,))


async def test_a_model_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Its commit is held on to, its digest checked, and the token goes to the hub alone."""
    stored = await Puller(Library(tmp_path), options(hub)).pull(parse("hf://org/tiny"))

    assert stored.entry.read_bytes() == hub.files["tiny-Q4_K_M.gguf"]
    assert sorted(file.path for file in stored.files) == ["LICENSE", "tiny-Q4_K_M.gguf"]
    assert stored.description.licenses == ("apache-2.0",)
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for headers in hub.seen)
    assert hub.cdn.seen
    assert [headers for headers in hub.cdn.seen if TOKEN in json.dumps(dict(headers))] == []


async def test_a_host_that_the_hub_redirects_into_the_house_is_refused(hub: Hub, tmp_path: Path) -> None:
    """And the signed address of the redirect is not in the message."""
    with pytest.raises(Refused, match="refused") as fault:
        await Puller(Library(tmp_path)).pull(parse("hf://org/tiny"))
    assert "HIDDEN" not in str(fault.value)
    assert hub.cdn.asked == []


async def test_other_bytes_than_the_hub_lists_are_thrown_away(hub: Hub, tmp_path: Path) -> None:
    hub.cdn.other_bytes = True
    with pytest.raises(Damaged, match="promised"):
        await Puller(Library(tmp_path), options(hub)).pull(parse("hf://org/tiny"))
    assert Library(tmp_path).all() == ()


async def test_a_folder_of_safetensors(hub: Hub, tmp_path: Path) -> None:
    weights = safetensors()
    config = b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    hub.files = {"model.safetensors": weights, "config.json": config, "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"}
    hub.cdn.blobs = {digest(weights): weights}
    stored = await Puller(Library(tmp_path), options(hub)).pull(parse("hf://org/tiny@v1.0"))

    assert {path.name for path in stored.folder.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (stored.folder / "config.json").read_bytes() == config
    assert hub.asked[0][1] == "/api/models/org/tiny/revision/v1.0"


async def test_gated_models_want_a_token(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await Puller(Library(tmp_path / "a"), options(hub)).pull(parse("hf://org/gated"))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    with pytest.raises(NotFound, match="HF_TOKEN"):
        await Puller(Library(tmp_path / "b"), options(hub)).pull(parse("hf://org/gated"))
