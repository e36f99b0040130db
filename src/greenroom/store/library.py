"""The models on this host: blobs named by their digests, kept once; models made of them; names that point to models.

    blobs/sha256/HEX        every file, once, read-only
    models/HEX/files/…      a model's folder: links to (else clones or copies of) blobs, under the names engines expect
    models/HEX/model.json   what it is; manifest.json and config.json as the registry gave them
    refs/HEX.json           a reference and the model it names
    partial/HEX.*           blobs that are being fetched (partial.py)
    work/…                  what a process is putting together; gone with it

A model is built in `work`, moved into place by one rename, and named last: whoever reads sees all of it or nothing.  Every change
is made under one lock, held for moments; no lock is needed to read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .facts import Damaged, Description, ModelFile, NoRoom, NotFound, Reference, Refused, Remote, Stored, StoreError
from .gguf_files import examine, local_files
from .layouts import is_archive
from .locks import Lock, is_held
from .partial import About, Partial, recorded_bytes, remove_parts
from .paths import safe_path
from .placing import FULL, need_room, no_room, place, remove_tree, same_disk, sync_folder, take, write_whole
from .references import is_digest, model_id, parse, parse_here, typed
from .roles import entry_of, role_of
from .unpacking import unpack

ENVIRONMENT = "GREENROOM_MODELS"
READ_BYTES = 4 << 20
CARD_BYTES_MAX = 16 << 20
PREFIX_CHARS_MIN = 6  # of a digest that stands for a model
STALE_S = 7 * 86400.0  # a partial blob that nobody has touched for so long is not resumed
SYNC_THREADS = 8
VERSION = 1  # of model.json


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A blob of a model that is not wholly here."""

    reference: str
    file: str
    done: int
    size: int
    active: bool  # a process is fetching it now
    touched_at: float  # Unix time
    name: str = ""  # in `partial`


@dataclass(frozen=True, slots=True)
class Swept:
    """What `gc` or `remove` took away, or would."""

    items: tuple[str, ...] = ()
    bytes: int = 0
    kept: tuple[str, ...] = ()  # in use by another process

    def __add__(self, other: Swept) -> Swept:
        return Swept(self.items + other.items, self.bytes + other.bytes, self.kept + other.kept)


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that is not what was pulled."""

    path: str
    why: str


def default_root(env: Mapping[str, str] = os.environ) -> Path:
    """`GREENROOM_MODELS`, else `greenroom/models` in the user's data folder."""
    if env.get(ENVIRONMENT):
        return Path(env[ENVIRONMENT]).expanduser()
    base = Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "greenroom" / "models"


