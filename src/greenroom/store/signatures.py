"""Signatures of models in registries, as cosign makes them with a key: found, checked against a key, and against the very manifest.

Two forms are known: a manifest tagged `sha256-HEX.sig` whose layers are small texts that name the signed digest, and Sigstore
bundles that refer to the signed manifest (listed by the registry, or by the tag `sha256-HEX` where it cannot list).
Keys and signatures are the business of `cryptography`, which the extra `sign` installs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .facts import NotFound, Reference, Refused, StoreError
from .registry import Registry

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

SIGNATURE = "dev.cosignproject.cosign/signature"  # an annotation: base64
SIMPLE_SIGNING = "application/vnd.dev.cosign.simplesigning.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle"
STATEMENT = "application/vnd.in-toto+json"
SIGNATURES_MAX = 32  # looked at
PAYLOAD_BYTES_MAX = 1 << 20
KEY_BYTES_MAX = 64 << 10
RSA_BITS_MIN = 2048


@dataclass(frozen=True, slots=True)
class Signature:
    """What was signed, and the signature itself.  `names` tells whether the signed text is about a digest."""

    signed: bytes
    signature: bytes
    names: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Key:
    """A public key; `name` is for people: its file and the beginning of its fingerprint."""

    key: EllipticCurvePublicKey | Ed25519PublicKey | RSAPublicKey
    name: str

    def signed(self, signature: Signature) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding
        from cryptography.hazmat.primitives.hashes import SHA256

        try:
            if isinstance(self.key, ec.EllipticCurvePublicKey):
                self.key.verify(signature.signature, signature.signed, ec.ECDSA(SHA256()))
            elif isinstance(self.key, ed25519.Ed25519PublicKey):
                self.key.verify(signature.signature, signature.signed)
            else:
                self.key.verify(signature.signature, signature.signed, padding.PKCS1v15(), SHA256())
        except InvalidSignature:
            return False
        return True


def read_key(path: Path) -> Key:
    """A public key in PEM (cosign.pub).  Raises StoreError."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    except ImportError:
        raise StoreError("signatures cannot be checked without the package cryptography: pip install 'greenroom[sign]'") from None
    try:
        with path.open("rb") as file:
            data = file.read(KEY_BYTES_MAX)
    except OSError as exc:
        raise StoreError(f"the key {path} cannot be read: {exc.strerror}") from exc
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise StoreError(f"{path} is no public key in PEM: give the .pub file of the key pair") from None
    good = (
        (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1))
        or isinstance(key, ed25519.Ed25519PublicKey)
        or (isinstance(key, rsa.RSAPublicKey) and key.key_size >= RSA_BITS_MIN)
    )
    if not good:
        raise StoreError(f"{path} is a key of a kind that is not used for models: ECDSA P-256, Ed25519 or RSA from {RSA_BITS_MIN} bits on")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Key(key, f"{path.name} (sha256:{hashlib.sha256(der).hexdigest()[:16]})")  # type: ignore[arg-type]


async def check(registry: Registry, reference: Reference, digests: Sequence[str], key: Key) -> str:
    """The name of the key, which has signed one of `digests` (the manifest's, or that of the index which lists it).

    Raises Refused: no signature, or none by this key for this model.
    """
    found = 0
    for digest in digests:
        for signature in await signatures_of(registry, reference, digest):
            found += 1
            # Both, always: a good signature of something else is as bad as none.
            if key.signed(signature) and signature.names(digest):
                return key.name
    if not found:
        raise Refused(
            f"{reference} is not signed, and {key.name} is asked for: nothing was kept; sign it (cosign sign --key), or pull without"
        )
    count = f"{found} signature{'s' if found > 1 else ''}"
    raise Refused(f"{reference} has {count}, none of them by {key.name} for this very model: nothing was kept, do not trust it")


async def signatures_of(registry: Registry, reference: Reference, digest: str) -> list[Signature]:
    """All signatures of a manifest that can be read; those that cannot, count for nothing."""
    return [*await _tagged(registry, reference, digest), *await _referring(registry, reference, digest)][:SIGNATURES_MAX]


def _tag(digest: str) -> str:
    return digest.replace(":", "-")


async def _tagged(registry: Registry, reference: Reference, digest: str) -> list[Signature]:
    try:
        manifest = await registry.manifest(reference, f"{_tag(digest)}.sig")
    except NotFound:
        return []
    found = []
    for layer in _maps(manifest.json().get("layers"))[:SIGNATURES_MAX]:
        written = _map(layer.get("annotations")).get(SIGNATURE)
        if layer.get("mediaType") != SIMPLE_SIGNING or not isinstance(written, str):
            continue
        payload = await _blob(registry, reference, layer)
        signature = _unbased(written)
        if payload is not None and signature is not None:
            found.append(Signature(payload, signature, _simple_names(payload)))
    return found


async def _referring(registry: Registry, reference: Reference, digest: str) -> list[Signature]:
    index = await registry.referrers(reference, digest)
    found = []
    for entry in _maps(index.get("manifests"))[:SIGNATURES_MAX]:
        kind = str(entry.get("artifactType") or "")
        if not kind.startswith(BUNDLE) or not isinstance(entry.get("digest"), str):
            continue
        try:
            manifest = await registry.manifest(reference, entry["digest"])
        except StoreError:
            continue
        for layer in _maps(manifest.json().get("layers"))[:1]:
            data = await _blob(registry, reference, layer)
            if data is not None and (signature := from_bundle(data)) is not None:
                found.append(signature)
    return found


def from_bundle(data: bytes) -> Signature | None:
    """The signature in a Sigstore bundle that holds a signed in-toto statement; None for anything else."""
    envelope = _map(_object(data).get("dsseEnvelope"))
    kind, signatures = envelope.get("payloadType"), _maps(envelope.get("signatures"))
    payload = _unbased(envelope.get("payload"))
    signature = _unbased(signatures[0].get("sig")) if len(signatures) == 1 else None
    if kind != STATEMENT or payload is None or signature is None:
        return None
    # What is signed holds the type and both lengths, so that one text cannot be taken for another.
    signed = b"DSSEv1 %d %s %d %s" % (len(STATEMENT), STATEMENT.encode(), len(payload), payload)
    subjects = {f"sha256:{_map(subject.get('digest')).get('sha256')}" for subject in _maps(_object(payload).get("subject"))}
    return Signature(signed, signature, lambda digest: digest in subjects)


def _simple_names(payload: bytes) -> Callable[[str], bool]:
    critical = _map(_object(payload).get("critical"))
    named = _map(critical.get("image")).get("docker-manifest-digest")
    return lambda digest: named == digest


async def _blob(registry: Registry, reference: Reference, layer: Mapping[str, Any]) -> bytes | None:
    digest, size = layer.get("digest"), layer.get("size")
    if not isinstance(digest, str) or not isinstance(size, int) or not 0 < size <= PAYLOAD_BYTES_MAX:
        return None
    try:
        return await registry.blob(reference, digest, size)
    except StoreError:
        return None


def _unbased(value: object) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else None
    except (binascii.Error, ValueError):
        return None


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        return _map(json.loads(data))
    except (ValueError, RecursionError):
        return {}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _maps(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
