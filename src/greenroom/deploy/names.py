"""Names that hold everywhere: DNS labels, unit names, file names, from any model id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

LABEL_CHARS_MAX = 63  # RFC 1123
DIGEST_CHARS = 8
# quadlet makes the service NAME-network of NAME.network: a workload of that name would be in its way.
UNIT_KINDS = frozenset({"build", "image", "network", "pod", "volume"})


def label(name: str, *, chars_max: int = LABEL_CHARS_MAX) -> str:
    """A DNS label (lower case, digits, `-`, starts with a letter): `name` itself where it is one, else changed, with a digest at its end.

    Names that differ only in what a label cannot hold, or only beyond its length, get different labels.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"m-{plain}".rstrip("-")
    if plain == name and len(plain) <= chars_max and plain.rpartition("-")[2] not in UNIT_KINDS:
        return plain
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]
    return f"{plain[: chars_max - DIGEST_CHARS - 1].rstrip('-')}-{digest}"


def labels(names: Sequence[str], *, chars_max: int = LABEL_CHARS_MAX) -> dict[str, str]:
    """One label each; a name that equals another's changed form is changed too."""
    found = {name: label(name, chars_max=chars_max) for name in names}
    assert len(set(found.values())) == len(found), "two names share a label: the digest is too short for so many"
    return found


def beside(name: str, what: str) -> str:
    """What stands beside the object of that name: a DNS subdomain, whose dot no label has, so it is nobody's own name."""
    return f"{name}.{what}"
