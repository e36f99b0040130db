"""Ports are chosen free, and a listener is proven to be ours."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from greenroom.host import ports
from greenroom.host.ports import PortError, free_port, is_free, listening, owner_is, owners
from tests.host.engines import a_launch, a_port, daemon_argv, engine_argv, printed, running


@contextmanager
def a_listener(host: str = "127.0.0.1", port: int = 0, **options: int) -> Iterator[int]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        if "v6only" in options:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, options["v6only"])
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_listener_on_any_address_makes_a_port_busy(host):
    """Clients that say `localhost` could reach it."""
    with a_listener(host) as port:
        assert listening(port)
        assert not is_free(port)
        assert free_port(port, ()) > port
    assert is_free(port)
    assert free_port(port, ()) == port


def test_taken_ports_are_passed_over():
    """The book of ports given to engines that do not listen yet counts too."""
    port = a_port()
    assert free_port(port, {port}) != port
    assert is_free(free_port(None, ()))


def test_no_port_left_is_one_sentence():
    """It says where was looked."""
    with pytest.raises(PortError, match=r"no free port on 127\.0\.0\.1 from 65000 to 65535; set another startPort"):
        free_port(65000, range(65000, 65536))
    with pytest.raises(PortError, match="no free port"):
        free_port(None, range(65536))


def test_an_address_that_is_not_ours_is_told():
    """The host of an engine must be one of this machine."""
    with pytest.raises(PortError, match=r"cannot listen on 203\.0\.113\.1"):
        is_free(a_port(), "203.0.113.1")


@pytest.mark.parametrize(
    ("bound", "asked"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1"), ("::1", "::1")]
)
def test_our_own_listener_is_proven(bound, asked):
    """Bound exactly, to every address, or to IPv6 with IPv4 inside."""
    with a_listener(bound) as port:
        assert owner_is(port, [1, os.getpid()], asked) is True
        assert owner_is(port, [], asked) is False
        assert owners(port, asked) == {os.getpid()}


def test_a_listener_on_another_address_proves_nothing():
    """Nobody answers at the address asked for."""
    with a_listener("::1") as port:
        assert owner_is(port, [os.getpid()], "127.0.0.1") is None
    assert owner_is(port, [os.getpid()]) is None


async def test_the_listener_a_client_reaches_counts():
    """A stranger bound to 127.0.0.1 is reached before an engine bound to every IPv6 address."""
    async with running(a_launch(engine_argv(port := a_port()))) as stranger:
        await printed(stranger.log, "listening")
        with a_listener("::", port, v6only=1):
            assert owner_is(port, [os.getpid()], "127.0.0.1") is False
            assert owner_is(port, [os.getpid()], "::1") is True
            assert owner_is(port, [stranger.pid], "127.0.0.1") is True


async def test_a_listener_inside_a_twice_forked_tree_is_ours():
    """Ownership is asked of the tree, not of the command that exited."""
    async with running(a_launch(daemon_argv(port := a_port()))) as process:
        await printed(process.log, "listening")
        assert owner_is(port, process.tree()) is True
        assert owner_is(port, [os.getpid()]) is False


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_kernel_and_its_table_tell_the_same(host, monkeypatch):
    """Where the quick way is closed the table is read."""
    with a_listener(host) as port:
        quick = ports.listeners(port)

        def closed(family: int, port: int) -> list[ports.Listener]:
            raise PermissionError

        monkeypatch.setattr(ports, "_ask_kernel", closed)
        assert ports.listeners(port) == quick
        assert [str(each.host) for each in quick] == [host]
    assert ports.listeners(port) == []


def test_a_process_we_may_not_look_into_makes_it_unknown(monkeypatch):
    """Unknown is not "no"."""

    def closed(folder: str) -> list[str]:
        raise PermissionError(folder)

    with a_listener() as port:
        monkeypatch.setattr(ports.os, "listdir", closed)
        assert owner_is(port, [os.getpid()]) is None
