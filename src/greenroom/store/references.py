"""Read and write the names of models: `oci://`, `hf://`, `ollama://`, `https://`, `file://`, and the short forms people type."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from .facts import SCHEMES, Reference, StoreError
from .paths import HIDDEN_CATEGORIES, safe_path, shown

REFERENCE_CHARS_MAX = 2048
HOST_CHARS_MAX = 253
REPOSITORY_CHARS_MAX = 255
PORT_MAX = 65535
MODEL_ID_CHARS_MAX = 80

ALIASES = {"docker": "oci", "huggingface": "hf"}
FORMS = "oci://HOST/REPO:TAG, hf://ORG/REPO, ollama://NAME, https://HOST/FILE.gguf or a path such as ./model.gguf"
SIGNED = frozenset({"oci", "ollama"})  # schemes of models that can be signed
DOCKER_HUB = "docker.io"
DOCKER_HUB_NAMES = frozenset({"index.docker.io", "registry-1.docker.io", "registry.hub.docker.com"})
HF_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
OLLAMA_HOSTS = frozenset({"ollama.com", "registry.ollama.ai", "www.ollama.com"})
OLLAMA_NAMESPACE = "library"
DEFAULT_TAG = "latest"
DEFAULT_PORTS = {"https": 443, "http": 80}

DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
REPOSITORY_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*\Z")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
HOST_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
HUB_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,95})\Z")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}\Z")
OLLAMA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}\Z")
USERINFO = re.compile(r"(^[A-Za-z]*:?/{0,3})[^/@\s]*:[^/@]*@(?!sha256:)|(//)[^/@]*@")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

# Of a name: what says how it was squeezed, not what it is.
QUANT = re.compile(
    r"(?:^|[-._])(?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|MXFP4(?:_MOE)?|NVFP4|TQ\d_\d|BF16|F16|FP16|F32|FP32|FP8|INT[48]|AWQ|GPTQ(?:-Int\d)?)$",
    re.IGNORECASE,
)
FILE_ENDING = re.compile(r"\.(?:gguf|safetensors|bin|tar|tgz|tar\.gz)$", re.IGNORECASE)
PART_ENDING = re.compile(r"-\d{5}-of-\d{5}$")
HUB_ENDING = re.compile(r"[-_.](?:i1-)?(?:GGUF|safetensors|MLX)$", re.IGNORECASE)
VERSION_TAG = re.compile(r"(?:latest|main|stable|v?\d+(?:\.\d+)*(?:-[0-9a-f]{7,})?|[0-9a-f]{7,64})$", re.IGNORECASE)


def parse(text: str) -> Reference:
    """A reference from what somebody wrote; raises StoreError with one sentence that says how to write it.

    Pure: relative paths are for `parse_here`.
    """
    _check_characters(text)
    match = SCHEME.match(text)
    if match is None:
        return _bare(text)
    written_scheme, rest = match[1].lower(), text[match.end() :]
    scheme = ALIASES.get(written_scheme, written_scheme)
    match scheme:
        case "oci":
            return _oci(_with_hub_host(rest) if written_scheme == "docker" else rest, text)
        case "hf":
            return _hub(rest, text)
        case "ollama":
            return _ollama(rest, text)
        case "https" | "http":
            return _url(scheme, text)
        case "file":
            return _file(unquote(rest), text)
    near = difflib.get_close_matches(scheme, [*SCHEMES, *ALIASES], n=1)
    hint = f"did you mean {near[0]}://{_cut(rest)}?" if near else f"write {FORMS}"
    raise StoreError(f"{masked(text)} begins with an unknown scheme {scheme}://: {hint}")


def parse_here(text: str, folder: Path | None = None) -> Reference:
    """As `parse`, and what exists as a file or folder (seen from `folder`) is one: `model.gguf`, `./models/x`, `~/x`."""
    if SCHEME.match(text) is None and text and "\0" not in text:
        path = Path(os.path.expanduser(text)) if text.startswith("~") else Path(folder or Path.cwd()) / text
        looks = text.startswith(("./", "../", "~", "/")) or text in (".", "..")
        if looks or os.path.exists(path):  # also false for what no file system can name
            return parse(os.path.abspath(path))
        first, slash, _ = text.partition("/")
        if slash and not _is_host(first) and (FILE_ENDING.search(text) or os.path.isdir(Path(folder or Path.cwd()) / first)):
            raise StoreError(f"there is no file {masked(text)} here: write the path of one, or where it comes from ({FORMS})")
    return parse(text)


def written(reference: Reference) -> str:
    """The canonical text; `parse` of it gives the reference again."""
    tag = f":{reference.tag}" if reference.tag else ""
    digest = f"@{reference.digest}" if reference.digest else ""
    match reference.scheme:
        case "file":
            return f"file://{quote(reference.path, safe='/:@!$&()*+,;=~')}"
        case "http" | "https":
            return f"{reference.scheme}://{reference.host}{reference.path}"
        case "hf":
            host = f"{reference.host}/" if reference.host else ""
            return f"hf://{host}{reference.path}{tag}{digest}"
        case "ollama":
            host = f"{reference.host}/" if reference.host else ""
            path = reference.path if host else reference.path.removeprefix(f"{OLLAMA_NAMESPACE}/")
            return f"ollama://{host}{path}{tag}{digest}"
    return f"oci://{reference.host}/{reference.path}{tag}{digest}"


def typed(reference: Reference) -> str:
    """The canonical text as one writes it in a shell."""
    return shlex.quote(written(reference))


def model_id(reference: Reference) -> str:
    """A short name to serve it by: `smollm2-135m-instruct`.  The same for the same reference; not unique, see `model_ids`."""
    return _safe(_stem(reference))[:MODEL_ID_CHARS_MAX].strip("-._") or "model"


def model_ids(references: Iterable[Reference]) -> dict[Reference, str]:
    """One name each, all different; those that would share one get their quantisation or tag, or the folder they are in, or a number."""
    references = list(dict.fromkeys(references))
    by_name: dict[str, list[Reference]] = {}
    for reference in references:
        by_name.setdefault(model_id(reference), []).append(reference)
    wanted: dict[Reference, str] = {}
    for name, alike in by_name.items():
        marked = [_joined(name, _distinction(one)) for one in alike]
        placed = [_joined(_folder(one), name) for one in alike]
        best = next((names for names in (marked, placed) if len(set(names)) == len(alike)), marked) if len(alike) > 1 else [name]
        wanted |= zip(alike, best, strict=True)
    names: dict[Reference, str] = {}
    for reference in references:
        name = free = wanted[reference]
        number = 2
        while free in names.values():
            free, number = f"{name}-{number}", number + 1
        names[reference] = free
    return names


def _joined(*parts: str) -> str:
    return "-".join(filter(None, map(_safe, parts)))


def _safe(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")


def _folder(reference: Reference) -> str:
    return reference.path.strip("/").rpartition("/")[0].rpartition("/")[2]


def file_name(reference: Reference) -> str:
    """The name of the file that a file or https reference points to; refuses one that is not safe."""
    path = reference.path if reference.scheme == "file" else unquote(urlsplit(reference.path).path)
    return safe_path(path.rsplit("/", 1)[-1], what=str(reference))


def is_digest(text: str) -> bool:
    """`sha256:` and 64 lower-case hexadecimal digits."""
    return DIGEST.match(text) is not None


def _bare(text: str) -> Reference:
    if text.startswith("/"):
        return _file(text, text)
    if text.startswith(("./", "../", "~")) or text in (".", ".."):
        raise StoreError(f"{masked(text)} is a relative path: write the whole path, beginning with /")
    slip = re.match(r"([A-Za-z]+):/?(?=[^/])", text)
    if slip and ALIASES.get(slip[1].lower(), slip[1].lower()) in SCHEMES and "@" not in slip[1]:
        raise StoreError(f"{masked(text)} is no reference: did you mean {slip[1].lower()}://{_cut(text[slip.end() :].lstrip('/'))}?")
    first, slash, rest = text.partition("/")
    if slash and first.lower() in HF_HOSTS:
        return _hub(rest, text)
    if slash and first.lower() in OLLAMA_HOSTS:
        return _ollama(rest, text)
    if slash and _is_host(first):
        return _oci(text, text)
    if slash and FILE_ENDING.search(text):
        raise StoreError(f"{masked(text)} is no whole path and no reference: write the path from / on, or hf://{_cut(text)}")
    if slash:
        raise StoreError(
            f"{masked(text)} does not say where it is kept: write hf://{_cut(text)}, docker://{_cut(text)} or oci://HOST/{_cut(text)}"
        )
    if FILE_ENDING.search(text):
        raise StoreError(f"{masked(text)} is no file here: write its path, or where it comes from ({FORMS})")
    hint = f"ollama://{_cut(text)}, " if OLLAMA_NAME.match(text.split(":")[0]) else ""
    raise StoreError(f"{masked(text)} is no model here and no reference: write {hint}{FORMS}")


def _check_characters(text: str) -> None:
    if not text.strip():
        raise StoreError(f"a reference is empty: write {FORMS}")
    if len(text) > REFERENCE_CHARS_MAX:
        raise StoreError(f"a reference has {len(text):,} characters, more than {REFERENCE_CHARS_MAX:,}: {masked(text)}")
    if any(unicodedata.category(char) in HIDDEN_CATEGORIES for char in text):
        raise StoreError(f"{masked(text)} holds control characters: write it again by hand")
    is_path = text.startswith(("/", "file:"))
    if not is_path and re.search(r"\s", text):
        raise StoreError(f"{masked(text)} holds blanks: write it without")


def masked(text: str) -> str:
    """What somebody wrote, for a message: quoted, cut, and without the password it may hold."""
    return shown(USERINFO.sub(lambda match: f"{match[1] or match[2] or ''}***@", text))


def _cut(text: str) -> str:
    text = USERINFO.sub(lambda match: f"{match[1] or match[2] or ''}***@", text)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _is_host(text: str) -> bool:
    """Docker's rule: a first part with a dot, a port or brackets is a registry, and so is localhost."""
    return "." in text or ":" in text or text.startswith("[") or text == "localhost"