class Library:
    """One store.  Any number of processes may use it at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(os.path.abspath(root or default_root()))

    # --- reading ---------------------------------------------------------------------------------------------------------------

    def all(self) -> tuple[Stored, ...]:
        """Every reference that names a model which is wholly here, by name.  What cannot be read is left out: `gc` tells of it."""
        found = (self._named(path) for path in sorted(self._files("refs", ".json")))
        return tuple(sorted((stored for stored in found if stored is not None), key=lambda stored: str(stored.reference)))

    def find(self, reference: Reference) -> Stored | None:
        """The model that a reference names; one with a digest is also found under another tag of its repository."""
        named = self._named(self._ref_path(reference))
        if named is not None and (not reference.digest or reference.scheme == "hf" or named.digest == reference.digest):
            return named
        if reference.scheme != "oci" or not reference.digest:
            return None
        for stored in self.all():
            if stored.digest == reference.digest and (stored.reference.host, stored.reference.path) == (reference.host, reference.path):
                return stored
        return None

    def get(self, name: str) -> Stored:
        """By reference, short name (`smollm2-135m`), or the beginning of a digest.  Raises NotFound, StoreError when several fit."""
        everything = self.all()
        wanted = name.removeprefix("sha256:").lower()
        by_reference = [stored for stored in everything if str(stored.reference) == name]
        if not by_reference:
            with contextlib.suppress(StoreError):
                exact = self.find(parse_here(name))
                by_reference = [exact] if exact is not None else []
        fits = by_reference or [stored for stored in everything if model_id(stored.reference) == name]
        if not fits and len(wanted) >= PREFIX_CHARS_MIN and all(char in "0123456789abcdef" for char in wanted):
            fits = [stored for stored in everything if stored.digest.removeprefix("sha256:").startswith(wanted)]
        if not fits:
            raise NotFound(f"there is no model {name!r} here: `greenroom list` shows what is, `greenroom pull` fetches one")
        if len({stored.digest for stored in fits}) > 1:
            names = ", ".join(str(stored.reference) for stored in fits[:5])
            raise StoreError(f"{name!r} may be any of {names}: write the one you mean")
        return fits[0]

    def ready(self, reference: Reference) -> Stored:
        """As `find`, for use: raises NotFound when it is not here, Damaged when `verify` found it broken or a file is gone or cut."""
        stored = self.find(reference)
        if stored is None:
            raise NotFound(f"{reference} is not here: `greenroom pull {typed(reference)}` fetches it")
        check_usable(stored)
        return stored

    def partials(self) -> tuple[Unfinished, ...]:
        """Blobs that are not wholly here, being fetched or left by a fetch that ended."""
        found = []
        for path in sorted(self._files("partial", ".about")):
            base = path.with_suffix("")
            about = _about(path)
            if about is None:
                continue
            active = is_held(base.with_name(f"{base.name}.lock"))
            with contextlib.suppress(OSError):
                touched = max(path.stat().st_mtime, base.with_name(f"{base.name}.journal").stat().st_mtime)
                done = recorded_bytes(base.with_name(f"{base.name}.journal"), about.size)
                found.append(Unfinished(about.reference, about.file, done, about.size, active, touched, base.name))
        return tuple(found)

    def blob(self, digest: str) -> Path:
        """Where a blob is, or would be."""
        if not is_digest(digest):
            raise StoreError(f"{digest!r} is no digest: sha256: and 64 lower-case hexadecimal digits")
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has(self, file: ModelFile) -> bool:
        """True when the blob of a file is wholly here."""
        with contextlib.suppress(OSError):
            return bool(file.digest) and self.blob(file.digest).stat().st_size == file.size
        return False

    # --- writing ---------------------------------------------------------------------------------------------------------------

    def need_room(self, bytes_: int) -> None:
        """Raises NoRoom, with what is needed and what is free, when so many more bytes do not fit beside fetches already under way."""
        under_way = sum(part.size - part.done for part in self.partials() if part.active)
        need_room(self.root, bytes_ + (under_way if bytes_ else 0))

    @contextlib.contextmanager
    def pulling(self, remote: Remote) -> Iterator[Pulling]:
        """Fetch and publish one model.  Until the end nothing that it needs is swept away by others."""
        work = self._begin({file.digest for file in remote.files if file.digest})
        try:
            yield Pulling(self, remote, work)
        finally:
            work.close()

    def adopt(self, reference: Reference, *, link: bool = True, now: Callable[[], float] = time.time) -> Stored:
        """Take in a file or folder of this host (a `file://` reference): cloned, else linked (`link`), else copied.

        A link shares its bytes with the original: who writes into that, damages this, and `verify` tells.  Raises StoreError.
        """
        if reference.scheme != "file":
            raise StoreError(f"{reference} is not on this host: pull it")
        path = Path(reference.path)
        try:
            sources = local_files(path)
            files = tuple(ModelFile(name, source.stat().st_size, "", role_of(name)) for name, source in sources)
            copied = sum(
                file.size for file, (_, source) in zip(files, sources, strict=True) if not link or not same_disk(source, self.root)
            )
            self.need_room(copied)
            work = self._begin(set())
        except OSError as exc:
            raise StoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        pulling = Pulling(self, Remote(reference, "", "files", files), work)
        try:
            for file, (_, source) in zip(files, sources, strict=True):
                pulling.bring(file, source.resolve(), link=link)
            return pulling.publish(now=now())
        except OSError as exc:
            pulling.abandon()
            if exc.errno in FULL:
                raise no_room(self.root, copied) from exc
            raise StoreError(f"{path} cannot be taken in: {exc.strerror or exc}") from exc
        finally:
            work.close()

    def tag(self, stored: Stored, reference: Reference, *, now: float | None = None) -> Stored:
        """Another name for a model that is here."""
        with self._changing():
            self._name(reference, stored.digest, stored.pulled_at if now is None else now)
        return replace(stored, reference=reference)

    def remove(self, reference: Reference, *, force: bool = False) -> Swept:
        """Take a name away, its model when no other name is left, and what only that needed; and what is left of a broken pull of it.

        Raises NotFound; Refused when a process uses the model and `force` is not given.
        """
        text = str(reference)
        with self._changing():
            path = self._ref_path(reference)
            stored = self._named(path)
            swept = Swept()
            if stored is not None:
                others = [other for other in self.all() if other.digest == stored.digest and other.reference != stored.reference]
                if not others:
                    self._refuse_used(stored, force)
                path.unlink(missing_ok=True)
                sync_folder(path.parent)
                swept += Swept((text,))
                if not others:
                    swept += self._sweep_models(dry=False, only=stored.digest, force=force)
                    swept += self._sweep_blobs(dry=False, only={file.digest for file in stored.files})
            elif path.exists():
                path.unlink()
                swept += Swept((text,))
            for part in self.partials():
                if part.reference == text:
                    swept += self._sweep_partial(part, dry=False)
        if not swept.items and not swept.kept:
            raise NotFound(f"{text} is not here: `greenroom list` shows what is")
        return swept

    def gc(self, *, dry: bool = False, stale_s: float = STALE_S, now: Callable[[], float] = time.time) -> Swept:
        """Take away what nothing names: models, blobs, what killed processes left, and parts untouched for `stale_s`.

        Never what another process uses or fetches at this moment.
        """
        if not self.root.exists():
            return Swept()
        with self._changing():
            swept = self._sweep_refs(dry=dry) + self._sweep_work(dry=dry) + self._sweep_models(dry=dry)
            swept += self._sweep_blobs(dry=dry)
            for part in self.partials():
                if now() - part.touched_at > stale_s or self._whole(part):
                    swept += self._sweep_partial(part, dry=dry)
            if not dry:
                self._sweep_locks()
            return swept + self._sweep_strays(dry=dry)

    def verify(self, stored: Stored, progress: Callable[[int], None] = lambda done: None) -> tuple[Fault, ...]:
        """Read every file and compare it with its digest.  What is damaged is marked: not served, fetched again by the next pull."""
        faults = []
        for file in stored.files:
            path = stored.folder / file.path
            why = _fault(path, file, progress)
            if why:
                faults.append(Fault(file.path, why))
        with contextlib.suppress(OSError, StoreError), self._changing():  # a store that is read-only keeps no mark
            self._mark(stored, faults)
        return tuple(faults)

    @contextlib.contextmanager
    def using(self, stored: Stored) -> Iterator[None]:
        """While a process serves a model, it is not removed.  On a store that is read-only nobody can remove it anyway."""
        lock = None
        with contextlib.suppress(OSError):
            lock = Lock.wait(self._use_path(stored.digest), shared=True)  # whoever removes or sweeps holds it for moments
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    # --- inside ----------------------------------------------------------------------------------------------------------------

    def _files(self, folder: str, ending: str) -> list[Path]:
        try:
            return [Path(entry.path) for entry in os.scandir(self.root / folder) if entry.name.endswith(ending) and entry.name[0] != "."]
        except OSError:
            return []

    def _ref_path(self, reference: Reference) -> Path:
        return self.root / "refs" / f"{hashlib.sha256(str(reference).encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    def _use_path(self, digest: str) -> Path:
        return self.root / "locks" / f"use-{digest.removeprefix('sha256:')}"

    def _model(self, digest: str) -> Path:
        return self.root / "models" / digest.removeprefix("sha256:")

    def _named(self, path: Path) -> Stored | None:
        try:
            ref = _read_json(path)
            digest, text = str(ref["digest"]), str(ref["reference"])
            if not is_digest(digest):
                return None
            stored = read_card(self._model(digest), digest)
            return replace(stored, reference=parse(text), pulled_at=float(ref["pulled_at"]))
        except (OSError, ValueError, KeyError, TypeError, StoreError):
            return None

    def _name(self, reference: Reference, digest: str, now: float) -> None:
        document = {"reference": str(reference), "digest": digest, "pulled_at": now}
        write_whole(self._ref_path(reference), json.dumps(document, indent=1).encode())

    def prepare(self) -> None:
        """Make its folders, the first one for nobody else's eyes; raises OSError."""
        if not self.root.exists():
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in ("blobs/sha256", "models", "refs", "partial", "work", "locks"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._writing():
            self.prepare()
            with Lock.wait(self.root / "locks" / "store"):
                yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if exc.errno in FULL:
                raise no_room(self.root, 0) from exc
            raise StoreError(
                f"the store {self.root} cannot be written: {exc.strerror or exc}; name another with --store or {ENVIRONMENT}"
            ) from exc

    def _attempt(self, base: Path) -> Lock | None:
        """The lock of a partial blob; None when another process fetches it."""
        return Lock.attempt(base.with_name(f"{base.name}.lock"))

    def _begin(self, digests: set[str]) -> Work:
        with self._changing():
            self._sweep_work(dry=False)  # an image that was being unpacked may have left gigabytes
            folder = self.root / "work" / os.urandom(8).hex()
            folder.mkdir()
            lease = Lock.attempt(folder / "lease")
            assert lease is not None, "nobody else knows this name"
            try:
                (folder / "needs.json").write_text(json.dumps(sorted(digests)))
            except OSError:
                lease.close()
                remove_tree(folder)
                raise
        return Work(folder, lease)

    def _used(self) -> tuple[set[str], set[str]]:
        """Digests of blobs that models have, and that running pulls need."""
        have = {file.digest for path in (self.root / "models").iterdir() for file in _card_files(path)}
        needed: set[str] = set()
        for folder in (self.root / "work").iterdir():
            if not is_held(folder / "lease"):
                continue
            with contextlib.suppress(OSError, ValueError):
                needed.update(str(item) for item in json.loads((folder / "needs.json").read_bytes()))
        return have, needed

    def _refuse_used(self, stored: Stored, force: bool) -> None:
        lock = Lock.attempt(self._use_path(stored.digest))
        if lock is None:
            if not force:
                raise Refused(f"{stored.reference} is being served: stop it first, or force its removal")
            return
        lock.remove()
        lock.close()

    def _sweep_refs(self, *, dry: bool) -> Swept:
        """Names whose model is gone or cannot be read."""
        broken = [path for path in self._files("refs", ".json") if self._named(path) is None]
        if not dry:
            for path in broken:
                path.unlink(missing_ok=True)
        return Swept(tuple(f"name {path.stem[:12]} without a model" for path in broken))

    def _sweep_models(self, *, dry: bool, only: str = "", force: bool = False) -> Swept:
        """Models that no name leads to; one whose name went to a newer version may still be served, and stays."""
        named = set()
        for path in self._files("refs", ".json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                named.add(str(_read_json(path)["digest"]).removeprefix("sha256:"))
        swept = Swept()
        for folder in sorted((self.root / "models").iterdir()):
            if folder.name in named or (only and folder.name != only.removeprefix("sha256:")):
                continue
            used = Lock.attempt(self._use_path(folder.name))
            if used is None and not force:
                swept += Swept(kept=(f"model {folder.name[:12]}",))
                continue
            # Linked files give nothing back before their blobs go: those are counted there.
            size = sum(_own_bytes(path) for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1)
            swept += Swept((f"model {folder.name[:12]}",), size)
            if not dry:
                self._drop(folder)
            if used is not None:
                used.remove()
                used.close()
        return swept

    def _sweep_blobs(self, *, dry: bool, only: set[str] | None = None) -> Swept:
        have, needed = self._used()
        # A blob may be a link to the file that was taken in: then nothing comes free.  In a dry run doomed models still hold links, too.
        links: Counter[int] = self._links() if dry else Counter()
        swept = Swept()
        for path in sorted((self.root / "blobs" / "sha256").iterdir()):
            digest = f"sha256:{path.name}"
            if (only is not None and digest not in only) or digest in have:
                continue
            if digest in needed:
                swept += Swept(kept=(f"blob {path.name[:12]}",))
                continue
            stat = path.stat()
            outside = stat.st_nlink - 1 - links[stat.st_ino]
            swept += Swept((f"blob {path.name[:12]}",), 0 if outside > 0 else _own_bytes(path))
            if not dry:
                path.unlink(missing_ok=True)
        return swept

    def _links(self) -> Counter[int]:
        return Counter(path.stat().st_ino for path in (self.root / "models").rglob("*") if path.is_file())

    def _sweep_work(self, *, dry: bool) -> Swept:
        swept = Swept()
        for folder in sorted((self.root / "work").iterdir()):
            if is_held(folder / "lease"):
                continue
            swept += Swept((f"what a killed process left ({folder.name})",), sum(_own_bytes(path) for path in folder.rglob("*")))
            if not dry:
                remove_tree(folder)
        return swept

    def _sweep_partial(self, part: Unfinished, *, dry: bool) -> Swept:
        base = self.root / "partial" / part.name
        lock = self._attempt(base)
        what = f"part of {part.reference} ({part.file})"
        if lock is None:
            return Swept(kept=(what,))
        size = _own_bytes(base.with_name(f"{base.name}.part"))
        if not dry:
            remove_parts(base)
            lock.remove()
        lock.close()
        return Swept((what,), size)

    def _sweep_strays(self, *, dry: bool) -> Swept:
        """Files without a story in `partial` (a kill between two of them), locks of nobody, half-written files."""
        swept = Swept()
        folder = self.root / "partial"
        for path in sorted(folder.iterdir()):
            base = path.with_suffix("")
            if base.with_name(f"{base.name}.about").exists():
                continue
            lock = self._attempt(base)
            if lock is None:
                continue
            if path.suffix != ".lock":
                swept += Swept((f"stray {path.name[:12]}{path.suffix}",), _own_bytes(path))
            if not dry:
                remove_parts(base)
                lock.remove()
            lock.close()
        for path in [*self._hidden("refs"), *self._hidden("blobs/sha256")]:
            swept += Swept((f"half-written {path.name[:16]}",), _own_bytes(path))
            if not dry:
                path.unlink(missing_ok=True)
        return swept

    def _sweep_locks(self) -> None:
        """Of models that are gone, or that nobody uses now."""
        for path in (self.root / "locks").iterdir():
            lock = Lock.attempt(path) if path.name.startswith(("use-", "pull-")) else None
            if lock is not None:
                lock.remove()
                lock.close()

    def _hidden(self, folder: str) -> list[Path]:
        return [path for path in (self.root / folder).iterdir() if path.name.startswith(".")]

    def _whole(self, part: Unfinished) -> bool:
        """Its blob came by another way."""
        about = _about(self.root / "partial" / f"{part.name}.about")
        return about is not None and bool(about.digest) and self.blob(about.digest).exists() and not part.active

    def _drop(self, folder: Path) -> None:
        """Away at once for readers, then in peace."""
        grave = self.root / "work" / f"gone-{os.urandom(8).hex()}"
        folder.rename(grave)
        remove_tree(grave)

    def _mark(self, stored: Stored, faults: Sequence[Fault]) -> None:
        """Write down what is wrong, also of other models that share those very bytes."""
        model = self._model(stored.digest)
        if not faults:
            (model / "damaged.json").unlink(missing_ok=True)
            return
        write_faults(model, faults)
        broken = {file.digest: stored.folder / file.path for file in stored.files if file.path in {fault.path for fault in faults}}
        for digest, path in broken.items():
            for folder in (self.root / "models").iterdir():
                shared = [file.path for file in _card_files(folder) if file.digest == digest and _same(folder / "files" / file.path, path)]
                if folder != model and shared:
                    write_faults(folder, [Fault(name, "it shares its bytes with a damaged file") for name in shared])
            file = next(file for file in stored.files if file.digest == digest)
            if self.blob(digest).exists() and (_same(self.blob(digest), path) or _fault(self.blob(digest), file, lambda done: None)):
                self.blob(digest).unlink(missing_ok=True)  # so that the next pull fetches it again


class Work:
    """A folder that one process builds in, and its claim on blobs; both end with it."""

    def __init__(self, folder: Path, lease: Lock) -> None:
        self.folder = folder
        self._lease = lease

    def close(self) -> None:
        remove_tree(self.folder)
        self._lease.close()


class Pulling:
    """One model on its way into the library."""

    def __init__(self, library: Library, remote: Remote, work: Work) -> None:
        self.library = library
        self.remote = remote
        self._work = work
        self._digests: dict[str, str] = {}  # of files whose manifest did not tell
        self._unpacked_digests: set[str] = set()

    def wanted(self) -> tuple[ModelFile, ...]:
        """What is still to be fetched, each blob once."""
        seen: set[str] = set()
        files = []
        for file in self.remote.files:
            key = file.digest or file.path
            if key in seen or self.here(file):
                continue
            seen.add(key)
            files.append(file)
        return tuple(files)

    def here(self, file: ModelFile) -> bool:
        return self.library.has(replace(file, digest=file.digest or self._digests.get(file.path, "")))

    def need_room(self) -> None:
        """Raises NoRoom when what is still to be fetched does not fit; archives lie beside what is taken out of them for a while."""
        missing = sum(file.size * (2 if is_archive(file) else 1) for file in self.wanted())
        resumed = sum(part.done for part in self.library.partials() if part.reference == str(self.remote.reference))
        self.library.need_room(max(0, missing - resumed))

    def begin(self, file: ModelFile, key: str = "") -> Partial | None:
        """The blob of a file, to be filled; None while another process fetches it (ask `here`, and again), or when it is here.

        `key` tells versions of files without a digest apart (a URL with its ETag).  A resumed one has `done` bytes already.
        """
        if self.here(file):
            return None
        base = self._base(file, key)
        with self.library._writing():
            lock = self.library._attempt(base)
        if lock is None:
            return None
        if self.here(file):  # finished by another one since
            lock.remove()
            lock.close()
            return None
        return Partial(base, lock, About(str(self.remote.reference), file.path, file.size, file.digest))

    def fetched_by_others(self, file: ModelFile, key: str = "") -> int:
        """Bytes of a blob that another process has fetched so far."""
        base = self._base(file, key)
        return recorded_bytes(base.with_name(f"{base.name}.journal"), file.size)

    def finish(self, partial: Partial, file: ModelFile) -> str:
        """Verify a filled blob and keep it; its digest.  Raises Damaged, NoRoom."""
        if file.digest:
            return partial.finish(self.library.blob(file.digest))
        digest = partial.finish(self._work.folder / f"blob-{hashlib.sha256(file.path.encode()).hexdigest()}")
        self._keep(self._work.folder / f"blob-{hashlib.sha256(file.path.encode()).hexdigest()}", digest)
        self._digests[file.path] = digest
        return digest

    def bring(self, file: ModelFile, source: Path, *, link: bool = False) -> str:
        """A file that is on this host already: cloned, else linked, else copied; its digest."""
        target = self._work.folder / f"blob-{hashlib.sha256(file.path.encode()).hexdigest()}"
        take(source, target, link=link)
        digest = hash_file(target)
        self._keep(target, digest)
        self._digests[file.path] = digest
        return digest

    def publish(self, *, signed_by: str = "", now: float | None = None) -> Stored:
        """Put the model together and name it; all blobs must be here.

        Raises Damaged, Refused, NotFound (no model in it), NoRoom: nothing is left then, but what other models need.
        """
        try:
            if self.wanted():
                raise StoreError(f"{self.wanted()[0].path} of {self.remote.reference} is not here yet: pull again")
            return self._published(signed_by or self.remote.signed_by, time.time() if now is None else now)
        except (Damaged, Refused, NotFound, NoRoom):
            self.abandon()
            raise

    def _published(self, signed_by: str, now: float) -> Stored:
        try:
            return self._publish(signed_by, now)
        except OSError as exc:
            if exc.errno in FULL:
                raise no_room(self.library.root, self.remote.size) from exc
            raise StoreError(f"{self.remote.reference} cannot be kept in {self.library.root}: {exc.strerror or exc}") from exc

    def abandon(self) -> None:
        """Take away what came for this model and nobody else needs; the work ends with it."""
        self._work.close()
        with contextlib.suppress(StoreError), self.library._changing():
            mine = {file.digest for file in self.remote.files} | set(self._digests.values()) | self._unpacked_digests
            self.library._sweep_blobs(dry=False, only=mine - {""})

    def _publish(self, signed_by: str, now: float) -> Stored:
        files = [replace(file, digest=file.digest or self._digests.get(file.path, "")) for file in self.remote.files]
        build = self._work.folder / "model"
        (build / "files").mkdir(parents=True)
        archives = [file for file in files if is_archive(file)]
        if archives:
            files = self._unpacked(archives, [file for file in files if not is_archive(file)])
        for file in files:
            target = build / "files" / safe_path(file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            place(self.library.blob(file.digest), target)
        kept, description = examine(build / "files", files, self.remote.description)
        try:
            entry_of(kept)
        except StoreError as exc:
            raise NotFound(f"{self.remote.reference} is no model that can be served: {exc}") from None
        digest = self.remote.digest or list_digest(kept)
        stored = Stored(
            self.remote.reference, digest, self.remote.layout, kept, self.library._model(digest) / "files", description, now, signed_by
        )
        write_card(build, stored, self.remote.manifest, self.remote.config)
        _sync_tree(build)
        with self.library._changing():
            self._move(build, stored)
            self.library._name(self.remote.reference, digest, now)
            if archives:
                self._work.close()
                self.library._sweep_blobs(dry=False, only={file.digest for file in archives})
        return stored

    def _move(self, build: Path, stored: Stored) -> None:
        target = self.library._model(stored.digest)
        if target.exists():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, StoreError):
                there = read_card(target, stored.digest)
                check_usable(there)
                if stored.signed_by not in ("", there.signed_by):
                    write_whole(target / "model.json", (build / "model.json").read_bytes())
                return  # the same model, perhaps in use
            self.library._drop(target)
        build.rename(target)
        sync_folder(target.parent)

    def _unpacked(self, archives: Sequence[ModelFile], others: list[ModelFile]) -> list[ModelFile]:
        folder = self._work.folder / "unpacked"
        folder.mkdir()
        found = unpack([self.library.blob(file.digest) for file in archives], folder, image=self.remote.layout == "image")
        for file in found:
            self._keep(folder / file.blob, file.digest)
            self._unpacked_digests.add(file.digest)
        names = {file.path for file in others}
        return others + [replace(file, blob="") for file in found if file.path not in names]

    def _keep(self, path: Path, digest: str) -> None:
        """A verified file becomes a blob.  What was claimed for it first, so that nobody sweeps it."""
        with self.library._changing():
            needs = self._work.folder / "needs.json"
            known = {*json.loads(needs.read_bytes()), digest}
            write_whole(needs, json.dumps(sorted(known)).encode(), 0o600)
            target = self.library.blob(digest)
            if target.exists() and target.stat().st_size == path.stat().st_size:
                path.unlink()
            else:
                path.replace(target)
                sync_folder(target.parent)

    def _base(self, file: ModelFile, key: str) -> Path:
        name = (
            file.digest.removeprefix("sha256:")
            if file.digest
            else hashlib.sha256(f"{self.remote.reference}\0{file.path}\0{key}".encode()).hexdigest()
        )
        return self.library.root / "partial" / name


def check_usable(stored: Stored) -> None:
    """Raises Damaged when a model was found broken, or when a file of it is gone or has another size."""
    if stored.damaged:
        raise Damaged(
            f"{stored.reference} is damaged ({', '.join(stored.damaged[:3])}): `greenroom pull {typed(stored.reference)}` fetches it again"
        )
    for file in stored.files:
        try:
            size = (stored.folder / file.path).stat().st_size
        except OSError:
            size = -1
        if size != file.size:
            what = "is gone" if size < 0 else f"has {size:,} of {file.size:,} bytes"
            raise Damaged(f"{file.path} of {stored.reference} {what}: `greenroom rm {typed(stored.reference)}` and pull it again")


def hash_file(path: Path, progress: Callable[[int], None] = lambda done: None) -> str:
    """`sha256:…` of a file; `progress` gets the bytes of each step."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            found.update(data)
            progress(len(data))
    return f"sha256:{found.hexdigest()}"


def list_digest(files: Sequence[ModelFile]) -> str:
    """Names a version of a model that has no manifest: of the names and digests of its files."""
    text = "".join(f"{file.digest} {file.size} {file.path}\n" for file in sorted(files, key=lambda file: file.path))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write_card(folder: Path, stored: Stored, manifest: bytes, config: bytes) -> None:
    """model.json, and beside it manifest.json and config.json where there are any."""
    description = {**asdict(stored.description), "annotations": dict(stored.description.annotations)}
    document = {
        "version": VERSION,
        "digest": stored.digest,
        "layout": stored.layout,
        "reference": str(stored.reference),
        "signed_by": stored.signed_by,
        "description": description,
        "files": [
            {key: value for key, value in asdict(file).items() if value not in ("", 0)} | {"size": file.size} for file in stored.files
        ],
    }
    for name, data in (("manifest.json", manifest), ("config.json", config)):
        if data:
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o444)
    (folder / "model.json").write_bytes(json.dumps(document, indent=1).encode())
    (folder / "model.json").chmod(0o444)


def read_card(folder: Path, digest: str) -> Stored:
    """The model in a folder; its reference is the first it was pulled by.  Raises OSError, ValueError, KeyError, TypeError, StoreError."""
    document = _read_json(folder / "model.json")
    told = document["description"]
    description = Description(**{**told, "licenses": tuple(told["licenses"]), "annotations": dict(told["annotations"])})
    files = tuple(ModelFile(**file) for file in document["files"])
    for file in files:
        safe_path(file.path, what=str(folder))
    damaged: tuple[str, ...] = ()
    with contextlib.suppress(FileNotFoundError):
        damaged = tuple(str(fault["path"]) for fault in json.loads((folder / "damaged.json").read_bytes()))
    reference = parse(document["reference"])
    return Stored(
        reference, digest, str(document["layout"]), files, folder / "files", description, 0.0, str(document["signed_by"]), damaged
    )


def write_faults(folder: Path, faults: Sequence[Fault]) -> None:
    write_whole(folder / "damaged.json", json.dumps([asdict(fault) for fault in faults], indent=1).encode())


def _same(one: Path, other: Path) -> bool:
    """The same bytes on disk."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def _card_files(folder: Path) -> tuple[ModelFile, ...]:
    try:
        return read_card(folder, f"sha256:{folder.name}").files
    except (OSError, ValueError, KeyError, TypeError, StoreError):
        return ()


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        document = json.loads(file.read(CARD_BYTES_MAX))
    if not isinstance(document, dict):
        raise ValueError(f"{path} is no JSON object")
    return document


def _about(path: Path) -> About | None:
    try:
        document = _read_json(path)
        return About(str(document["reference"]), str(document["file"]), int(document["size"]), str(document["digest"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fault(path: Path, file: ModelFile, progress: Callable[[int], None]) -> str:
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"it has {size:,} bytes, {file.size:,} were pulled"
        digest = hash_file(path, progress)
    except OSError as exc:
        return f"it cannot be read: {exc.strerror}"
    return "" if digest == file.digest else f"its bytes changed: {file.digest} was pulled, {digest} is here"


def _own_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def _sync_tree(folder: Path) -> None:
    """Folders and cards, all at once: the file system makes one commit of it.  The files themselves are on the disk since they came."""
    paths = [folder, *(path for path in folder.rglob("*") if path.is_dir() or path.parent == folder)]
    with ThreadPoolExecutor(SYNC_THREADS) as threads:
        list(threads.map(_sync, paths))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
