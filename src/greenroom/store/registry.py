"""A client of OCI registries: manifests, blobs by ranges, and the logins that they ask for.  Writing is in `uploads`."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from . import auth
from .auth import Challenge, Credentials
from .facts import Damaged, NotFound, Reference, Refused, StoreError, Unreachable
from .guard import DEFAULT_PORTS, host_port
from .layouts import CONFIG_BYTES_MAX, MANIFEST_BYTES_MAX, MANIFEST_TYPES, OCI_INDEX
from .ranges import Opened, Stretch, range_headers, status_error, stretch
from .web import TEXT_BYTES_MAX, TRIES_MAX, Body, NotTls, Text, Web, bounded, words

T = TypeVar("T")

TAGS_MAX = 10_000
TOKEN_ERRORS = frozenset({400, 401, 403})

ACCEPT = ", ".join(MANIFEST_TYPES)
HUB_NAME, HUB_HOST = "docker.io", "registry-1.docker.io"  # what it is called, and who answers
LOCAL_NAMES = frozenset({"localhost"})
NEXT_LINK = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')


@dataclass(frozen=True, slots=True)
class Manifest:
    """As the registry gave it, and checked against its digest."""

    data: bytes
    digest: str
    media_type: str
    from_host: str = ""

    def json(self) -> dict[str, Any]:
        """Raises Damaged when it is no JSON object."""
        try:
            value = json.loads(self.data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Damaged(f"the manifest {self.digest} is no JSON object: whoever pushed it has to push it again")
        return value


@dataclass(frozen=True, slots=True)
class Place:
    """Where a repository is asked for: the registry itself, or a mirror of it."""

    base: URL
    repository: str

    @property
    def host(self) -> str:
        """As in auth files: without the port that is usual."""
        port = self.base.port or 0
        return self.base.host or "" if port == DEFAULT_PORTS.get(self.base.scheme) else host_port(self.base.host or "", port)


@dataclass(slots=True)
class Registry:
    """All registries at once, by the host of a reference.

    `plain_http`: HOST[:PORT] asked without TLS because the user said so; machines of our own (127.0.0.1, ::1, localhost) fall
    back to it.  `mirrors`: host -> HOST[:PORT][/PREFIX] asked first, in order; what they give is checked all the same.
    """

    web: Web
    plain_http: frozenset[str] = frozenset()
    mirrors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    auth_files: Sequence[Path] | None = None
    _bases: dict[str, URL] = field(default_factory=dict)
    _grants: dict[tuple[URL, str, str], str] = field(default_factory=dict, repr=False)  # -> an Authorization header
    _asking: dict[tuple[URL, str, str], asyncio.Lock] = field(default_factory=dict, repr=False)

    # ------------------------------------------------------------------------------------------------------- reading

    async def manifest(self, reference: Reference, which: str = "") -> Manifest:
        """The manifest of a reference (or of `which`, a tag or digest, in its repository), checked against its digest."""
        name = which or reference.digest or reference.tag
        digest = name if name.startswith("sha256:") else ""
        if not which and reference.digest:
            digest = reference.digest

        async def one(place: Place) -> Manifest:
            text = await self.text("GET", place, f"manifests/{name}", {"Accept": ACCEPT}, bytes_max=MANIFEST_BYTES_MAX)
            if text.status != 200:
                raise status_error(
                    text.status, text.url, f"{reference.path}:{name}" if ":" not in name else f"{reference.path}@{name}", words(text)
                )
            found = "sha256:" + hashlib.sha256(text.data).hexdigest()
            told = text.headers.get("Docker-Content-Digest", "")
            if (digest and found != digest) or (not digest and told.startswith("sha256:") and told != found):
                raise Damaged(f"{place.host} gives a manifest for {name} whose digest is {found}, not {digest or told}: it is not used")
            return Manifest(text.data, found, text.headers.get("Content-Type", "").partition(";")[0].strip(), place.host)

        return await self.first(reference, one)

    async def blob(self, reference: Reference, digest: str, size: int, bytes_max: int = CONFIG_BYTES_MAX) -> bytes:
        """A small blob, whole and checked."""
        if size > bytes_max:
            raise Refused(f"{reference} has a configuration of {size:,} bytes where at most {bytes_max:,} are taken: refused")

        async def one(place: Place) -> bytes:
            text = await self.text("GET", place, f"blobs/{digest}", {}, bytes_max=size)
            if text.status != 200:
                raise status_error(text.status, text.url, f"{digest} of {reference.path}", words(text))
            if len(text.data) != size or "sha256:" + hashlib.sha256(text.data).hexdigest() != digest:
                raise Damaged(f"{place.host} gives something else for {digest}: it is not used")
            return text.data

        return await self.first(reference, one)

    @asynccontextmanager
    async def stretch(self, reference: Reference, digest: str, size: int, offset: int, length: int) -> AsyncIterator[Stretch]:
        """`length` bytes of a blob from `offset` on; not verified."""
        what = f"{digest} of {reference.path}"
        places = await self.places(reference)
        for number, place in enumerate(places, 1):
            try:
                answer = await self.answer("GET", place, f"blobs/{digest}", range_headers(offset, length, size))
                if answer.status not in (200, 206) and number < len(places):
                    answer.close()
                    continue
            except (Unreachable, Refused):
                if number == len(places):
                    raise
                continue
            try:
                async with stretch(answer, offset, length, size, what) as found:
                    yield found
            finally:
                answer.close()
            return

    def opener(self, reference: Reference, digest: str, size: int) -> Callable[[int, int], Opened]:
        """What a transfer fetches a blob with."""
        return lambda offset, length: self.stretch(reference, digest, size, offset, length)

    async def tags(self, reference: Reference) -> list[str]:
        """All tags of a repository."""
        place = (await self.places(reference))[-1]
        found: list[str] = []
        path = "tags/list?n=1000"
        while path and len(found) < TAGS_MAX:
            text = await self.text("GET", place, path, {})
            if text.status != 200:
                raise status_error(text.status, text.url, f"repository {reference.path}", words(text))
            found += [str(tag) for tag in _object(text.data).get("tags") or []]
            link = NEXT_LINK.search(text.headers.get("Link", ""))
            path = f"tags/list?{URL(link[1], encoded=True).raw_query_string}" if link else ""
        return found

    async def referrers(self, reference: Reference, digest: str) -> dict[str, Any]:
        """The list of what refers to a manifest (an OCI index); {} when there is none."""
        place = await self.home(reference)
        text = await self.text("GET", place, f"referrers/{digest}", {"Accept": OCI_INDEX}, bytes_max=MANIFEST_BYTES_MAX)
        if text.status == 200 and text.headers.get("Content-Type", "").startswith(OCI_INDEX):
            return _object(text.data)
        try:  # a registry that cannot list has a tag instead
            return (await self.manifest(reference, digest.replace(":", "-"))).json()
        except NotFound:
            return {}

    # ------------------------------------------------------------------------------------------------------ requests

    async def text(
        self,
        method: str,
        place: Place,
        path: str | URL,
        headers: Mapping[str, str],
        *,
        push: bool = False,
        body: Body | None = None,
        bytes_max: int = TEXT_BYTES_MAX,
        tries: int = TRIES_MAX,
    ) -> Text:
        """A small answer of any status, logged in where that is asked for."""
        answer = await self.answer(method, place, path, headers, push=push, body=body, tries=tries)
        try:
            return Text(answer.status, answer.headers, await bounded(answer, bytes_max), answer.url)
        finally:
            answer.close()

    async def answer(
        self,
        method: str,
        place: Place,
        path: str | URL,
        headers: Mapping[str, str],
        *,
        push: bool = False,
        body: Body | None = None,
        tries: int = TRIES_MAX,
    ) -> aiohttp.ClientResponse:
        """An answer whose body the caller reads and closes.  `path`: below /v2/REPOSITORY/, or a whole address that the registry gave."""
        url = path if isinstance(path, URL) else URL(f"{place.base}/v2/{place.repository}/{path}", encoded=True)
        actions = "pull,push" if push else "pull"
        key = (place.base, place.repository, actions)
        # Where an upload goes on at another host, that host is shown nothing.
        ours = url.origin() == place.base.origin()
        granted = self._grants.get(key, "") if ours else ""
        answer = await self.web.ask(
            method, url, headers={**headers, **({"Authorization": granted} if granted else {})}, body=body, tries=tries
        )
        if answer.status != 401 or not ours or answer.url.origin() != place.base.origin():
            return answer
        asked = answer.headers.getall("WWW-Authenticate", [])
        answer.close()
        async with self._asking.setdefault(key, asyncio.Lock()):
            if self._grants.get(key, "") == granted:  # nobody was quicker
                self._grants[key] = await self._granted(place, actions, ", ".join(asked), bool(granted))
        return await self.web.ask(method, url, headers={**headers, "Authorization": self._grants[key]}, body=body, tries=tries)

    async def places(self, reference: Reference) -> list[Place]:
        """Mirrors first, the registry itself last."""
        found = []
        for written in self.mirrors.get(reference.host, ()):
            host, _, prefix = written.partition("/")
            try:
                found.append(Place(await self._base(host), f"{prefix}/{reference.path}".lstrip("/")))
            except Unreachable:
                continue  # the next one may answer
        try:
            found.append(await self.home(reference))
        except Unreachable:
            if not found:
                raise
        return found

    async def home(self, reference: Reference) -> Place:
        return Place(await self._base(reference.host), reference.path)

    async def first(self, reference: Reference, one: Callable[[Place], Awaitable[T]]) -> T:
        """The answer of the first place that has one; what went wrong at the registry itself is what is told."""
        places = await self.places(reference)
        for place in places[:-1]:
            try:
                return await one(place)
            except StoreError:
                continue
        return await one(places[-1])

    async def _base(self, host: str) -> URL:
        if host not in self._bases:
            self._bases[host] = await self._found_base(host)
        return self._bases[host]

    async def _found_base(self, host: str) -> URL:
        name = HUB_HOST if host == HUB_NAME else host
        if host in self.plain_http:
            return URL(f"http://{name}")
        base = URL(f"https://{name}")
        if not is_local(base.host or ""):
            return base
        try:
            async with self.web.open("GET", base / "v2/", tries=1):
                return base
        except NotTls:
            return URL(f"http://{name}")

    # ------------------------------------------------------------------------------------------------------- logins

    async def _granted(self, place: Place, actions: str, header: str, again: bool) -> str:
        asked = auth.challenges(header)
        bearer = next((challenge for challenge in asked if challenge.scheme == "bearer" and challenge.realm), None)
        credentials = await auth.find(HUB_NAME if place.host == HUB_HOST else place.host, place.repository, self.auth_files)
        if bearer is not None:
            return await self._token(place, actions, bearer, credentials)
        if not any(challenge.scheme == "basic" for challenge in asked):
            raise Refused(f"{place.host} asks for a login of a kind that is not known here ({header[:60]!r})")
        if credentials is None or credentials.is_token:
            raise Refused(f"{place.host} asks for a password: log in first (podman login {place.host}, or docker login {place.host})")
        if again:
            raise _wrong_login(place)
        return credentials.basic()

    async def _token(self, place: Place, actions: str, challenge: Challenge, credentials: Credentials | None) -> str:
        auth.check_realm(challenge.realm, str(place.base))
        scope = challenge.values.get("scope") or f"repository:{place.repository}:{actions}"
        values = {"service": challenge.values.get("service", ""), "scope": scope}
        realm = URL(challenge.realm)
        if credentials is not None and credentials.is_token:
            form = {**values, "grant_type": "refresh_token", "refresh_token": credentials.secret, "client_id": "greenroom"}
            text = await self.web.text("POST", realm, body=lambda: form)
        else:
            headers = {"Authorization": credentials.basic()} if credentials is not None else {}
            text = await self.web.text("GET", realm.update_query({key: value for key, value in values.items() if value}), headers=headers)
        if text.status in TOKEN_ERRORS and credentials is not None:
            raise _wrong_login(place)
        if text.status != 200:
            # Its words are not quoted: they may repeat what was sent.
            raise Refused(f"{place.host} gives no token for {place.repository} ({text.status}): log in first (podman login {place.host})")
        answer = _object(text.data)
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token or not token.isprintable():
            raise Refused(f"the token server of {place.host} answers without a token")
        return f"Bearer {token}"


def is_local(host: str) -> bool:
    """This machine itself, by a name that leads nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL_NAMES


def mirrors_of(text: str) -> dict[str, tuple[str, ...]]:
    """`docker.io=mirror.example:5000,other.example/hub ghcr.io=…` (blanks or `;` between registries); raises StoreError."""
    found: dict[str, tuple[str, ...]] = {}
    for item in re.split(r"[\s;]+", text.strip()):
        host, equals, mirrors = item.partition("=")
        listed = tuple(mirror.strip("/") for mirror in mirrors.split(",") if mirror.strip("/"))
        if item and (not equals or not host or not listed or "://" in item):
            raise StoreError(f"the mirror {item!r} cannot be read: write HOST=MIRROR[:PORT][/PREFIX], several with commas")
        if item:
            found[host] = listed
    return found


def _wrong_login(place: Place) -> Refused:
    return Refused(f"{place.host} does not take the user and password stored for it: log in again (podman login {place.host})")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
