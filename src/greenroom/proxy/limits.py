"""Every limit of the data plane, by name, with its unit and its default; and the counters it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

MIB = 1 << 20
KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client, an engine or a request may cost before it is refused or ended."""

    connections_max: int = 8192  # client connections open at once
    head_kib_max: int = 64  # request line and headers together, and an engine's head
    headers_max: int = 200
    target_kib_max: int = 16
    json_mib_max: int = 64  # a body that is read in memory to find its model
    rerank_mib_max: int = 16  # a rerank request, which is taken apart document by document
    upload_mib_max: int = 2048  # a body that is spooled
    spool_mib_max: int = 4096  # all spooled bodies together
    memory_mib_max: int = 1024  # all bodies held in memory together
    spool_after_kib: int = 256  # larger bodies go to a temporary file, where their model is not read from JSON
    overhead_kib_max: int = 128  # of chunked framing, on top of 8 x the body's bytes
    ahead_kib_max: int = 64  # bytes of later requests taken while one runs, and bytes that follow an upgrade
    head_s_max: float = 10.0  # from a request's first byte to the end of its head
    body_idle_s_max: float = 30.0  # between two reads of a body
    idle_s_max: float = 75.0  # an open connection without a request
    linger_s_max: float = 2.0  # input is still read this long after a last answer
    client_stall_s_max: float = 300.0  # a client that takes no byte of its answer, either side of a tunnel that takes none
    sweep_s: float = 0.25  # how often deadlines and half-closed clients are looked at
    probe_every_s: float = 0.7  # to tell a half-closed client from one that left
    connect_s_max: float = 5.0
    pool_idle_s_max: float = 4.0  # below the 5 s after which uvicorn closes
    pool_per_engine_max: int = 64  # idle connections kept
    interim_max: int = 16  # 1xx answers before the answer
    translate_mib_max: int = 64  # an engine's answer that has to be translated as a whole
    error_kib_max: int = 64  # of an engine's error kept to be told inside an event stream
    keepalive_after_s: float = 1.5  # of waiting, then a streaming client gets its head and a comment
    keepalive_every_s: float = 5.0
    tunnel_quiet_s: float = 30.0  # a tunnel without data frames is called quiet
    tunnel_close_s_max: float = 2.0  # for the closing handshake when a tunnel is cut
    tunnel_half_closed_s_max: float = 60.0  # one direction ended, the other silent

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) <= 0:
                raise ValueError(f"limits.{entry.name} must be more than 0, not {getattr(self, entry.name)}")

    @classmethod
    def from_mapping(cls, given: Mapping[str, int | float]) -> Limits:
        """Defaults with `given` on top.  ValueError names an unknown limit, a fraction where a count belongs, or a value <= 0."""
        defaults = asdict(cls())
        for name, value in given.items():
            if name not in defaults:
                raise ValueError(f"limits.{name} is not a limit; known: {', '.join(sorted(defaults))}")
            if isinstance(defaults[name], int) and value != int(value):
                raise ValueError(f"limits.{name} must be a whole number, not {value}")
            defaults[name] = type(defaults[name])(value)
        return cls(**defaults)


class Stats:
    """What the data plane did since it started, and what it holds now (names ending in `_now`)."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "client_gone",
        "clients",
        "clients_now",
        "cut",
        "engine_broke",
        "engine_connections",
        "engine_connections_now",
        "finished",
        "memory_bytes_now",
        "probes",
        "refused",
        "requests",
        "retried",
        "returned",
        "reused",
        "spool_bytes_now",
        "spool_files_now",
        "tunnels",
        "tunnels_now",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    clients: int  # connections accepted
    clients_now: int
    requests: int  # heads read
    finished: int  # requests ended, whatever the way
    refused: int  # answered by us with an error
    client_gone: int
    engine_broke: int
    cut: int  # ended by order
    retried: int  # silently, on a fresh connection, after a pooled one proved dead
    returned: int  # given back to the scheduler: the engine died before its first byte
    engine_connections: int  # opened
    engine_connections_now: int
    reused: int  # requests sent over a pooled connection
    probes: int
    tunnels: int
    tunnels_now: int
    bytes_in: int  # of bodies
    bytes_out: int
    memory_bytes_now: int  # of bodies that came in more than one piece
    spool_bytes_now: int
    spool_files_now: int

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}
