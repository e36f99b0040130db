"""Credentials as docker and podman keep them: found by the longest name, asked of helpers, never shown."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from greenroom.store import auth
from greenroom.store.auth import Challenge, Credentials, challenges, check_realm
from greenroom.store.facts import Refused, StoreError


def entry(user: str, secret: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


def written(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def helper(folder: Path, name: str, body: str) -> None:
    path = folder / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


async def test_the_longest_matching_name_wins(tmp_path: Path) -> None:
    """A repository may have credentials of its own beside its registry's."""
    auths = {"h.example": entry("all", "1"), "h.example/team": entry("team", "2"), "h.example/team/one": entry("one", "3")}
    path = written(tmp_path / "auth.json", {"auths": auths})
    users = {
        name: (await auth.find("h.example", name, [path])).user for name in ("x", "team", "team/two", "team/one", "team/one/deep", "teams")
    }

    assert users == {"x": "all", "team": "team", "team/two": "team", "team/one": "one", "team/one/deep": "one", "teams": "all"}
    assert await auth.find("other.example", "x", [path]) is None


async def test_the_first_file_that_knows_the_host_wins(tmp_path: Path) -> None:
    first = written(tmp_path / "a.json", {"auths": {"a.example": entry("a", "1")}})
    second = written(tmp_path / "b.json", {"auths": {"a.example": entry("b", "2"), "b.example": entry("b", "2")}})

    assert (await auth.find("a.example", "x", [tmp_path / "none.json", first, second])) == Credentials("a", "1")
    assert (await auth.find("b.example", "x", [first, second])) == Credentials("b", "2")


async def test_docker_hub_is_found_under_its_old_address(tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", {"auths": {"https://index.docker.io/v1/": entry("me", "p:with:colons")}})

    assert await auth.find("docker.io", "library/x", [path]) == Credentials("me", "p:with:colons")


async def test_an_identity_token_is_no_password(tmp_path: Path) -> None:
    path = written(tmp_path / "config.json", {"auths": {"h.example": {**entry("u", ""), "identitytoken": "T"}}})
    found = await auth.find("h.example", "x", [path])

    assert found is not None
    assert found.is_token
    assert found.secret == "T"


async def test_helpers_are_asked_as_docker_asks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server on stdin, JSON on stdout; one that knows nothing is no fault; its secrets are in no error."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    helper(
        tmp_path,
        "good",
        'test "$1" = get || exit 9; read server; printf \'{"ServerURL":"%s","Username":"u-%s","Secret":"s"}\' "$server" "$server"',
    )
    helper(tmp_path, "token", 'printf \'{"Username":"<token>","Secret":"refresh"}\'')
    helper(tmp_path, "empty", "echo 'credentials not found in native keychain'; exit 1")
    helper(tmp_path, "broken", "echo TOPSECRET; exit 3")
    helper(tmp_path, "babble", "echo TOPSECRET")
    special = written(tmp_path / "a.json", {"credHelpers": {"h.example": "good", "t.example": "token", "e.example": "empty"}})
    store = written(tmp_path / "b.json", {"credsStore": "good", "auths": {"https://index.docker.io/v1/": {}}})

    assert await auth.find("h.example", "x", [special]) == Credentials("u-h.example", "s")
    assert await auth.find("t.example", "x", [special]) == Credentials("", "refresh")
    assert await auth.find("e.example", "x", [special]) is None
    assert await auth.find("docker.io", "library/x", [store]) == Credentials("u-https://index.docker.io/v1/", "s")
    assert await auth.find("any.example", "x", [store]) == Credentials("u-any.example", "s")
    for name in ("broken", "babble", "absent", "../good"):
        path = written(tmp_path / "c.json", {"credHelpers": {"h.example": name}})
        with pytest.raises(StoreError) as fault:
            await auth.find("h.example", "x", [path])
        assert "TOPSECRET" not in str(fault.value)


async def test_a_store_that_is_gone_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """Docker Desktop leaves `credsStore` behind; public models are pulled all the same."""
    path = written(tmp_path / "config.json", {"credsStore": "desktop-is-gone"})

    assert await auth.find("h.example", "x", [path]) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": 5}', '{"auths": {"h.example": 5}}', "null"])
async def test_odd_files_hold_no_credentials(tmp_path: Path, text: str) -> None:
    (tmp_path / "auth.json").write_text(text)
    if text == "{":
        with pytest.raises(StoreError, match="no JSON"):
            await auth.find("h.example", "x", [tmp_path / "auth.json"])
    else:
        assert await auth.find("h.example", "x", [tmp_path / "auth.json"]) is None


async def test_an_entry_that_is_broken_is_told_without_its_text(tmp_path: Path) -> None:
    path = written(tmp_path / "auth.json", {"auths": {"h.example": {"auth": "not-base64-SECRET"}}})
    with pytest.raises(StoreError) as fault:
        await auth.find("h.example", "x", [path])

    assert "SECRET" not in str(fault.value)
    assert "h.example" in str(fault.value)


def test_the_usual_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """REGISTRY_AUTH_FILE alone; else podman's, then docker's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("XDG_CONFIG_HOME", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE"):
        monkeypatch.delenv(name, raising=False)

    places = [path.relative_to(tmp_path).as_posix() for path in auth.files()]
    assert places == ["run/containers/auth.json", ".config/containers/auth.json", ".docker/config.json"]
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/x/only.json")
    assert auth.files() == [Path("/x/only.json")]


def test_secrets_are_not_in_what_is_printed() -> None:
    assert "hush" not in f"{Credentials('u', 'hush')!r} {Credentials('u', 'hush')}"


def test_challenges_are_read() -> None:
    header = 'Bearer realm="https://a.example/t?x=1,2",service="r \\"q\\"",scope="repository:a/b:pull,push", Basic realm="x"'

    assert challenges(header) == [
        Challenge("bearer", {"realm": "https://a.example/t?x=1,2", "service": 'r "q"', "scope": "repository:a/b:pull,push"}),
        Challenge("basic", {"realm": "x"}),
    ]
    assert challenges("") == []
    assert challenges("Negotiate")[0].scheme == "negotiate"


def test_a_token_server_without_tls_gets_nothing() -> None:
    """Not even where the registry itself is plain and another host is named."""
    check_realm("https://auth.example/token", "https://h.example")
    check_realm("http://127.0.0.1:5000/token", "http://127.0.0.1:5000")
    for realm in ("http://h.example/token", "ftp://h.example/", "//h.example/token", "http://127.0.0.1:5001/token"):
        with pytest.raises(Refused, match="without TLS"):
            check_realm(realm, "https://h.example" if "5001" not in realm else "http://127.0.0.1:5000")
