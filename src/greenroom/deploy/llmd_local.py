"""llm-d without Kubernetes: for each model an endpoint picker that reads `endpoints.yaml`, and an Envoy in front of it.

The step between one greenroom and a cluster: several replicas of one model on one or a few hosts, chosen by prefix
cache and load.  greenroom stays the address that clients know, with these as its peers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from greenroom.config.errors import one_line
from greenroom.config.yaml_out import dump
from greenroom.deploy.basis import PORTS_END
from greenroom.deploy.figures import SWITCHES, page
from greenroom.deploy.intent import Files, Intent, Workload
from greenroom.deploy.llmd_router import SERVER_TYPES, picker_config
from greenroom.deploy.llmd_versions import AS_OF, ENVOY_IMAGE, EPP_IMAGE, VERSIONS
from greenroom.deploy.unfit import Unfit
from greenroom.engines.container import Containerized
from greenroom.engines.detect import describe
from greenroom.engines.generic import PORT_MACRO, Generic

ENVOY_PORT = 8081  # of the first model; each has the next one
PICKER_PORT = 9002  # of the first model's picker: gRPC, then health, then figures; each has PORTS_EACH of its own
PORTS_EACH = 10
MODELS_MAX = 100  # then their ports would run into each other
REQUEST_S_MAX = 86_400  # a long answer streams for as long as it takes
PICK_S_MAX = 10
MESSAGE_S_MAX = 1000  # between two pieces of an answer that goes through the picker
CONNECT_S_MAX = 10
DRAIN_S = 60
CONNECTIONS_MAX = 40_000
BUFFER_BYTES = 32_768
HTTP2_STREAM_BYTES, HTTP2_CONNECTION_BYTES = 65_536, 1_048_576
EXTERNAL = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
OPTIONS = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
DESTINATION_HEADER = "x-gateway-destination-endpoint"  # the picker writes address:port here


@dataclass(frozen=True, slots=True)
class Host:
    """Where replicas run: a literal IPv4 address (the picker resolves no names), and how many of each model."""

    address: str
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """The ports that one model's picker and Envoy listen on."""

    name: str
    names: tuple[str, ...]  # by which clients ask for it
    there: str  # what its engines call it, as they are started now
    envoy: int
    grpc: int
    health: int
    figures: int
    key: str = ""  # the variable of greenroom's environment that holds the key of its engines; "" = they ask for none

    @property
    def ports(self) -> tuple[int, ...]:
        return (self.envoy, self.grpc, self.health, self.figures)


def places(workloads: Sequence[Workload]) -> list[Place]:
    if len(workloads) > MODELS_MAX:
        raise Unfit(f"{len(workloads)} models are too many for one host's ports, at most {MODELS_MAX} have room: generate them in parts")
    first = [PICKER_PORT + index * PORTS_EACH for index in range(len(workloads))]
    return [
        Place(one.name, (one.model, *one.aliases), _answers_to(one), ENVOY_PORT + index, port, port + 1, port + 2, one.key)
        for index, (one, port) in enumerate(zip(workloads, first, strict=True))
    ]


def _answers_to(workload: Workload) -> str:
    engine = describe(workload.source) if workload.source is not None else None
    engine = engine.inner if isinstance(engine, Containerized) else engine
    return engine.request_name() if isinstance(engine, Generic) else workload.model


def local(intent: Intent, hosts: Sequence[Host]) -> Files:
    """One folder a model, a compose file that runs pickers and Envoys, and the `peers` of greenroom's configuration."""
    for host in hosts:
        check(host)
    addresses = [host.address for host in hosts]
    if twice := [address for address in addresses if addresses.count(address) > 1]:
        raise Unfit(f"{twice[0]} is named more than once: write how many replicas it has in one place, such as {twice[0]}=2")
    chosen = [one for one in intent.workloads if one.kind in SERVER_TYPES]
    if not chosen:
        kinds = ", ".join(sorted({one.kind for one in intent.workloads})) or "none"
        raise Unfit(
            f"the endpoint picker reads figures of vLLM and SGLang only, and the engines here are: {kinds}; leave those to greenroom"
        )
    head = [
        "Made by greenroom (generate llm-d --no-kubernetes); make it anew rather than edit it.",
        f"Written for what was current in {AS_OF}: EndpointPickerConfig {VERSIONS['EndpointPickerConfig']}, Envoy {VERSIONS['Envoy']}.",
    ]
    found = places(chosen)
    first = first_ports(
        chosen, max(host.replicas for host in hosts), intent.config.start_port, [port for one in found for port in one.ports]
    )
    files: dict[str, str] = {}
    for place, workload in zip(found, chosen, strict=True):
        folder = place.name
        files[f"{folder}/endpoints.yaml"] = dump(
            {"endpoints": endpoints(workload, hosts, first[workload.name])},
            comments=[
                *head,
                "The picker reads this again whenever it changes: write a new file beside it and rename it onto this one.",
                "Addresses are literal IPv4; the picker must reach them for their figures too.",
            ],
        )
        config = picker_config(flow_control=False, endpoints_file="/etc/epp/endpoints.yaml")
        files[f"{folder}/picker.yaml"] = dump(config, comments=[*head, "Flow control and model rewriting need Kubernetes."])
        files[f"{folder}/envoy.yaml"] = dump(
            envoy(place), comments=[*head, f"Clients, here greenroom, come in on 127.0.0.1:{place.envoy}."]
        )
    files["compose.yaml"] = dump(
        compose(found), comments=[*head, "docker compose up -d; README.md has the ports of the model servers themselves."]
    )
    files["peers.yaml"] = dump(
        peers(found),
        comments=[
            *head,
            "Add this to greenroom.yaml, and take the models named here out of `models`: clients notice nothing.",
            *keys_told(chosen),
        ],
    )
    files["README.md"] = readme(intent, head, list(zip(found, chosen, strict=True)), hosts, first)
    return files


