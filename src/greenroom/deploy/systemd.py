"""A unit that runs greenroom on a bare host, with its engines as its processes.  `Intent -> Files`."""

from __future__ import annotations

import math
import shlex

from greenroom.config.errors import one_line
from greenroom.config.model import ModelConfig
from greenroom.deploy import escape
from greenroom.deploy.commands import dialect
from greenroom.deploy.files import commented, head
from greenroom.deploy.intent import Files, Intent, Workload
from greenroom.deploy.own import CONFIG_FILE
from greenroom.deploy.unfit import Unfit

PROGRAM = "/usr/local/bin/greenroom"
START_S = 90
STOP_SLACK_S = 15
RESTART_S = 2
STARTS_MAX, STARTS_WINDOW_S = 5, 600
FILES_MAX = 65536
EXIT_CONFIGURATION = 2  # trying again would not help
FOLDER = {"system": "/etc/systemd/system", "user": "~/.config/systemd/user"}
CONFIG_FOLDER = {"system": "/etc/greenroom", "user": "~/.config/greenroom"}

# What engines need is left open: devices, memory that is written and executed (compilers on the fly), /proc of others (who holds the card).
HARDENING = (
    "NoNewPrivileges=true",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=true",
    "ProtectKernelTunables=true",
    "ProtectKernelModules=true",
    "ProtectKernelLogs=true",
    "ProtectControlGroups=true",
    "ProtectClock=true",
    "ProtectHostname=true",
    "RestrictNamespaces=true",
    "RestrictRealtime=true",
    "RestrictSUIDSGID=true",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "LockPersonality=true",
    "SystemCallArchitectures=native",
    "UMask=0077",
)
# A user's manager may not set up mounts and capabilities everywhere.
USER_HARDENING = ("NoNewPrivileges=true", "RestrictSUIDSGID=true", "LockPersonality=true", "UMask=0077")
# podman without root calls newuidmap, makes namespaces and unpacks set-uid files: each of the above would end it.
CONTAINER_HARDENING = ("Delegate=yes", "UMask=0077")
HOMES = tuple(f"/{name}/" for name in ("home", "root"))


def files(intent: Intent, *, user: bool = False, program: str = PROGRAM, run_as: str = "") -> Files:
    """The unit, the configuration it reads, and an example of the secrets' file.

    `user`: for a user's own manager.  `run_as`: an account of the system; "" = one that exists only while it runs.
    """
    workload = intent.workloads[0]
    if intent.mode != "greenroom" or workload.model:
        raise Unfit("a bare host runs greenroom with its engines as processes; leave --mode engines to quadlet, compose or kube")
    if not program.startswith("/"):
        raise Unfit(f"systemd wants the whole path of a program; {program!r} is none: give --program /usr/local/bin/greenroom")
    contained = [model.id for model in intent.config.models if _is_contained(model)]
    if contained and not user and not run_as:
        raise Unfit(
            f"{contained[0]} runs in a container, and an account that is made for each start can start none: "
            "give --run-as ACCOUNT (one that may use podman or docker), or --user"
        )
    out = {f"{intent.name}.service": _unit(intent, workload, user, program, run_as), CONFIG_FILE: intent.config_text}
    if workload.secret_env:
        lines = head(
            intent.options.get("command", ""),
            f"Copy it to {intent.name}.env beside {CONFIG_FILE} (chmod 600) and write each value between its quotes.",
        )
        out[f"{intent.name}.env.example"] = commented(lines) + "".join(f"{name}=''\n" for name, _ in workload.secret_env)
    return out


