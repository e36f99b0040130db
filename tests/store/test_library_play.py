"""Any sequence of pulls, broken pulls, removals, sweeps and damage: what is listed is whole, and nothing else is kept."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greenroom.store.facts import Reference, StoreError
from greenroom.store.library import Library
from greenroom.store.references import parse

from .models import digest, gguf
from .test_library import begin_one, remote
from .test_packing import into

FILES = {f"{name}.gguf": gguf(2000, seed=seed) for seed, name in enumerate("abcd")}
BLOBS = {digest(data): data for data in FILES.values()}
NAMES = st.sampled_from([parse(f"oci://h.example/m{number}:v1") for number in range(3)])
MODELS = st.sets(st.sampled_from(sorted(FILES)), min_size=1, max_size=3).map(sorted)


class Play(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.library = Library(self.folder / "store")
        self.expected: dict[Reference, list[str]] = {}
        self.damaged: set[str] = set()  # files whose bytes were changed on disk

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(name=NAMES, files=MODELS)
    def pull(self, name: Reference, files: list[str]) -> None:
        into(self.library, remote(name, *((path, FILES[path]) for path in files)), BLOBS)
        self.expected[name] = files

    @rule(name=NAMES, files=MODELS, share=st.sampled_from([0.0, 0.5, 1.0]))
    def break_a_pull(self, name: Reference, files: list[str], share: float) -> None:
        """The process gives up in the middle; the name means what it meant."""
        with self.library.pulling(remote(name, *((path, FILES[path]) for path in files))) as pulling:
            if pulling.wanted():
                begin_one(pulling, share, BLOBS[pulling.wanted()[0].digest])

    @rule(name=NAMES)
    def remove(self, name: Reference) -> None:
        try:
            self.library.remove(name)
        except StoreError:
            assert name not in self.expected
        self.expected.pop(name, None)

    @precondition(lambda self: self.expected)
    @rule(name=NAMES, data=st.data())
    def give_another_name(self, name: Reference, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.expected, key=str)))
        stored = self.library.find(source)
        assert stored is not None
        self.library.tag(stored, name)
        self.expected[name] = self.expected[source]

    @rule(parts=st.booleans(), dry=st.booleans())
    def sweep(self, parts: bool, dry: bool) -> None:
        self.library.gc(dry=dry, stale_s=-1.0 if parts else 1e9, now=time.time)
        if parts and not dry:
            needed = {digest(FILES[path]) for files in self.expected.values() for path in files}
            kept = {f"sha256:{path.name}" for path in (self.library.root / "blobs" / "sha256").glob("*")}
            assert kept == needed
            assert self.library.partials() == ()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def damage_and_mend(self, data: st.DataObject) -> None:
        """A byte changes on disk: found, told of all that share it, and mended by pulling those again."""
        name = data.draw(st.sampled_from(sorted(self.expected, key=str)))
        path = data.draw(st.sampled_from(self.expected[name]))
        stored = self.library.find(name)
        assert stored is not None
        (stored.folder / path).chmod(0o644)
        with (stored.folder / path).open("r+b") as file:
            file.seek(1000)
            file.write(b"not what was there")
        assert [fault.path for fault in self.library.verify(stored)] == [path]
        sharing = {other for other, files in self.expected.items() if path in files}
        assert {other.reference for other in self.library.all() if other.damaged} == sharing
        for other in sorted(sharing, key=str):
            self.pull(other, self.expected[other])

    @invariant()
    def what_is_listed_is_whole(self) -> None:
        if not hasattr(self, "library"):
            return
        listed = {stored.reference: stored for stored in self.library.all()}
        assert {name: [file.path for file in stored.files] for name, stored in listed.items()} == self.expected
        for name, stored in listed.items():
            assert self.library.ready(name) == stored
            wanted = {path: FILES[path] for path in self.expected[name]}
            assert {path: (stored.folder / path).read_bytes() for path in wanted} == wanted


TestPlay = Play.TestCase
TestPlay.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
