"""Bring a model into the library: ask its source, check what it claims, fetch what is missing, publish it all at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from yarl import URL

from .artifacts import PLATFORM, Artifacts, as_oci
from .facts import ModelFile, NotFound, Reference, Refused, Remote, Source, Stored, StoreError
from .gguf_files import about_others, local_files
from .guard import DEFAULT_PORTS, Policy, host_port
from .hub import Hub, endpoint_of
from .layouts import is_archive
from .library import Library, Pulling, check_usable
from .locks import Lock
from .progress import Meter, Tell, nobody
from .ranges import Opener
from .references import SIGNED
from .registry import HUB_HOST, HUB_NAME, Registry, is_local, mirrors_of
from .signatures import Key, check, read_key, signatures_of
from .tls import Tls
from .transfer import STREAMS_MAX, Transfer, Wanted
from .urls import Urls
from .web import Web

LOOK_S = 0.25  # at what another process pulls
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
MIRRORS, OFFLINE, ALLOWED = "GREENROOM_MIRRORS", "GREENROOM_OFFLINE", "GREENROOM_ALLOW_HOSTS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How models are fetched.  `policy`: whom to ask; its default is a user's at a terminal, who may ask anybody he names."""

    offline: bool = False
    platform: str = PLATFORM  # of an index
    verify_key: Path | None = None  # a model that it has not signed is refused
    bytes_max: int | None = None  # of one model
    plain_http: bool = False  # the registry of the reference has no TLS
    tls_verify: bool = True
    tls_ca: Path | None = None
    mirrors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()  # HOST[:PORT] whose addresses may be private although only a redirect or a mirror names them
    policy: Policy = field(default_factory=Policy)
    files: bool = True  # file:// references are taken in
    streams: int = STREAMS_MAX
    alone: bool = False  # nothing else runs in this event loop, so that writing may block it: faster

    def from_environment(self, env: Mapping[str, str] = os.environ) -> Options:
        """The same, with what GREENROOM_OFFLINE, GREENROOM_MIRRORS and GREENROOM_ALLOW_HOSTS add.  Raises StoreError."""
        return replace(
            self,
            offline=self.offline or env.get(OFFLINE, "").strip().lower() in TRUE_WORDS,
            mirrors=self.mirrors or mirrors_of(env.get(MIRRORS, "")),
            allowed=(*self.allowed, *env.get(ALLOWED, "").replace(",", " ").split()),
        )


class Fetched(Source, Protocol):
    """A source that a transfer can fetch from."""

    def opener(self, remote: Remote, file: ModelFile) -> Opener: ...

    def key(self, remote: Remote, file: ModelFile) -> str: ...