def _with_hub_host(rest: str) -> str:
    first, slash, more = rest.partition("/")
    if not slash:
        return f"{DOCKER_HUB}/library/{rest}"
    return rest if _is_host(first) else f"{DOCKER_HUB}/{first}/{more}"


def _host(text: str, whole: str) -> str:
    """HOST[:PORT], lower case, checked; raises StoreError."""
    if "@" in text:
        raise StoreError(f"{masked(whole)} holds a user name or a password: leave it out and log in instead (docker login, podman login)")
    if text.startswith("["):
        inside, bracket, port = text[1:].partition("]")
        try:
            address = ipaddress.IPv6Address(inside)
        except ValueError:
            address = None
        if not bracket or address is None or address.scope_id is not None or (port and not port.startswith(":")):
            raise StoreError(f"{masked(whole)} has no valid IPv6 host: write it as [2001:db8::1]:5000")
        return f"[{address.compressed}]{_port(port[1:], whole) if port else ''}"
    host, colon, port = text.partition(":")
    if colon and (":" in port or not port):
        hint = "IPv6 addresses stand in brackets: [2001:db8::1]:5000" if ":" in port else "a port follows the colon, or leave it out"
        raise StoreError(f"{masked(whole)} has no valid host: {hint}")
    if not host.isascii():
        raise StoreError(f"{masked(whole)} has a host that is not ASCII: write its form that begins with xn--")
    host = host.lower().removesuffix(".") if host.count(".") > 1 else host.lower()
    if not host or len(host) > HOST_CHARS_MAX or not all(HOST_LABEL.match(label) for label in host.split(".")):
        raise StoreError(f"{masked(whole)} has no valid host {shown(host)}: write a name such as registry.example.org, or an address")
    if re.match(r"(?:\d+|0x[0-9a-f]*)\Z", host.rsplit(".", 1)[-1]):
        try:
            host = str(ipaddress.IPv4Address(host))  # `127.1`, `2130706433` and `0177.0.0.1` mean different hosts to different readers
        except ValueError:
            raise StoreError(f"{masked(whole)} has no valid address {shown(host)}: write four decimal numbers, 192.0.2.1") from None
    return f"{host}{_port(port, whole) if colon else ''}"


