"""API keys: who is asking.

Keys are kept and compared as digests, so that neither the comparison's time nor this object tells a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence

CREDENTIAL_BYTES_MAX = 4096
CREDENTIALS_MAX = 4  # looked at in one request

STRIPPED: frozenset[bytes] = frozenset({b"authorization", b"proxy-authorization", b"x-api-key", b"api-key"})
"""Headers that may hold a client's key: never forwarded to an engine."""


class Keys:
    """The keys that open the data plane; none at all leaves it open."""

    __slots__ = ("_names", "_salt", "required")

    def __init__(self, keys: Sequence[str]) -> None:
        self._salt = os.urandom(16)
        self._names = {self._digest(key.encode()): f"key-{position}" for position, key in reversed(list(enumerate(keys, 1)))}
        self.required: bool = bool(keys)

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, digest_size=16, key=self._salt).digest()

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The name of the key presented (`key-1`, ...; "" when none is required), or None: refuse with 401.

        `headers` have lower-case names.  Accepted: Bearer, Basic (the password is the key), `x-api-key`.
        """
        if not self.required:
            return ""
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
                found = self._names.get(self._digest(secret))
                if found is not None:
                    return found
        return None


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
