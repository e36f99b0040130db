"""Signatures as cosign makes them with a key: the right key for the very manifest, or nothing is kept."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from greenroom.store.facts import Refused, StoreError
from greenroom.store.layouts import OCI_INDEX, OCI_MANIFEST
from greenroom.store.library import Library
from greenroom.store.pull import Options, Puller
from greenroom.store.references import parse
from greenroom.store.signatures import SIGNATURE, SIMPLE_SIGNING, STATEMENT, read_key

from .models import descriptor, digest, gguf
from .servers import Fake, serving

Sign = Callable[[bytes], bytes]
MINE = ec.generate_private_key(ec.SECP256R1())
OTHERS = ec.generate_private_key(ec.SECP256R1())
EMPTY = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest(b"{}"), "size": 2}


def by(key: ec.EllipticCurvePrivateKey) -> Sign:
    return lambda data: key.sign(data, ec.ECDSA(hashes.SHA256()))


def written(path: Path, key: object) -> Path:
    path.write_bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))  # type: ignore[attr-defined]
    return path


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return written(tmp_path / "cosign.pub", MINE.public_key())


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with serving(Fake()) as fake:
        yield fake


def simple(fake: Fake, about: str, sign: Sign, named: str = "") -> None:
    """`sha256-HEX.sig`, as `cosign sign --key` pushed it for years."""
    payload = json.dumps(
        {
            "critical": {
                "identity": {"docker-reference": f"{fake.host}/m"},
                "image": {"docker-manifest-digest": named or about},
                "type": "cosign container image signature",
            },
            "optional": None,
        }
    ).encode()
    layer = {**descriptor(payload, SIMPLE_SIGNING), "annotations": {SIGNATURE: base64.b64encode(sign(payload)).decode()}}
    fake.blobs[digest(payload)] = payload
    manifest = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": EMPTY, "layers": [layer]}).encode()
    fake.manifests[f"m:{about.replace(':', '-')}.sig"] = manifest


def bundle(fake: Fake, about: str, sign: Sign, named: str = "") -> None:
    """A bundle that refers to the manifest, listed by the tag `sha256-HEX`."""
    subject = {"digest": {"sha256": (named or about).removeprefix("sha256:")}}
    payload = json.dumps(
        {"_type": "https://in-toto.io/Statement/v1", "subject": [subject], "predicateType": "https://sigstore.dev/cosign/sign/v1"}
    ).encode()
    signed = f"DSSEv1 {len(STATEMENT)} {STATEMENT} {len(payload)} ".encode() + payload
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": STATEMENT,
        "signatures": [{"sig": base64.b64encode(sign(signed)).decode()}],
    }
    kind = "application/vnd.dev.sigstore.bundle.v0.3+json"
    data = json.dumps({"mediaType": kind, "verificationMaterial": {"publicKey": {"hint": "x"}}, "dsseEnvelope": envelope}).encode()
    fake.blobs[digest(data)] = data
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": kind, "config": EMPTY, "layers": [descriptor(data, kind)]}
    ).encode()
    fake.manifests[f"m:{digest(manifest)}"] = manifest
    entry = {"mediaType": OCI_MANIFEST, "digest": digest(manifest), "size": len(manifest), "artifactType": kind}
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
    fake.manifests[f"m:{about.replace(':', '-')}"] = json.dumps(index).encode()


FORMS = (simple, bundle)


@pytest.mark.parametrize("form", FORMS)
async def test_a_signed_model_is_kept_with_the_name_of_the_key(fake: Fake, form: Callable[..., None], public: Path, tmp_path: Path) -> None:
    form(fake, fake.hold("m", ("m.gguf", gguf())), by(MINE))
    library = Library(tmp_path / "store")
    stored = await Puller(library, Options(verify_key=public)).pull(parse(f"oci://{fake.host}/m:v1"))

    assert stored.signed_by.startswith("cosign.pub (sha256:")
    assert library.all()[0].signed_by == stored.signed_by


@pytest.mark.parametrize("form", FORMS)
async def test_anything_but_a_signature_of_this_key_for_this_manifest_is_refused(
    fake: Fake, form: Callable[..., None], public: Path, tmp_path: Path
) -> None:
    """Another key; a good signature of another model, replayed; rubbish.  No blob of it is asked for."""
    about = fake.hold("m", ("m.gguf", gguf()))
    library, options = Library(tmp_path / "store"), Options(verify_key=public)
    reference = parse(f"oci://{fake.host}/m:v1")
    for made, words in (
        (lambda: None, "not signed"),
        (lambda: form(fake, about, by(OTHERS)), "none of them by"),
        (lambda: form(fake, about, by(MINE), digest(b"another model")), "none of them by"),
        (lambda: form(fake, about, lambda data: b"rubbish"), "none of them by"),
    ):
        made()
        with pytest.raises(Refused, match=words):
            await Puller(library, options).pull(reference)
    assert library.all() == ()
    assert [item for item in fake.asked if digest(gguf()) in item[1]] == []


async def test_a_model_that_is_here_unsigned_is_refused_when_a_key_is_asked_for(fake: Fake, public: Path, tmp_path: Path) -> None:
    fake.hold("m", ("m.gguf", gguf()))
    library, reference = Library(tmp_path / "store"), parse(f"oci://{fake.host}/m:v1")
    await Puller(library).pull(reference)
    with pytest.raises(Refused, match="not signed"):
        await Puller(library, Options(verify_key=public)).pull(reference)


async def test_offline_a_key_is_asked_for_all_the_same(fake: Fake, public: Path, tmp_path: Path) -> None:
    """What is known of its signature stands in the store: nobody has to be asked for that."""
    about = fake.hold("m", ("m.gguf", gguf()))
    library, reference = Library(tmp_path / "store"), parse(f"oci://{fake.host}/m:v1")
    offline = Puller(library, Options(verify_key=public, offline=True))
    await Puller(library).pull(reference)
    with pytest.raises(Refused, match="not known to be signed by cosign"):
        await offline.pull(reference)
    simple(fake, about, by(MINE))
    signed = await Puller(library, Options(verify_key=public)).pull(reference)
    assert (await offline.pull(reference)).signed_by == signed.signed_by


async def test_a_signature_that_nobody_checks_is_remarked(fake: Fake, tmp_path: Path) -> None:
    remarks: list[str] = []
    simple(fake, fake.hold("m", ("m.gguf", gguf())), by(OTHERS))
    stored = await Puller(Library(tmp_path), Options(), remarks.append).pull(parse(f"oci://{fake.host}/m:v1"))

    assert stored.signed_by == ""
    assert "--verify-key" in remarks[0]


async def test_only_what_can_be_signed_is_asked_for_a_signature(public: Path, tmp_path: Path) -> None:
    for text in ("hf://org/x", "https://h.example/x.gguf", "file:///models/x.gguf"):
        with pytest.raises(Refused, match="cannot be signed"):
            await Puller(Library(tmp_path), Options(verify_key=public)).pull(parse(text))


def test_keys_of_other_kinds(tmp_path: Path) -> None:
    """Ed25519 and RSA sign, too; weak, private and broken ones are told."""
    ed, big = ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)
    for key, sign in ((ed, ed.sign), (big, lambda data: big.sign(data, padding.PKCS1v15(), hashes.SHA256()))):
        from greenroom.store.signatures import Signature

        read = read_key(written(tmp_path / "key.pub", key.public_key()))
        assert read.signed(Signature(b"text", sign(b"text"), lambda digest: True))
        assert not read.signed(Signature(b"other", sign(b"text"), lambda digest: True))
    with pytest.raises(StoreError, match="kind that is not used"):
        read_key(written(tmp_path / "key.pub", ec.generate_private_key(ec.SECP384R1()).public_key()))
    (tmp_path / "no.pub").write_text("-----BEGIN PUBLIC KEY-----\nxx\n-----END PUBLIC KEY-----\n")
    with pytest.raises(StoreError, match="no public key"):
        read_key(tmp_path / "no.pub")
    with pytest.raises(StoreError, match="cannot be read"):
        read_key(tmp_path / "absent.pub")