def _port(text: str, whole: str) -> str:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= PORT_MAX):
        raise StoreError(f"{masked(whole)} has no valid port {masked(text)}: 1 to {PORT_MAX}")
    return f":{int(text)}"


def _oci(rest: str, whole: str) -> Reference:
    host_text, slash, path = rest.partition("/")
    if "@" in host_text and slash and not DIGEST.match(host_text.partition("@")[2]):
        _host(host_text, whole)
    if not slash or not path:
        name = host_text or "NAME"
        hint = f"oci://HOST/{_cut(name)}, or docker://{_cut(name)} for Docker Hub"
        raise StoreError(f"{masked(whole)} names no registry and repository: write {hint}")
    host = _host(host_text, whole)
    host = DOCKER_HUB if host in DOCKER_HUB_NAMES else host
    path, at, digest = path.partition("@")
    if at and not DIGEST.match(digest):
        raise StoreError(f"{masked(whole)} has no valid digest {shown(digest)}: sha256: and 64 lower-case hexadecimal digits")
    path, colon, tag = path.partition(":")
    if colon and not TAG.match(tag):
        raise StoreError(f"{masked(whole)} has no valid tag {shown(tag)}: letters, digits, '.', '_', '-', at most 128")
    _check_repository(path, whole)
    if host == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    return Reference("oci", host, path, tag or ("" if digest else DEFAULT_TAG), digest)