def check(host: Host) -> None:
    try:
        ipaddress.IPv4Address(host.address)
    except ValueError:
        raise Unfit(
            f"{host.address!r} is no IPv4 address, and the endpoint picker resolves no names: write one such as 10.0.0.10"
        ) from None
    if not 1 <= host.replicas <= MODELS_MAX:
        raise Unfit(f"{host.replicas} replicas on {host.address} are outside 1 to {MODELS_MAX}")


def first_ports(workloads: Sequence[Workload], width: int, start: int, taken: Collection[int]) -> dict[str, int]:
    """Workload -> the first of `width` ports that are its own on every host: where it listens now, unless they would meet others.

    Ports that commands name come first.  Raises Unfit where there are not enough.
    """
    held = set(taken)
    found: dict[str, int] = {}
    for one in sorted(workloads, key=_moves):
        tries = chain((one.host_port or one.port,), range(start, PORTS_END + 2 - width))
        free = (port for port in tries if port + width - 1 <= PORTS_END and held.isdisjoint(range(port, port + width)))
        if (first := next(free, 0)) == 0:
            raise Unfit(
                f"{one.model}: no {width} ports in a row are left from startPort {start} to {PORTS_END} for its replicas on a host; "
                "begin lower (`startPort`), or give hosts fewer replicas"
            )
        found[one.name] = first
        held.update(range(first, first + width))
    return found


def _moves(workload: Workload) -> bool:
    return workload.source is None or PORT_MACRO in workload.source.proxy


def endpoints(workload: Workload, hosts: Sequence[Host], first: int) -> list[dict[str, Any]]:
    """Replicas on one host have ports that follow each other."""
    spots = [(host.address, first + index) for host in hosts for index in range(host.replicas)]
    return [
        {"name": f"{workload.name}-{index}", "address": address, "port": str(port), "labels": {"model": workload.model}}
        for index, (address, port) in enumerate(spots)
    ]


def peers(found: Sequence[Place]) -> dict[str, Any]:
    """greenroom's own configuration of them."""
    return {"peers": {place.name: peer(f"http://127.0.0.1:{place.envoy}", _named(place), place.key) for place in found}}


def peer(address: str, models: list[str] | dict[str, str], key: str) -> dict[str, Any]:
    """An entry of `peers`.  `key`: the variable that holds it; "" = none."""
    return {"proxy": address, "models": models, **({"apiKey": f"${{env.{key}}}"} if key else {})}


def keys_told(workloads: Iterable[Workload]) -> list[str]:
    """A comment on keys that engines ask for, if any does: greenroom shows them in its clients' stead."""
    named = {one.key: one.model for one in workloads if one.key}
    said = ", ".join(f"{variable} (of {model})" for variable, model in named.items())
    return [f"The engines ask for keys: start greenroom with {said} in its environment."] if named else []


def _named(place: Place) -> list[str] | dict[str, str]:
    """The names of clients, with the one that its engines answer to where that is another."""
    return list(place.names) if set(place.names) == {place.there} else dict.fromkeys(place.names, place.there)


