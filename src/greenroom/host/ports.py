"""Free ports, and proof of who listens on one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass

from greenroom.host.proctable import snapshot

TRIES_MAX = 1000

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_NO_COOKIE = 0xFFFFFFFF
_TCP_LISTEN = 10
_ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}


class PortError(Exception):
    """No port could be found."""


@dataclass(frozen=True, slots=True)
class Listener:
    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    inode: int


def free_port(preferred: int | None, taken: Container[int], host: str = "127.0.0.1") -> int:
    """A port on which nothing listens and that is not in `taken`: `preferred`, else the next one up, else (None) any.

    Nothing is reserved: another program can still take it before the engine does, which `owner_is` detects.
    """
    if preferred is None:
        for _ in range(TRIES_MAX):
            if (port := _any_port(host)) not in taken:
                return port
        raise PortError(f"no free port on {host} in {TRIES_MAX} tries; end some programs or models")
    last = min(65535, preferred + TRIES_MAX)
    for port in range(preferred, last + 1):
        if port not in taken and is_free(port, host):
            return port
    raise PortError(f"no free port on {host} from {preferred} to {last}; set another startPort")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether an engine could listen there now."""
    if listening(port):
        return False  # also on another address: clients that say `localhost` would reach the stranger
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; connections that linger are no hindrance
            probe.bind((host, port))
    except OSError as exc:
        if exc.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise PortError(f"cannot listen on {host}: {exc.strerror}") from exc
    return True


def listening(port: int) -> bool:
    """Whether anything listens on that port, on any address of this machine (about 0.05 ms)."""
    return bool(listeners(port))


def listeners(port: int) -> list[Listener]:
    """The sockets listening on `port`; two or more when on several addresses, or shared by SO_REUSEPORT."""
    try:
        return [*_ask_kernel(socket.AF_INET, port), *_ask_kernel(socket.AF_INET6, port)]
    except OSError:  # a sandbox without this kind of socket
        return [*_read_table("/proc/net/tcp", port), *_read_table("/proc/net/tcp6", port)]


def owner_is(port: int, pids: Iterable[int], host: str = "127.0.0.1") -> bool | None:
    """Whether the listener a client of host:port reaches belongs to one of `pids`.

    None when it cannot be said (no listener seen, or files of a process we may not look at).
    """
    found = _reached(listeners(port), host)
    wanted = {f"socket:[{listener.inode}]" for listener in found}
    if not wanted:
        return None
    hidden = False
    for pid in pids:
        held = _sockets(pid, wanted)
        hidden = hidden or held is None
        wanted -= held or set()
        if not wanted:
            return True
    return None if hidden else False


def owners(port: int, host: str = "127.0.0.1") -> frozenset[int]:
    """Pids that hold the listener of host:port, as far as they can be seen.  Looks at every process: for error messages."""
    wanted = {f"socket:[{listener.inode}]" for listener in _reached(listeners(port), host)}
    return frozenset(pid for pid in snapshot() if wanted and _sockets(pid, wanted))


def _reached(found: list[Listener], host: str) -> list[Listener]:
    """Those a connection to `host` can end at: bound to it exactly, else to any address."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return found
    exact = [listener for listener in found if listener.host == wanted]
    wild = [listener for listener in found if listener.host.is_unspecified]
    same_family = [listener for listener in wild if listener.host.version == wanted.version]
    return exact or same_family or ([] if wanted.version == 6 else wild)  # `::` takes IPv4 connections too, not the reverse


def _ask_kernel(family: socket.AddressFamily, port: int) -> list[Listener]:
    """Through the kernel's socket monitoring interface: 0.02 ms, where reading /proc/net/tcp walks every connection's bucket (5 ms)."""
    question = struct.pack("=IHHII BBBBI 2sH32sIII", 72, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0, family, socket.IPPROTO_TCP, 0, 0,
                           1 << _TCP_LISTEN, port.to_bytes(2, "big"), 0, bytes(32), 0, _NO_COOKIE, _NO_COOKIE)  # fmt: skip
    found: list[Listener] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(question)
        while True:
            answer, at = kernel.recv(65536), 0
            while at + 16 <= len(answer):
                length, kind = struct.unpack_from("=IH", answer, at)
                if kind == _NLMSG_DONE and answer[at + 16 : at + 20] in (b"", bytes(4)):
                    return found
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    raise OSError("the kernel refuses socket monitoring")
                if int.from_bytes(answer[at + 20 : at + 22], "big") == port:
                    found.append(
                        Listener(
                            _unmapped(answer[at + 24 : at + 24 + _ADDRESS_BYTES[family]]), struct.unpack_from("=I", answer, at + 84)[0]
                        )
                    )
                at += (length + 3) & ~3


def _read_table(path: str, port: int) -> list[Listener]:
    found = []
    try:
        with open(path, "rb") as table:
            next(table, None)
            for line in table:
                fields = line.split(None, 10)
                if int(fields[3], 16) != _TCP_LISTEN:
                    break  # the kernel lists the listening ones first; there may be 100,000 others
                address, _, its_port = fields[1].partition(b":")
                if int(its_port, 16) == port:
                    found.append(Listener(_address(address), int(fields[9])))
    except OSError:
        pass  # no IPv6 here, or /proc is closed to us
    return found


def _address(text: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # 32-bit words in the machine's byte order.
    words = bytes.fromhex(text.decode())
    raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)) if sys.byteorder == "little" else words
    return _unmapped(raw)


def _unmapped(raw: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address


def _sockets(pid: int, wanted: set[str]) -> set[str] | None:
    """Which of `wanted` the process holds; None when its files may not be looked at."""
    folder = f"/proc/{pid}/fd"
    held = set()
    try:
        for name in os.listdir(folder):
            try:
                link = os.readlink(f"{folder}/{name}")
            except FileNotFoundError:
                continue
            if link in wanted:
                held.add(link)
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended
    return held


def _any_port(host: str) -> int:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
