"""API keys: who is asking, and for what that is good enough.

Keys are kept and compared as digests under a salt of this process, all of them each time and in constant time, so
that neither the comparison's time nor these objects tell a key.  What is shown of a key is its name.

The control plane is told who asks by two headers, on every request that came with a key:

* `X-Greenroom-Key-Name`: the key's name, percent-encoded (to be read with `unquote`); absent when no keys are set.
* `X-Greenroom-Scopes`: its scopes, such as `inference,view`; without keys all of them.

Both are absent from what needs no key (files of /ui/).  Clients cannot send them: they are dropped from what comes in
(`heads.DROPPED`), with the headers that may hold the key itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from enum import IntFlag
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import quote_from_bytes

from greenroom.config.model import SCOPES, KeyConfig, is_pattern

from .admission import Catalog
from .heads import Headers

CREDENTIAL_BYTES_MAX = 4096
CREDENTIALS_MAX = 4  # looked at in one request

STRIPPED: frozenset[bytes] = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"api-key"})
"""Headers that may hold a client's key: never forwarded to an engine."""

NAME_HEADER: Final = b"X-Greenroom-Key-Name"
SCOPES_HEADER: Final = b"X-Greenroom-Scopes"


class Scope(IntFlag):
    """What a key is good for; a route needs one of several, or none at all."""

    INFERENCE = 1  # models, by /v1/... and /upstream/...
    VIEW = 2  # looking: GET of /api/, /metrics, /logs, /running
    ADMIN = 4  # changing: POST and DELETE of /api/, /unload


ANY: Final = int(Scope.INFERENCE | Scope.VIEW | Scope.ADMIN)
_WORDS: Final = {word: Scope[word.upper()] for word in SCOPES}


def mask_of(words: Iterable[str]) -> int:
    """Scopes as a route's `needs` has them."""
    return sum(_WORDS[word] for word in set(words))


def words_of(scopes: int) -> tuple[str, ...]:
    return tuple(word for word, scope in _WORDS.items() if scopes & scope)


def _quoted(name: str) -> bytes:
    return quote_from_bytes(name.encode("utf-8", "surrogatepass"), safe="/:+@ ").encode("ascii")


class Load:
    """How many requests of one key are in flight or waiting; outlives a reload."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class Holder:
    """Who holds one key: what may be asked with it.  Never the key itself."""

    __slots__ = ("_allowed", "_catalog", "limit", "load", "models", "name", "scopes", "told")

    def __init__(self, name: str, scopes: int = ANY, models: tuple[str, ...] | None = None, limit: int | None = None) -> None:
        self.name = name
        self.scopes = scopes
        self.models = models  # None: all
        self.limit = limit
        self.load = Load()
        words = ",".join(words_of(scopes)).encode()
        self.told: Headers = [(NAME_HEADER, _quoted(name))] * bool(name) + [(SCOPES_HEADER, words)] * bool(words)
        self._catalog: Catalog | None = None
        self._allowed: frozenset[str] = frozenset()

    def allowed(self, catalog: Catalog) -> frozenset[str] | None:
        """The ids of the models it may use; None: all of them.  An alias stands for its model."""
        if self.models is None:
            return None
        if self._catalog is not catalog:
            found = {catalog.names[name] for name in self.models if name in catalog.names}
            patterns = [name for name in self.models if is_pattern(name) and name not in catalog.names]
            found.update(model for name, model in catalog.names.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
            self._catalog, self._allowed = catalog, frozenset(found)
        return self._allowed

    def may_use(self, model: str, catalog: Catalog) -> bool:
        allowed = self.allowed(catalog)
        return allowed is None or model in allowed


NOBODY: Final = Holder("", 0)
"""Nobody was asked: the route needs no key, or no keys are set."""

ANYONE: Final = Holder("")
"""Whoever asks a server without keys."""


class Keys:
    """The keys that open the data plane; none at all leaves it open."""

    __slots__ = ("_holders", "_salt", "required")

    def __init__(self, keys: Sequence[str | KeyConfig] = (), before: Keys | None = None) -> None:
        """A plain text may do everything.  `before`: the keys in force until now, whose running requests still count."""
        self._salt = os.urandom(16)
        then = dict(before._holders) if before is not None else {}
        holders: dict[bytes, Holder] = {}
        for position, key in enumerate(keys, 1):
            if isinstance(key, str):
                secret, holder = key.encode(), Holder(f"key-{position}")
            else:
                secret, holder = key.key.encode(), Holder(key.name, mask_of(key.scopes), key.models, key.limit)
            if before is not None and (was := then.get(before._digest(secret))) is not None:
                holder.load = was.load
            holders.setdefault(self._digest(secret), holder)
        self._holders: tuple[tuple[bytes, Holder], ...] = tuple(holders.items())
        self.required: bool = bool(keys)

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, digest_size=16, key=self._salt).digest()

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> Holder | None:
        """Who holds the key presented (ANYONE when none is required), or None: refuse with 401.

        `headers` have lower-case names.  Accepted: Bearer, Basic (the password is the key), `x-api-key`.
        """
        if not self.required:
            return ANYONE
        looked_at = 0
        for name, value in headers:
            if name == b"authorization":
                secret = _of_authorization(value)
            elif name == b"x-api-key":
                secret = value.strip()
            else:
                continue
            looked_at += 1
            if looked_at > CREDENTIALS_MAX:
                return None
            if secret and len(secret) <= CREDENTIAL_BYTES_MAX:
                found = self._find(secret)
                if found is not None:
                    return found
        return None

    def _find(self, secret: bytes) -> Holder | None:
        """Compared with every key, also after one fits."""
        digest = self._digest(secret)
        found = None
        for known, holder in self._holders:
            if hmac.compare_digest(known, digest):
                found = holder
        return found


def is_script(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a script of a page asks, which has its own way to ask for a key: no dialog of the browser in front of it.

    Told without `Sec-Fetch-Mode`, which browsers leave out over plain http to other machines.
    """
    given = dict(headers)
    return given.get(b"user-agent", b"").startswith(b"Mozilla/") and b"text/html" not in given.get(b"accept", b"")


def _of_authorization(value: bytes) -> bytes:
    scheme, _, rest = value.strip().partition(b" ")
    kind = scheme.lower()
    if kind == b"bearer":
        return rest.strip()
    if kind == b"basic" and len(rest) <= 2 * CREDENTIAL_BYTES_MAX:
        try:
            decoded = base64.b64decode(rest.strip(), validate=True)
        except binascii.Error:
            return b""
        return decoded.partition(b":")[2]
    return b""