def compose(found: Sequence[Place]) -> dict[str, Any]:
    """They share the host's network: the picker asks model servers for their figures on the addresses that Envoy sends to."""
    services: dict[str, Any] = {}
    for place in found:
        picker = {
            "image": EPP_IMAGE,
            "command": [
                "--config-file=/etc/epp/picker.yaml",
                f"--pool-name={place.name}",
                "--pool-namespace=default",
                f"--grpc-port={place.grpc}",
                f"--grpc-health-port={place.health}",
                "--health-checking=true",
                f"--metrics-port={place.figures}",
                "--secure-serving=false",
            ],
            # The whole folder: a single mounted file would not be seen to change.
            "volumes": [_mount(f"./{place.name}", "/etc/epp")],
        }
        front = {
            "image": ENVOY_IMAGE,
            "command": ["--service-node", place.name, "--log-level", "warn", "--drain-time-s", str(DRAIN_S), "-c", "/etc/envoy/envoy.yaml"],
            "volumes": [_mount(f"./{place.name}", "/etc/envoy")],
            "depends_on": [f"{place.name}-picker"],
        }
        shared = {
            "network_mode": "host",
            "restart": "unless-stopped",
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
        }
        services[f"{place.name}-picker"] = {**picker, **shared}
        services[f"{place.name}-envoy"] = {**front, **shared, "stop_grace_period": f"{DRAIN_S + 10}s"}
    return {"name": "llm-d", "services": services}


def readme(
    intent: Intent, head: Sequence[str], found: Sequence[tuple[Place, Workload]], hosts: Sequence[Host], first: Mapping[str, int]
) -> str:
    """Which replica listens where, and what to type."""
    lines = [
        f"# {intent.name} on llm-d, without Kubernetes",
        "",
        *head,
        "",
        "## Start the model servers",
        "",
        "Each replica is a model server that you start, on a port of its own: the first on the first port, the next on the one after it.",
        "It listens on the address of its host, not on 127.0.0.1 alone, unless all of this runs on one.",
        "",
        "| model | " + " | ".join(host.address for host in hosts) + " |",
        "|---|" + "---|" * len(hosts),
        *(
            f"| {_cell(one.model)} | " + " | ".join(_row_of_ports(first[one.name], host.replicas) for host in hosts) + " |"
            for _, one in found
        ),
        "",
    ]
    if silent := [(one, SWITCHES[one.kind]) for _, one in found if one.kind in SWITCHES and not page(one)]:
        lines += [
            *(f"* {_cell(one.model)}: its picker reads its figures, which it has with `{switch}` only." for one, switch in silent),
            "",
        ]
    lines += [
        "## Start pickers and Envoys",
        "",
        "On the host where greenroom runs:",
        "",
        "```bash",
        "docker compose up -d",
        "```",
        "",
        "| model | Envoy | picker: requests, health, figures |",
        "|---|---|---|",
        *(f"| {_cell(one.model)} | 127.0.0.1:{place.envoy} | {place.grpc}, {place.health}, {place.figures} |" for place, one in found),
        "",
        "Then greenroom takes `peers.yaml` into its configuration.",
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")


def _row_of_ports(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _mount(source: str, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target, "read_only": True}


# --------------------------------------------------------------------------------------------------------------- Envoy


def envoy(place: Place) -> dict[str, Any]:
    """Ask the picker (ext_proc), then go to the address it wrote into a header."""
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "http",
                    "address": _socket("127.0.0.1", place.envoy),
                    "per_connection_buffer_limit_bytes": BUFFER_BYTES,
                    "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": _manager()}]}],
                }
            ],
            "clusters": [_chosen_endpoint(), _picker(place)],
        }
    }


def _socket(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}


def _manager() -> dict[str, Any]:
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "chosen_endpoint", "timeout": f"{REQUEST_S_MAX}s", "idle_timeout": f"{REQUEST_S_MAX}s"},
    }
    ask = {
        "@type": EXTERNAL,
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": f"{PICK_S_MAX}s"},
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "message_timeout": f"{MESSAGE_S_MAX}s",
    }
    return {
        "@type": MANAGER,
        "stat_prefix": "http",
        "route_config": {"name": "all", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": ask},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": ROUTER, "suppress_envoy_headers": True}},
        ],
        "use_remote_address": True,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
        "server_header_transformation": "PASS_THROUGH",
    }


def _many() -> dict[str, Any]:
    limits = {"max_connections": CONNECTIONS_MAX, "max_pending_requests": CONNECTIONS_MAX, "max_requests": CONNECTIONS_MAX}
    return {"thresholds": [limits]}


def _chosen_endpoint() -> dict[str, Any]:
    return {
        "name": "chosen_endpoint",
        "type": "ORIGINAL_DST",
        "connect_timeout": f"{CONNECT_S_MAX}s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _many(),
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION_HEADER},
    }


def _picker(place: Place) -> dict[str, Any]:
    http2: Mapping[str, Any] = {
        "initial_stream_window_size": HTTP2_STREAM_BYTES,
        "initial_connection_window_size": HTTP2_CONNECTION_BYTES,
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": f"{CONNECT_S_MAX}s",
        "circuit_breakers": _many(),
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "10s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 2,
                "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
            }
        ],
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": OPTIONS,
                "explicit_http_config": {"http2_protocol_options": dict(http2)},
            }
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket("127.0.0.1", place.grpc)}}]}],
        },
    }