def _check_repository(path: str, whole: str) -> None:
    if len(path) > REPOSITORY_CHARS_MAX:
        raise StoreError(f"{masked(whole)} has a repository of {len(path)} characters; registries allow {REPOSITORY_CHARS_MAX}")
    if all(REPOSITORY_PART.match(part) for part in path.split("/")):
        return
    lower = path.lower()
    near = lower != path and all(REPOSITORY_PART.match(part) for part in lower.split("/"))
    hint = f"did you mean {lower}?" if near else "lower-case letters and digits, with '.', '_', '-' between them and '/' between parts"
    raise StoreError(f"{masked(whole)} has no valid repository {shown(path)}: {hint}")


def _hub(rest: str, whole: str) -> Reference:
    rest, at, revision = rest.partition("@")
    if at and (not REVISION.match(revision) or ".." in revision or "//" in revision):
        raise StoreError(f"{masked(whole)} has no valid revision {shown(revision)}: a branch, a tag or a commit")
    path, _, tag = rest.partition(":")
    parts = path.strip("/").split("/")
    if parts[0].lower() in HF_HOSTS:
        parts = parts[1:]
    if len(parts) > 2 and not tag:  # hf://ORG/REPO/FILE, as others write it
        parts, tag = parts[:2], "/".join(parts[2:])
    if len(parts) != 2 or not all(HUB_NAME.match(part) and ".." not in part for part in parts):
        raise StoreError(f"{masked(whole)} names no model of a hub: write hf://ORG/REPO, hf://ORG/REPO:Q4_K_M or hf://ORG/REPO:file.gguf")
    if tag:
        try:
            tag = safe_path(tag, what=masked(whole))
        except StoreError as exc:
            raise StoreError(str(exc)) from None
        if re.search(r"[?#@:]", tag):
            hint = "write hf://ORG/REPO:Q4_K_M or hf://ORG/REPO:file.gguf"
            raise StoreError(f"{masked(whole)} has no valid file or quantisation {shown(tag)}: {hint}")
    return Reference("hf", "", "/".join(parts), tag, revision)


def _ollama(rest: str, whole: str) -> Reference:
    rest, at, digest = rest.partition("@")
    if at and not DIGEST.match(digest):
        raise StoreError(f"{masked(whole)} has no valid digest {shown(digest)}: sha256: and 64 lower-case hexadecimal digits")
    host, parts = "", rest.split("/")
    if len(parts) > 1 and _is_host(parts[0]):
        host, parts = _host(parts[0], whole), parts[1:]
    name, colon, tag = parts[-1].partition(":")
    parts = [*parts[:-1], name] if len(parts) > 1 else [OLLAMA_NAMESPACE, name]
    good = len(parts) == 2 and all(OLLAMA_NAME.match(part) and ".." not in part for part in parts) and (TAG.match(tag) or not colon)
    if not good:
        raise StoreError(f"{masked(whole)} is no name of an Ollama model: write ollama://NAME:TAG or ollama://NAMESPACE/NAME:TAG")
    return Reference("ollama", "" if host in OLLAMA_HOSTS else host, "/".join(parts), tag or ("" if digest else DEFAULT_TAG), digest)


