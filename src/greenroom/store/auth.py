"""Credentials for registries, as docker and podman keep them, and the answers to a registry's challenge.

A secret is sent to the host it was stored for, and to the token server which that host names, if it is reached by TLS.
It is in no error, no log and no `repr`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .facts import Refused, StoreError

HELPER_S_MAX = 30.0
FILE_BYTES_MAX = 4 * 1024 * 1024
HELPER_BYTES_MAX = 64 * 1024
IDENTITY_USER = "<token>"  # with it, a helper's secret is an identity token, not a password
DOCKER_HUB_KEYS = ("index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
DOCKER_HUB_SERVER = "https://index.docker.io/v1/"
HELPER_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user and a password, or an identity token (then `user` is "")."""

    user: str
    secret: str = field(repr=False)

    @property
    def is_token(self) -> bool:
        return self.user == ""

    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode("ascii")


@dataclass(frozen=True, slots=True)
class Challenge:
    """A WWW-Authenticate header: `scheme` in lower case."""

    scheme: str
    values: Mapping[str, str]

    @property
    def realm(self) -> str:
        return self.values.get("realm", "")


def files() -> list[Path]:
    """Where credentials may stand, first found wins.  REGISTRY_AUTH_FILE, where set, is the only one."""
    if only := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(only)]
    found = []
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        found.append(Path(runtime) / "containers" / "auth.json")
    else:
        found.append(Path(f"/run/containers/{os.getuid()}/auth.json"))
    config = os.environ.get("XDG_CONFIG_HOME")
    found.append((Path(config) if config else Path.home() / ".config") / "containers" / "auth.json")
    docker = os.environ.get("DOCKER_CONFIG")
    found.append((Path(docker) if docker else Path.home() / ".docker") / "config.json")
    return found


async def find(host: str, repository: str, paths: Sequence[Path] | None = None) -> Credentials | None:
    """What is stored for HOST/REPOSITORY: the longest matching entry of the first file that has one.

    Raises StoreError for a broken file.
    """
    for path in files() if paths is None else paths:
        data = read(path)
        if found := await _in_file(data, host, repository, path):
            return found
    return None


def read(path: Path) -> Mapping[str, Any]:
    """One auth file; {} when there is none."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise StoreError(f"{path} is too big to be a file of credentials: move it away or repair it")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as exc:
        raise StoreError(f"the credentials in {path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError:
        # Without the cause: a parser's message may quote what it read.
        raise StoreError(f"the credentials in {path} are no JSON: log in again, or repair the file") from None
    return data if isinstance(data, dict) else {}


async def _in_file(data: Mapping[str, Any], host: str, repository: str, path: Path) -> Credentials | None:
    helpers, auths = _table(data.get("credHelpers")), _table(data.get("auths"))
    keys = candidates(host, repository)
    for key in keys:
        if helper := helpers.get(key):
            return await ask_helper(str(helper), key)
    by_key = {plain_key(written): (written, entry) for written, entry in auths.items()}
    store = data.get("credsStore")
    for key in keys:
        written, entry = by_key.get(key, ("", None))
        if isinstance(entry, dict) and (found := _entry(entry, written, path)):
            return found
        if store and written:
            return await ask_helper(str(store), written)
    # A store for everything, installed with Docker and gone with it, must not stand in the way of public models.
    if store and shutil.which(f"docker-credential-{store}"):
        return await ask_helper(str(store), DOCKER_HUB_SERVER if host == "docker.io" else host)
    return None


def candidates(host: str, repository: str) -> list[str]:
    """HOST/a/b, HOST/a, HOST: most special first."""
    parts = [part for part in repository.split("/") if part]
    keys = ["/".join((host, *parts[:count])) for count in range(len(parts), -1, -1)]
    return keys + ([key.rstrip("/") for key in DOCKER_HUB_KEYS] if host == "docker.io" else [])


def plain_key(key: str) -> str:
    """Docker writes some keys as URLs: `https://index.docker.io/v1/`."""
    return re.sub(r"^https?://", "", key).rstrip("/")


def _entry(entry: Mapping[str, Any], written: str, path: Path) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials("", str(token))
    if auth := entry.get("auth"):
        try:
            user, colon, secret = base64.b64decode(str(auth), validate=True).decode("utf-8").partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise StoreError(f"the entry for {written} in {path} is not base64 of USER:PASSWORD: log in again") from None
        return Credentials(user, secret.rstrip("\0"))
    if entry.get("username") and "password" in entry:
        return Credentials(str(entry["username"]), str(entry["password"]))
    return None


async def ask_helper(name: str, server: str) -> Credentials | None:
    """`docker-credential-NAME get`: the server on its stdin, JSON on its stdout; None when it has nothing stored."""
    program = shutil.which(f"docker-credential-{name}") if HELPER_NAME.fullmatch(name) else None
    if program is None:
        raise StoreError(
            f"credentials for {server} are kept by docker-credential-{name}, which is not on PATH: install it, or log in without it"
        )
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(program, "get", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(HELPER_S_MAX):
            out, _ = await child.communicate(server.encode() + b"\n")
    except TimeoutError:
        raise StoreError(f"docker-credential-{name} did not answer within {HELPER_S_MAX:.0f} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        # It says so in words that differ between helpers; what it printed may hold a secret, so it is not quoted.
        if b"credentials not found" in out:
            return None
        raise StoreError(f"docker-credential-{name} failed with exit status {child.returncode} for {server}")
    try:
        answer = json.loads(out[:HELPER_BYTES_MAX])
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"docker-credential-{name} answered for {server}, but not with a user and a secret") from None
    return Credentials("", secret) if user == IDENTITY_USER else Credentials(user, secret)


def challenges(header: str) -> list[Challenge]:
    """What a WWW-Authenticate header (several joined by commas) asks for."""
    found: list[tuple[str, dict[str, str]]] = []
    for match in re.finditer(r'([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))|([A-Za-z][\w-]*)(?=\s|,|$)', header):
        if match[4]:
            found.append((match[4].lower(), {}))
        elif found:
            value = re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
            found[-1][1][match[1].lower()] = value
    return [Challenge(scheme, values) for scheme, values in found]


def check_realm(realm: str, registry: str) -> None:
    """Raises Refused where a token server would get a secret in the clear.  `registry`: the registry's own address."""
    if realm.startswith("https://"):
        return
    here, there = registry.split("/")[:3], realm.split("/")[:3]
    if realm.startswith("http://") and registry.startswith("http://") and here == there:
        return
    raise Refused("the registry sends credentials to a token server without TLS: refused; it has to name an https address")


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