def _unit(intent: Intent, workload: Workload, user: bool, program: str, run_as: str) -> str:
    unit = [
        f"Description={escape.line(f'greenroom: {len(intent.config.models)} models on one address')}",
        *([] if user else ["Wants=network-online.target", "After=network-online.target"]),
        f"StartLimitIntervalSec={STARTS_WINDOW_S}",
        f"StartLimitBurst={STARTS_MAX}",
        # Models on a disk that is mounted later than the network is up.
        *(f"RequiresMountsFor={escape.value_word(mount.source)}" for mount in workload.mounts if mount.read_only and not user),
    ]
    written = [f"ReadWritePaths={escape.value_word(f'-{mount.source}')}" for mount in workload.mounts if not mount.read_only and not user]
    service = [
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={_command(workload, program, intent.name)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        *([f"EnvironmentFile=%E/greenroom/{intent.name}.env"] if workload.secret_env else []),
        *_account(intent, user, run_as),
        f"StateDirectory={intent.name}",
        "StateDirectoryMode=0700",
        f"CacheDirectory={intent.name}",
        *([] if user else [f"Environment=HOME=%C/{intent.name} XDG_CACHE_HOME=%C/{intent.name} XDG_DATA_HOME=%S/{intent.name}"]),
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={EXIT_CONFIGURATION}",
        f"TimeoutStartSec={START_S}",
        # greenroom ends its engines itself, each with its grace; what is left then is killed with it.
        "KillMode=mixed",
        f"TimeoutStopSec={math.ceil(workload.stop_s) + STOP_SLACK_S}",
        "LimitMEMLOCK=infinity",
        f"LimitNOFILE={FILES_MAX}",
        # One engine that the kernel ends for its memory is greenroom's business, not the end of all.
        "OOMPolicy=continue",
        *_hardening(intent, user, written),
    ]
    install = ["WantedBy=default.target" if user else "WantedBy=multi-user.target"]
    text = commented(
        head(
            intent.options.get("command", ""),
            *_steps(intent, workload, user),
            *_needs(intent, workload, user, run_as, program),
            *intent.notes,
        )
    )
    sections = (("Unit", unit), ("Service", service), ("Install", install))
    return text + "".join(f"\n[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections if lines)


def _command(workload: Workload, program: str, name: str) -> str:
    """The workload's own, with the places that systemd gives it."""
    listen = workload.argv[workload.argv.index("--listen") + 1]
    rest = ["--no-auth"] if "--no-auth" in workload.argv else []
    words = escape.words(["serve", "--listen", listen, *rest])
    return f"{escape.word(program)} {words} --config %E/greenroom/{CONFIG_FILE} --state-dir %S/{name}"


def _account(intent: Intent, user: bool, run_as: str) -> list[str]:
    if user:
        return []
    # Nodes of NVIDIA cards are open to everybody; a group that a host lacks would end the start.
    groups = ["SupplementaryGroups=video render"] if intent.target in ("amd", "intel") else []
    return [f"User={escape.value_word(run_as)}", *groups] if run_as else ["DynamicUser=true", *groups]


def _hardening(intent: Intent, user: bool, written: list[str]) -> tuple[str, ...]:
    if any(map(_is_contained, intent.config.models)):
        return CONTAINER_HARDENING
    return USER_HARDENING if user else (*HARDENING, *written)


def _is_contained(model: ModelConfig) -> bool:
    return model.container is not None or dialect(model).command.client


def _needs(intent: Intent, workload: Workload, user: bool, run_as: str, program: str) -> tuple[str, ...]:
    """What this host must have, or the first start fails."""
    said = []
    bare = {argv[0] for model in intent.config.models if not _is_contained(model) and (argv := dialect(model).command.argv)}
    if looked_for := sorted(word for word in bare if "/" not in word):
        said.append(
            f"{', '.join(map(one_line, looked_for))}: looked for in /usr/local/bin and /usr/bin; elsewhere, write whole paths into `cmd`"
        )
    paths = [program, *(mount.source for mount in workload.mounts)]
    at_home = next((path for path in paths if _is_in_a_home(path, but=run_as)), "")
    if at_home and not user:
        whom, way = (one_line(run_as), "move") if run_as else ("the account that is made for each start", "give --run-as ACCOUNT, or move")
        said.append(f"{one_line(at_home)} may be closed to {whom}: {way} it to /srv")
    written = [one_line(mount.source) for mount in workload.mounts if not mount.read_only]
    if written and not user:
        said.append(f"{', '.join(written)} must be there, and writable for {run_as or 'that account'}")
    if run_as and any(map(_is_contained, intent.config.models)):
        said.append(f"{one_line(run_as)} needs a session of its own for podman: loginctl enable-linger {shlex.quote(run_as)}")
    return tuple(said)


def _is_in_a_home(path: str, *, but: str) -> bool:
    """`but`: of this account, which reads its own; root reads all."""
    inside, own = f"{path}/", "/" if but == "root" else f"/home/{but}/"
    return inside.startswith(HOMES) and not (but and inside.startswith(own))


def _steps(intent: Intent, workload: Workload, user: bool) -> tuple[str, ...]:
    kind = "user" if user else "system"
    systemctl = "systemctl --user" if user else "systemctl"
    secrets = f", {intent.name}.env (from the example, chmod 600)" if workload.secret_env else ""
    return (
        f"{intent.name}.service to {FOLDER[kind]}, {CONFIG_FILE}{secrets} to {CONFIG_FOLDER[kind]}",
        f"then: {systemctl} daemon-reload && {systemctl} enable --now {intent.name}",
        *(("It runs without anybody logged in after: loginctl enable-linger",) if user else ()),
    )
