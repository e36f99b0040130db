"""Take a model out of archives: the layers of an image, of which later ones win, or packed folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from .facts import Damaged, ModelFile, NotFound, Refused
from .layouts import FILES_MAX, IMAGE_FOLDER, check_paths
from .paths import shown
from .placing import READ_ONLY, free_bytes
from .roles import role_of, stem_of
from .tars import OPAQUE, WHITEOUT, Member, Source, link_target, members, opened

READ_BYTES = 1 << 20
LINK = "model.file"  # beside the model, leads to it
Value = TypeVar("Value")


def unpack(archives: Sequence[Path], folder: Path, *, image: bool) -> tuple[ModelFile, ...]:
    """The files in `archives`, written into `folder` under numbers (`blob` of each).  Of an image only what lies below /models.

    Raises Damaged; Refused (a name or link that leads out, devices, more bytes than the disk has room for); NotFound.
    """
    found: dict[str, ModelFile] = {}
    links: dict[str, str] = {}
    for archive in archives:
        _layer(archive, folder, image, found, links)
    if image:
        found, links = _below(found), _below(links)
    chosen = links.get(LINK, "").removeprefix(f"{IMAGE_FOLDER}/")
    _follow(found, links)
    if not found:
        raise NotFound(f"the image holds no file below /{IMAGE_FOLDER}: it is no model" if image else "its layers hold no file")
    check_paths(list(found), what="a layer")
    return tuple(ModelFile(path, file.size, file.digest, _role(path, chosen), "", file.blob) for path, file in sorted(found.items()))


def _role(path: str, chosen: str) -> str:
    """The image's link tells which of several models is meant."""
    role = role_of(path)
    other = chosen.lower().endswith(".gguf") and path.lower().endswith(".gguf") and stem_of(path) != stem_of(chosen)
    return "other" if role == "weights" and other else role


def _layer(archive: Path, folder: Path, image: bool, found: dict[str, ModelFile], links: dict[str, str]) -> None:
    hidden: list[str] = []
    fresh: set[str] = set()
    room = free_bytes(folder)
    with opened(archive) as stream:
        for member, body in members(stream, what=f"layer {archive.name[:12]}", bytes_max=room + archive.stat().st_size):
            if image and not _is_below(member.path):
                continue
            name = member.path.rsplit("/", 1)[-1]
            if image and name.startswith(WHITEOUT):
                hidden.append(member.path)
                continue
            _member(member, body, archive, folder, found, links, IMAGE_FOLDER if image else "")
            fresh.add(member.path)
            if len(found) + len(links) > FILES_MAX:
                raise Refused(f"layer {archive.name[:12]} has more than {FILES_MAX:,} files")
    for mark in hidden:
        parent, _, name = mark.rpartition("/")
        gone = parent if name == OPAQUE else f"{parent}/{name.removeprefix(WHITEOUT)}"
        for path in [path for path in (*found, *links) if (path == gone or path.startswith(f"{gone}/")) and path not in fresh]:
            found.pop(path, None)
            links.pop(path, None)


def _member(
    member: Member, body: Source, archive: Path, folder: Path, found: dict[str, ModelFile], links: dict[str, str], root: str
) -> None:
    match member.kind:
        case "file":
            number = str(len(os.listdir(folder)))
            digest = _write(member, body, archive, folder / number)
            found[member.path] = ModelFile(member.path, member.size, digest, blob=number)
            links.pop(member.path, None)
        case "link" | "symlink":
            links[member.path] = link_target(member, root)
            found.pop(member.path, None)
        case "folder":
            pass
        case _:
            raise Refused(f"a layer holds a device {shown(member.path)}: nothing of it was kept")


def _write(member: Member, body: Source, archive: Path, target: Path) -> str:
    """The member's bytes as a file of its own; its digest."""
    digest = hashlib.sha256()
    with open(target, "xb") as file:
        os.fchmod(file.fileno(), READ_ONLY)
        size = 0
        while data := body.read(READ_BYTES):
            digest.update(data)
            file.write(data)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    if size != member.size:
        raise Damaged(f"{shown(member.path)} is cut short in its layer: fetch it again")
    return f"sha256:{digest.hexdigest()}"


def _is_below(path: str) -> bool:
    return path.startswith(f"{IMAGE_FOLDER}/")


def _below(table: dict[str, Value]) -> dict[str, Value]:
    return {path.removeprefix(f"{IMAGE_FOLDER}/"): value for path, value in table.items()}


def _follow(found: dict[str, ModelFile], links: dict[str, str]) -> None:
    """A link to a file gives it another name.  `model.file` and the like, beside the file itself, are left out: engines go by endings."""
    for path, target in sorted(links.items()):
        target = target.removeprefix(f"{IMAGE_FOLDER}/")
        if target in found and path not in found and role_of(path) != "other" and not _same_kind(path, target):
            found[path] = found[target]


def _same_kind(path: str, target: str) -> bool:
    return path.rsplit("/", 1)[0] == target.rsplit("/", 1)[0] and role_of(path) == role_of(target)