@dataclass(slots=True)
class Puller:
    """Pulls into one library.  `remark` hears what is worth knowing and no fault (a signature that nobody asked to check)."""

    library: Library
    options: Options = field(default_factory=Options)
    remark: Callable[[str], None] = lambda words: None

    async def pull(self, reference: Reference, tell: Tell = nobody) -> Stored:
        """The model, wholly here; at once where it is here and its source has nothing newer.

        Two pulls of one reference, in whatever processes, make one fetch.  Cancelled, it leaves what has come to go on with.
        Raises StoreError: NotFound, Refused, Damaged, NoRoom, Unreachable.
        """
        stored = await self._brought(reference, tell)
        if words := await asyncio.to_thread(about_others, stored):
            self.remark(words)
        return stored

    async def _brought(self, reference: Reference, tell: Tell) -> Stored:
        options = self.options
        key = read_key(options.verify_key) if options.verify_key is not None else None
        if key is not None and reference.scheme not in SIGNED:
            raise Refused(f"{reference} cannot be signed: only models in registries are; pull it without a key")
        if options.offline:
            return self._from_library(reference, key)
        if reference.scheme == "file":
            return await self._adopted(reference, tell)
        meter = Meter(str(reference), tell)
        meter.at("resolving")
        began = time.time()
        async with self._alone(reference, meter) as waited:
            if waited and key is None and (stored := self._usable(reference)) is not None and stored.pulled_at >= began:
                meter.done = meter.total = stored.size
                meter.at("done")
                return stored
            source = source_of(reference, options)
            try:
                return await self._pulled(reference, source, key, meter)
            finally:
                await source.close()

    async def _pulled(self, reference: Reference, source: Fetched, key: Key | None, meter: Meter) -> Stored:
        remote = await self._resolved(reference, source, key)
        self._check_size(reference, remote.size)
        stored = self._usable(reference)
        if (
            stored is not None
            and remote.digest
            and stored.digest == remote.digest
            and (key is None or stored.signed_by == remote.signed_by)
        ):
            meter.done = meter.total = stored.size
            meter.at("done")
            return stored
        meter.total = sum({file.digest or file.path: file.size for file in remote.files}.values())
        await self._remarked(remote, source)
        with self.library.pulling(remote) as pulling:
            await self._fetched(remote, source, pulling, meter)
            meter.at("publishing")
            stored = await to_its_end(asyncio.to_thread(pulling.publish))
        meter.at("done")
        return stored

    async def _resolved(self, reference: Reference, source: Fetched, key: Key | None) -> Remote:
        if not isinstance(source, Artifacts):
            return await source.resolve(reference)
        remote, digests = await source.resolved(reference)
        if key is not None:
            return replace(remote, signed_by=await check(source.registry, as_oci(reference), digests, key))
        return remote

    async def _remarked(self, remote: Remote, source: Fetched) -> None:
        """That there is a signature which nobody checks.  Behind a mirror the registry itself may be out of reach: not asked then."""
        if isinstance(source, Artifacts) and remote.reference.scheme == "oci" and not self.options.mirrors.get(remote.reference.host):
            with contextlib.suppress(StoreError):
                if not remote.signed_by and await signatures_of(source.registry, remote.reference, remote.digest):
                    self.remark("it is signed, and nobody asked whether by the right key (--verify-key FILE)")

    async def _fetched(self, remote: Remote, source: Fetched, pulling: Pulling, meter: Meter) -> None:
        wanted = [Wanted(file, source.opener(remote, file), source.key(remote, file)) for file in pulling.wanted()]
        meter.done = meter.total - sum(item.file.size for item in wanted)
        # What an archive holds is taken out of it before it goes.
        room = sum((2 if is_archive(item.file) else 1) * item.file.size for item in wanted)
        room -= sum(pulling.fetched_by_others(item.file, item.key) for item in wanted)
        self.library.need_room(max(0, room))
        meter.at("fetching")
        await Transfer(pulling, meter, self.options.streams, self.options.alone).run(wanted)

    async def _adopted(self, reference: Reference, tell: Tell) -> Stored:
        if not self.options.files:
            raise Refused("files of this host are not taken in from here: only an operator at its terminal may name them")
        meter = Meter(str(reference), tell)
        meter.at("verifying")
        if self.options.bytes_max is not None:
            self._check_size(reference, await asyncio.to_thread(size_of, reference))
        stored = await to_its_end(asyncio.to_thread(self.library.adopt, reference))
        meter.done = meter.total = stored.size
        meter.at("done")
        return stored

    def _check_size(self, reference: Reference, size: int) -> None:
        limit = self.options.bytes_max
        if limit is not None and size > limit:
            raise Refused(f"{reference} has {size:,} bytes, more than the {limit:,} that are allowed: nothing was fetched")

    def _from_library(self, reference: Reference, key: Key | None) -> Stored:
        stored = self.library.find(reference)
        if stored is None:
            raise NotFound(f"{reference} is not here, and nobody is asked while offline: pull it while there is a network, then try again")
        check_usable(stored)
        if key is not None and stored.signed_by != key.name:
            raise Refused(
                f"{reference} is here, but not known to be signed by {key.name}, and nobody is asked while offline: "
                "pull it with this key while there is a network"
            )
        return stored

    def _usable(self, reference: Reference) -> Stored | None:
        try:
            return self.library.ready(reference)
        except StoreError:
            return None

    @contextlib.asynccontextmanager
    async def _alone(self, reference: Reference, meter: Meter) -> AsyncIterator[bool]:
        """Nobody else pulls this reference meanwhile; tells whether somebody had to be waited for, seeing how far he is."""
        folder = self.library.root / "locks"
        name = hashlib.sha256(str(reference).encode("utf-8", "surrogatepass")).hexdigest()
        waited = False
        try:
            self.library.prepare()
            while (lock := Lock.attempt(folder / f"pull-{name}")) is None:
                waited = True
                parts = [part for part in self.library.partials() if part.reference == str(reference)]
                meter.total = max(meter.total, sum(part.size for part in parts))
                meter.done = sum(part.done for part in parts)
                meter.at("fetching")
                await asyncio.sleep(LOOK_S)
        except OSError as exc:
            raise StoreError(f"the store {self.library.root} cannot be written: {exc.strerror or exc}") from exc
        try:
            meter.done = 0
            yield waited
        finally:
            lock.remove()
            lock.close()


def size_of(reference: Reference) -> int:
    """Bytes of a model on this host.  Raises StoreError."""
    path = Path(reference.path)
    try:
        return sum(source.stat().st_size for _, source in local_files(path))
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def source_of(reference: Reference, options: Options) -> Fetched:
    """Whom to ask for a reference, and how.  Raises Refused, StoreError."""
    host = host_of(reference)
    endpoint = endpoint_of(os.environ)
    # What the user wrote, in the reference, for mirrors, in HF_ENDPOINT, may be a machine of his own; what these lead to may not.
    mirrors = [mirror.partition("/")[0] for mirror in options.mirrors.get(as_oci(reference).host, ())]
    named = [host, *mirrors, *options.allowed]
    if reference.scheme == "hf":
        named.append(host_port(endpoint.host or "", endpoint.port or 0))
    policy = options.policy if options.policy.hosts is not None else options.policy.naming(*filter(None, named))
    unverified = frozenset() if options.tls_verify else frozenset({_with_port(host, "https")})
    web = Web(policy, Tls(options.tls_ca, unverified))
    match reference.scheme:
        case "oci" | "ollama":
            plain = frozenset({as_oci(reference).host}) if options.plain_http else frozenset()
            return Artifacts(Registry(web, plain, options.mirrors), options.platform)
        case "hf":
            return Hub(web, endpoint)
        case "https" | "http":
            if reference.scheme == "http" and not options.plain_http and not is_local(URL(f"http://{host}").host or ""):
                raise Refused(f"{reference} would come without TLS, and nothing vouches for it: write https://, or ask for --plain-http")
            return Urls(web)
    raise StoreError(f"{reference} is nothing to pull")


def host_of(reference: Reference) -> str:
    """HOST[:PORT] that a reference asks first; "" for the hub."""
    if reference.scheme == "hf":
        return ""
    host = as_oci(reference).host if reference.scheme in ("oci", "ollama") else reference.host
    return HUB_HOST if host == HUB_NAME else host


def _with_port(host: str, scheme: str) -> str:
    url = URL(f"{scheme}://{host}")
    return host_port(url.host or "", url.port or DEFAULT_PORTS[scheme])


async def to_its_end(job: Coroutine[Any, Any, T]) -> T:
    """What a thread does cannot be stopped in the middle: a cancellation waits for it."""
    task = asyncio.ensure_future(job)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
