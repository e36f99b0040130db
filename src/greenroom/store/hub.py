"""Models of the Hugging Face hub, or one that speaks as it does: which files of a repository make a model, and where they are."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from yarl import URL

from .facts import Damaged, Description, ModelFile, NotFound, Reference, Refused, Remote, StoreError
from .layouts import FILES_MAX, check_paths
from .paths import safe_path, shown
from .ranges import Opener, Stretch, bytes_of, range_headers, status_error, stretch
from .registry import is_local
from .roles import missing_parts, role_of, stem_of
from .web import Web, words

ENDPOINT = "https://huggingface.co"
INFO_BYTES_MAX = 32 << 20  # of the list of files of a repository
TOKEN_BYTES_MAX = 4096
SHOWN_MAX = 8
SHA256 = re.compile(r"[0-9a-f]{64}")
# Where nothing is said: small enough for most, good enough for most.
QUANTS = ("Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_XS", "Q4_1", "MXFP4", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q3_K_M", "BF16", "F16", "FP16", "F32")
PROJECTORS = ("F16", "BF16", "Q8_0", "F32")
WHOLE = "safetensors"  # as a quantisation: the repository's safetensors, where it has GGUF files, too
NOT_A_MODEL = re.compile(r"imatrix", re.IGNORECASE)
SKIPPED_ENDINGS = (
    *(".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite", ".mlmodel", ".gguf", ".pkl"),
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".mp4", ".pdf", ".zip", ".parquet"),
)
SKIPPED_FOLDERS = frozenset({"onnx", "openvino", "coreml", "runs", "original", "metal", "figures", "assets", "images", ".git", "gguf"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a repository."""

    path: str
    size: int
    sha256: str = ""  # of those that are kept apart (LFS, Xet); small texts have none


@dataclass(slots=True)
class Hub:
    """`token` is sent to the endpoint alone."""

    web: Web
    endpoint: URL = field(default_factory=lambda: endpoint_of(os.environ))
    token: str = field(default_factory=lambda: token_of(os.environ), repr=False)

    async def resolve(self, reference: Reference) -> Remote:
        """Raises NotFound, Refused (gated, pickled weights, unsafe names), Unreachable, StoreError (several models fit)."""
        info = await self._info(reference)
        entries = entries_of(info, reference)
        chosen = choose(entries, reference)
        files = tuple(
            ModelFile(entry.path, entry.size, f"sha256:{entry.sha256}" if entry.sha256 else "", role_of(entry.path)) for entry in chosen
        )
        commit = info.get("sha")
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise StoreError(f"{self.endpoint.host} tells no commit for {reference.path}: it does not answer as the hub does")
        return Remote(reference, "", "files", files, _description(info, commit))

    def opener(self, remote: Remote, file: ModelFile) -> Opener:
        return lambda offset, length: self._stretch(remote, file, offset, length)

    def key(self, remote: Remote, file: ModelFile) -> str:
        return str(remote.description.annotations["commit"])

    def read(self, remote: Remote, file: ModelFile, offset: int, length: int) -> AsyncIterator[bytes]:
        return bytes_of(self.opener(remote, file), offset, length)

    async def close(self) -> None:
        await self.web.close()

    @asynccontextmanager
    async def _stretch(self, remote: Remote, file: ModelFile, offset: int, length: int) -> AsyncIterator[Stretch]:
        commit = remote.description.annotations["commit"]
        url = self._url(f"{remote.reference.path}/resolve/{commit}/{quote(file.path)}")
        headers = {**self._headers(), **range_headers(offset, length, file.size)}
        async with (
            self.web.open("GET", url, headers=headers) as answer,
            stretch(answer, offset, length, file.size, f"{file.path} of {remote.reference.path}") as found,
        ):
            yield found

    async def _info(self, reference: Reference) -> Mapping[str, Any]:
        revision = quote(reference.digest or "main", safe="")
        url = self._url(f"api/models/{reference.path}/revision/{revision}?blobs=true")
        text = await self.web.text("GET", url, headers=self._headers(), bytes_max=INFO_BYTES_MAX)
        if text.status in (401, 403, 404):
            hint = "check the name" + ("" if self.token else ", or set HF_TOKEN if it is private or gated")
            raise NotFound(
                f"{self.endpoint.host} shows no {reference.path}{'@' + reference.digest if reference.digest else ''} to us: {hint}"
            )
        if text.status != 200:
            raise status_error(text.status, text.url, reference.path, words(text))
        try:
            info = json.loads(text.data)
        except (ValueError, RecursionError):
            info = None
        if not isinstance(info, dict):
            raise StoreError(f"{self.endpoint.host} does not answer as the hub does: check HF_ENDPOINT")
        return info

    def _url(self, path: str) -> URL:
        return URL(f"{str(self.endpoint).rstrip('/')}/{path}", encoded=True)

    def _headers(self) -> dict[str, str]:
        safe = self.endpoint.scheme == "https" or is_local(self.endpoint.host or "")
        return {"Authorization": f"Bearer {self.token}"} if self.token and safe else {}