def _url(scheme: str, whole: str) -> Reference:
    try:
        parts = urlsplit(whole)
    except ValueError:
        raise StoreError(f"{masked(whole)} is no valid URL: write https://HOST/FILE.gguf") from None
    host = _host(parts.netloc, whole)
    bare_host, _, port = host.rpartition(":") if re.search(r":\d+\Z", host) else (host, "", "")
    if port and int(port) == DEFAULT_PORTS[scheme]:
        host = bare_host
    segments = [unquote(segment) for segment in parts.path.split("/")]
    if any(segment in (".", "..") or "/" in segment or "\\" in segment or "\0" in segment for segment in segments):
        raise StoreError(f"{masked(whole)} has '..' or a hidden separator in its path: write the plain path")
    if host in HF_HOSTS and not parts.query:
        hub = _hub_url(segments[1:], whole)
        if hub is not None:
            return hub
    if not segments[-1]:
        raise StoreError(f"{masked(whole)} names no file: write the address of a file, https://HOST/FILE.gguf")
    path = quote(unquote(parts.path), safe="/:@!$&'()*+,;=~") + (f"?{parts.query}" if parts.query else "")
    reference = Reference(scheme, host, path)
    file_name(reference)
    return reference


def _hub_url(segments: list[str], whole: str) -> Reference | None:
    """A page or a file of the hub, as copied from a browser's address bar."""
    match segments:
        case [org, repo] | [org, repo, ""]:
            return _hub(f"{org}/{repo}", whole)
        case [org, repo, "resolve" | "blob" | "tree", revision, *file]:
            at = "" if revision == "main" else f"@{revision}"
            tag = "/".join(part for part in file if part)
            return _hub(f"{org}/{repo}{':' + tag if tag else ''}{at}", whole)
    return None


def _file(path: str, whole: str) -> Reference:
    if path.startswith("localhost/"):
        path = path.removeprefix("localhost")
    if not path.startswith("/"):
        raise StoreError(f"{masked(whole)} is not an absolute path: write file:///HOME/model.gguf, with three slashes")
    if any(unicodedata.category(char) in HIDDEN_CATEGORIES for char in path):
        raise StoreError(f"{masked(whole)} holds control characters: rename the file")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise StoreError(f"{masked(whole)} is no plain path of a model: write the whole path, without '..'")
    return Reference("file", "", "/" + "/".join(parts))


def _stem(reference: Reference) -> str:
    match reference.scheme:
        case "file" | "http" | "https":
            path = reference.path if reference.scheme == "file" else unquote(urlsplit(reference.path).path)
            return _without_quant(path.rsplit("/", 1)[-1])
        case "hf":
            if FILE_ENDING.search(reference.tag):
                return _without_quant(reference.tag.rsplit("/", 1)[-1])
            return _without_quant(HUB_ENDING.sub("", reference.path.rsplit("/", 1)[-1]))
    name = reference.path.rsplit("/", 1)[-1]
    tag = _without_quant(reference.tag)
    if not tag or VERSION_TAG.match(tag) or tag.lower() in name.lower():
        return _without_quant(name)
    return f"{_without_quant(name)}-{tag}"


def _without_quant(name: str) -> str:
    name = PART_ENDING.sub("", FILE_ENDING.sub("", name))
    return QUANT.sub("", name)


def _distinction(reference: Reference) -> str:
    source = reference.tag or reference.path.rsplit("/", 1)[-1]
    found = QUANT.search(PART_ENDING.sub("", FILE_ENDING.sub("", source)))
    if found:
        return found[0]
    return "" if FILE_ENDING.search(source) else reference.tag