def endpoint_of(env: Mapping[str, str]) -> URL:
    """HF_ENDPOINT, or the hub itself.  Raises StoreError when it is no web address."""
    written = env.get("HF_ENDPOINT", "").strip() or ENDPOINT
    try:
        url = URL(written)
    except ValueError:
        url = URL()
    if url.scheme not in ("https", "http") or not url.host or url.user:
        raise StoreError("HF_ENDPOINT is no address of a hub: write https://HOST")
    return url


def token_of(env: Mapping[str, str]) -> str:
    """HF_TOKEN, or what `hf auth login` has kept; "" = none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := env.get(name, "").strip():
            return token if token.isprintable() and token.isascii() else ""
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    try:
        token = Path(env.get("HF_TOKEN_PATH") or home / "token").read_bytes()[:TOKEN_BYTES_MAX].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return token if token.isprintable() else ""


def entries_of(info: Mapping[str, Any], reference: Reference) -> tuple[Entry, ...]:
    """The files that the hub lists.  Raises Refused for unsafe names, Damaged for a list that is none."""
    siblings = info.get("siblings")
    if not isinstance(siblings, list):
        raise Damaged(f"the hub lists no files for {reference.path}: it does not answer as the hub does")
    if len(siblings) > FILES_MAX:
        raise Refused(f"{reference.path} has {len(siblings):,} files; {FILES_MAX:,} are the limit")
    found = []
    for sibling in siblings:
        if not isinstance(sibling, dict) or not isinstance(sibling.get("rfilename"), str):
            raise Damaged(f"the hub lists a file of {reference.path} without a name")
        told = sibling.get("lfs")
        lfs: Mapping[str, Any] = told if isinstance(told, dict) else {}
        size, digest = lfs.get("size", sibling.get("size")), lfs.get("sha256", "")
        if not isinstance(size, int) or size < 0:
            continue  # not told: it cannot be fetched whole
        digest = digest if isinstance(digest, str) and SHA256.fullmatch(digest) else ""
        found.append(Entry(safe_path(sibling["rfilename"], what=reference.path), size, digest))
    check_paths([entry.path for entry in found], what=reference.path)
    return tuple(found)


def choose(entries: Sequence[Entry], reference: Reference) -> tuple[Entry, ...]:
    """The files that make the model: a GGUF with all its parts and its projector, or a repository of safetensors.

    Pure.  Raises NotFound (with what there is), StoreError where several fit.
    """
    tag = reference.tag
    by_path = {entry.path: entry for entry in entries}
    models = {path: entry for path, entry in by_path.items() if path.lower().endswith(".gguf") and not NOT_A_MODEL.search(path)}
    weights = [entry for path, entry in models.items() if role_of(path) in ("weights", "draft", "adapter")]
    if tag in by_path:
        named = by_path[tag]
        if not tag.lower().endswith(".gguf"):
            return (named,)
        parts = [entry for entry in models.values() if stem_of(entry.path) == stem_of(tag)]
        return _gguf(parts or [named], by_path, models, with_projector=role_of(tag) == "weights")
    if (weights and tag.lower() != WHOLE) or (tag and tag.lower() != WHOLE):
        return _gguf(_quantised([entry for entry in weights if role_of(entry.path) == "weights"], reference), by_path, models)
    return _repository(entries, reference)


def quant_in(path: str, quant: str) -> bool:
    """Whether a file is of this quantisation: Q4_K is not Q4_K_M, and not IQ4_K."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", path, re.IGNORECASE) is not None


def _quantised(weights: Sequence[Entry], reference: Reference) -> list[Entry]:
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in weights:
        groups[stem_of(entry.path)].append(entry)
    wanted = [reference.tag] if reference.tag else list(QUANTS)
    for quant in wanted:
        fits = sorted(stem for stem in groups if quant_in(stem, quant))
        plain = [stem for stem in fits if not re.search(rf"UD[-_]{re.escape(quant)}", stem, re.IGNORECASE)] or fits
        if len(plain) > 1:
            raise StoreError(f"{reference} may mean any of {_listed(plain)}: write one of them, hf://{reference.path}:{plain[0]}.gguf")
        if plain:
            return groups[plain[0]]
    if not reference.tag and len(groups) == 1:
        return next(iter(groups.values()))
    there = _listed(sorted(groups)) if groups else "no GGUF model at all"
    what = f"nothing of {shown(reference.tag)}" if reference.tag else "nothing of a usual quantisation"
    raise NotFound(f"{reference.path} has {what}; it has {there}")


def _gguf(
    parts: Sequence[Entry], by_path: Mapping[str, Entry], models: Mapping[str, Entry], *, with_projector: bool = True
) -> tuple[Entry, ...]:
    missing = missing_parts([entry.path for entry in parts])
    if missing:
        raise NotFound(f"the repository lacks {len(missing)} parts of a split model, {missing[0]} first")
    projectors = sorted(path for path in models if role_of(path) == "projector") if with_projector else []
    best = next((path for quant in PROJECTORS for path in projectors if quant_in(path, quant)), projectors[0] if projectors else "")
    licenses = [entry for path, entry in by_path.items() if "/" not in path and role_of(path) == "license"]
    return (*sorted(parts, key=lambda entry: entry.path), *([models[best]] if best else []), *licenses)


def _repository(entries: Sequence[Entry], reference: Reference) -> tuple[Entry, ...]:
    """All of it but what is there a second time in another form, pictures, and what other programs need."""
    tensors = [entry.path for entry in entries if entry.path.lower().endswith(".safetensors")]
    if not tensors:
        pickled = any(entry.path.lower().endswith((".bin", ".pt", ".pth")) for entry in entries)
        why = (
            "its weights are pickled, which can run code when they are read" if pickled else f"it has {_listed([e.path for e in entries])}"
        )
        raise NotFound(f"{reference.path} holds no GGUF and no safetensors: {why}")
    # Some publish the same weights once more in one piece.
    twice = any(re.match(r"model.*\.safetensors$", path) for path in tensors)
    kept = []
    for entry in entries:
        folder, name = entry.path.split("/")[0], entry.path.rsplit("/", 1)[-1].lower()
        skipped = name.endswith(SKIPPED_ENDINGS) or name.startswith(".") or (twice and re.match(r"consolidated.*\.safetensors", name))
        if not skipped and not ("/" in entry.path and folder in SKIPPED_FOLDERS):
            kept.append(entry)
    return tuple(sorted(kept, key=lambda entry: entry.path))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(shown(name)[1:-1] for name in names[:SHOWN_MAX]) + more


def _description(info: Mapping[str, Any], commit: str) -> Description:
    card = info.get("cardData")
    license_ = card.get("license") if isinstance(card, dict) else None
    licenses = license_ if isinstance(license_, list) else [license_]
    return Description(licenses=tuple(item[:100] for item in licenses if isinstance(item, str)), annotations={"commit": commit})
