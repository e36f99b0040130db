"""A podman or a docker that makes no containers: it records what it is asked, and runs the engine as a plain process.

    container_runtime.py podman|docker STATE_FOLDER COMMAND ...        (see `install`)

As with the real ones the engine is no child of the client: a monitor that nobody waits for runs it, keeps its words and
tells how it ended.  Killing the client leaves both.  Words, exit codes and JSON shapes are those of podman 4.3 and docker 28.

In the state folder:
calls.jsonl      a line for every call: argv, and the environment that `run` hands in by name
containers/      a JSON file each, and its log (a moment before each line)
images           the images that are here, one a line
registry         those that can be pulled
faults.json      {command: fault}; read at every call.  hang | down | slow:S | fail:CODE:WORDS | ignore (says yes, does nothing)

Standard library only.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

POLL_S = 0.01
VALUED = frozenset(
    {"--name", "--label", "--pull", "--publish", "--device", "--gpus", "--cap-drop", "--security-opt", "--pids-limit", "--shm-size",
     "--log-driver", "--log-opt", "--stop-timeout", "--volume", "--mount", "--env", "--entrypoint", "--network", "--group-add", "--memory",
     "--ipc", "--user"}
)  # fmt: skip
PLAIN = frozenset({"--rm", "--no-healthcheck", "--replace", "--init"})
NEVER = "0001-01-01T00:00:00Z"


def install(folder, kind, state):
    """Put a program named `podman` or `docker` into a folder; its state lies in another."""
    for each in (folder, state, state / "containers"):
        each.mkdir(parents=True, exist_ok=True)
    program = folder / kind
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{Path(__file__).resolve()}" {kind} "{state}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


class Gone(Exception):
    """There is no such container."""


class Runtime:
    def __init__(self, kind, state):
        self.kind, self.state, self.podman = kind, Path(state), kind == "podman"
        self.folder = self.state / "containers"

    # ------------------------------------------------------------------------------------------------------- the store

    def faults(self):
        try:
            return json.loads((self.state / "faults.json").read_text())
        except (OSError, ValueError):
            return {}

    def names_in(self, file):
        try:
            return set((self.state / file).read_text().split())
        except OSError:
            return set()

    @contextlib.contextmanager
    def locked(self):
        with (self.state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def all(self):
        found = []
        for path in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def find(self, name):
        for box in self.all():
            if name in (box["Name"], box["Id"]) or (len(name) >= 12 and box["Id"].startswith(name)):
                return box
        raise Gone(name)

    def put(self, box):
        path = self.folder / f"{box['Id']}.json"
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(box))
        new.rename(path)

    def change(self, ident, **state):
        with self.locked():
            box = self.find(ident)
            box["State"] |= state
            self.put(box)

    def drop(self, box):
        for suffix in (".json", ".log"):
            (self.folder / (box["Id"] + suffix)).unlink(missing_ok=True)

    def log_of(self, box):
        return self.folder / f"{box['Id']}.log"

    # ------------------------------------------------------------------------------------------------------- the calls

    def call(self, argv):
        command = "image" if argv[:1] == ["image"] else argv[0] if argv else "help"
        handed_in = {
            word: os.environ.get(word) for option, word in zip(["", *argv], argv, strict=False) if option == "--env" and "=" not in word
        }
        with (self.state / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), "argv": argv, "env": handed_in, "pid": os.getpid()}) + "\n")
        self.suffer(self.faults().get(command, "") or self.faults().get("*", ""), command)
        known = {"run": self.run, "ps": self.ps, "stop": self.stop, "kill": self.kill, "rm": self.rm, "inspect": self.inspect,
                 "logs": self.logs, "pull": self.pull, "image": self.image, "version": self.version}  # fmt: skip
        if command not in known:
            self.fail(125 if self.podman else 1, f'unknown command "{command}"')
        known[command](argv[1:])

    def suffer(self, fault, command):
        kind, _, rest = fault.partition(":")
        if kind == "hang":
            while True:
                time.sleep(3600)
        if kind == "slow":
            time.sleep(float(rest))
        if kind == "ignore":
            sys.exit(0)
        if kind == "fail":
            code, _, said = rest.partition(":")
            sys.stderr.write(said + "\n")
            sys.exit(int(code))
        if kind == "down":
            said = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
            if command == "run":
                sys.stderr.write(f"docker: {said}\n\nRun 'docker run --help' for more information\n")
                sys.exit(125)
            if command in ("inspect", "image"):
                print("[]")
            sys.stderr.write(said + "\n")
            sys.exit(1)

    def fail(self, code, said, *, running=False):
        if self.podman:
            sys.stderr.write(f"Error: {said}\n")
        elif running:
            sys.stderr.write(f"docker: Error response from daemon: {said}\n\nRun 'docker run --help' for more information\n")
        else:
            sys.stderr.write(f"Error response from daemon: {said}\n")
        sys.exit(code)

    def absent(self, name):
        if self.podman:
            self.fail(125, f'no container with name or ID "{name}" found: no such container')
        self.fail(1, f"No such container: {name}")

    def version(self, _):
        print(f"{self.kind} version 0")

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self, argv):
        options, image, command = self.parse(argv)
        if image not in self.names_in("images"):
            if options.get("--pull", ["missing"])[-1] == "never":
                self.fail(125, f"{image}: image not known" if self.podman else f"No such image: {image}", running=True)
            self.pull([image])
        name = options["--name"][-1]
        ident = hashlib.sha256(f"{name} {time.monotonic_ns()}".encode()).hexdigest()
        with self.locked():
            for other in self.all():
                if other["Name"] == name:
                    self.taken(name, other["Id"])
            labels = dict(label.split("=", 1) for label in options.get("--label", []))
            state = {"Status": "created", "Running": False, "Paused": False, "Restarting": False, "OOMKilled": False, "Dead": False,
                     "Pid": 0, "ExitCode": 0, "Error": "", "StartedAt": NEVER, "FinishedAt": NEVER}  # fmt: skip
            box = {"Id": ident, "Name": name, "Image": image, "Created": now(), "State": state, "Labels": labels, "Args": command,
                   "AutoRemove": "--rm" in options, "options": options}  # fmt: skip
            self.log_of(box).touch()
            self.put(box)
        program = [*options["--entrypoint"][-1:], *command] if "--entrypoint" in options else command
        self.start(box, program, self.environment(options))
        sys.exit(self.attach(box))

    def parse(self, argv):
        options = {}
        index = 0
        while index < len(argv) and argv[index].startswith("-"):
            name, equals, value = argv[index].partition("=")
            if name in PLAIN:
                options.setdefault(name, []).append(value or "true")
                index += 1
                continue
            if name not in VALUED or (name == "--gpus" and self.podman) or (name == "--replace" and not self.podman):
                sys.stderr.write(f"{'Error: ' if self.podman else ''}unknown flag: {name}\nSee '{self.kind} run --help'.\n")
                sys.exit(125)
            options.setdefault(name, []).append(value if equals else argv[index + 1])
            index += 1 if equals else 2
        if index >= len(argv):
            self.fail(125, "requires at least 1 arg(s), only received 0")
        return options, argv[index], argv[index + 1 :]

    def taken(self, name, ident):
        if self.podman:
            self.fail(125, f'creating container storage: the container name "{name}" is already in use by {ident}. You have to remove that '
                           "container to be able to reuse that name: that name is already in use")  # fmt: skip
        self.fail(125, f'Conflict. The container name "/{name}" is already in use by container "{ident}". You have to remove (or rename) '
                       "that container to be able to reuse that name.", running=True)  # fmt: skip

    def environment(self, options):
        env = {"PATH": os.environ.get("PATH", os.defpath), "container": self.kind}
        for word in options.get("--env", []):
            name, equals, value = word.partition("=")
            if equals or name in os.environ:
                env[name] = value if equals else os.environ[name]
        return env

    def start(self, box, program, env):
        """Fork the monitor, and return when it runs the engine."""
        ready, tell = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.close(ready)
            try:
                self.monitor(box, program, env, tell)
            finally:
                os._exit(0)
        os.wait()
        os.close(tell)
        said = b""
        while part := os.read(ready, 4096):
            said += part
        if said != b"ok":
            code, _, words = said.decode().partition(":")
            self.fail(int(code or 126), words, running=True)

    def monitor(self, box, program, env, tell):
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        try:
            child = subprocess.Popen(program, env=env, stdin=null, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as exc:
            words = (
                f"crun: executable file `{program[0]}` not found in $PATH: No such file or directory ({exc.strerror}): OCI runtime error"
            )
            self.change(box["Id"], Status="exited", ExitCode=127, FinishedAt=now())
            os.write(tell, f"127:{words}".encode())
            return
        self.change(box["Id"], Status="running", Running=True, Pid=child.pid, StartedAt=now())
        with contextlib.suppress(BrokenPipeError):  # the client was killed meanwhile
            os.write(tell, b"ok")
        os.close(tell)
        with self.log_of(box).open("ab", buffering=0) as log:
            for line in child.stdout:
                log.write(f"{time.time():.6f} ".encode() + line.rstrip(b"\n") + b"\n")
        code = child.wait()
        killed = code == -signal.SIGKILL
        oom = killed and bool(self.faults().get("oom"))
        code = 128 - code if code < 0 else code
        self.change(box["Id"], Status="exited", Running=False, Pid=0, ExitCode=code, OOMKilled=oom, FinishedAt=now())
        if box["AutoRemove"]:
            with self.locked():
                self.drop(box)

    def attach(self, box):
        """Print what it prints, hand signals on, and end as it ends."""
        last = [0]

        def pass_on(number, _):
            with contextlib.suppress(Gone, ProcessLookupError):
                os.kill(self.find(box["Id"])["State"]["Pid"] or 1 << 30, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, pass_on)
        with self.log_of(box).open("rb") as log:
            while True:
                try:
                    state = self.find(box["Id"])["State"]
                except Gone:
                    state = {"Status": "exited", "ExitCode": 137}
                self.copy(log, last)
                if state["Status"] == "exited":
                    return state["ExitCode"]
                time.sleep(POLL_S)

    def copy(self, log, last, since=0.0):
        for raw in log.readlines():
            if not raw.endswith(b"\n"):
                log.seek(-len(raw), os.SEEK_CUR)
                break
            moment, _, line = raw.partition(b" ")
            last[0] = float(moment)
            if last[0] >= since:
                os.write(1, line)

    # ------------------------------------------------------------------------------------------------------- and later

    def ps(self, argv):
        wanted = [word.removeprefix("label=") for option, word in zip(["", *argv], argv, strict=False) if option == "--filter"]
        boxes = [box for box in self.all() if "--all" in argv or box["State"]["Running"]]
        for label in wanted:
            key, equals, value = label.partition("=")
            boxes = [box for box in boxes if key in box["Labels"] and (not equals or box["Labels"][key] == value)]
        if self.podman:
            shown = [
                {"AutoRemove": box["AutoRemove"], "Command": box["Args"], "Exited": box["State"]["Status"] == "exited", "Id": box["Id"],
                 "Image": box["Image"], "Labels": box["Labels"], "Names": [box["Name"]], "Pid": box["State"]["Pid"],
                 "State": box["State"]["Status"], "Status": box["State"]["Status"].capitalize()}
                for box in boxes
            ]  # fmt: skip
            print(json.dumps(shown, indent=2))
            return
        for box in boxes:
            labels = ",".join(f"{key}={value}" for key, value in box["Labels"].items())
            print(
                json.dumps(
                    {"ID": box["Id"], "Image": box["Image"], "Labels": labels, "Names": box["Name"], "State": box["State"]["Status"]}
                )
            )

    def inspect(self, argv):
        name = argv[-1]
        try:
            box = self.find(name)
        except Gone:
            print("[]")
            self.fail(*((125, f"inspecting object: no such container {name}") if self.podman else (1, f"No such container: {name}")))
        shown = {key: box[key] for key in ("Id", "Created", "Name", "Image", "Args", "State")}
        if self.faults().get("far"):
            shown["State"] = {**shown["State"], "Pid": 0}
        shown["Name"] = shown["Name"] if self.podman else "/" + shown["Name"]
        print(json.dumps([{**shown, "Config": {"Labels": box["Labels"], "Image": box["Image"]}}]))

    def each(self, names):
        found, lost = [], []
        for name in names:
            try:
                found.append(self.find(name))
            except Gone:
                lost.append(name)
        return found, lost

    def over(self, box, within_s):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                if self.find(box["Id"])["State"]["Status"] == "exited":
                    return True
            except Gone:
                return True
            time.sleep(POLL_S)
        return False

    def signal(self, box, number):
        pid = box["State"]["Pid"]
        if box["State"]["Running"] and pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if number == signal.SIGKILL:  # all of its processes go with the first
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)

    def stop(self, argv):
        grace_s = int(argv[argv.index("-t") + 1])
        found, lost = self.each(word for option, word in zip(["", *argv], argv, strict=False) if option != "-t" and word != "-t")
        for box in found:
            if box["State"]["Running"]:
                self.signal(box, signal.SIGTERM)
                if not self.over(box, grace_s):
                    self.signal(box, signal.SIGKILL)
                    self.over(box, 10)
            print(box["Name"])
        if lost:
            self.absent(lost[0])

    def kill(self, argv):
        number = signal.SIGKILL
        if argv[:1] == ["--signal"]:
            number, argv = signal.Signals[f"SIG{argv[1]}"], argv[2:]
        found, lost = self.each(argv)
        idle = [box for box in found if not box["State"]["Running"]]
        for box in found:
            self.signal(box, number)
        if lost:
            self.absent(lost[0])
        if idle:
            if self.podman:
                self.fail(
                    125,
                    f"can only kill running containers. {idle[0]['Id']} is in state {idle[0]['State']['Status']}: container state improper",
                )
            self.fail(1, f"cannot kill container: {idle[0]['Name']}: container {idle[0]['Id']} is not running")

    def rm(self, argv):
        force = "--force" in argv
        found, lost = self.each(word for word in argv if not word.startswith("-"))
        for box in found:
            if box["State"]["Running"]:
                if not force:
                    self.fail(2, f"cannot remove container {box['Id']} as it is running")
                if self.podman:  # it asks nicely first
                    self.signal(box, signal.SIGTERM)
                    self.over(box, 10)
                self.signal(self.find(box["Id"]), signal.SIGKILL)
                self.over(box, 10)
            with self.locked():
                self.drop(box)
            print(box["Name"])
        if lost and not (force and self.podman):
            self.absent(lost[0])

    def logs(self, argv):
        if self.faults().get("silent_log"):
            self.fail(1, "configured logging driver does not support reading")
        since = 0.0
        if "--since" in argv:
            since = time.time() - float(argv[argv.index("--since") + 1].removesuffix("s"))
        try:
            box = self.find(argv[-1])
        except Gone:
            self.absent(argv[-1])
        with self.log_of(box).open("rb") as log:
            while True:
                over = self.over(box, 0.0) or self.is_over(box)
                self.copy(log, [0], since)
                if over or "--follow" not in argv:
                    return
                time.sleep(POLL_S)

    def is_over(self, box):
        try:
            return not self.find(box["Id"])["State"]["Running"]
        except Gone:
            return True

    # ---------------------------------------------------------------------------------------------------------- images

    def image(self, argv):
        name = argv[-1]
        if name in self.names_in("images"):
            print("sha256:" + hashlib.sha256(name.encode()).hexdigest())
            return
        if argv[0] == "inspect":
            print("[]")
        self.fail(*((125, f"inspecting object: {name}: image not known") if self.podman else (1, f"No such image: {name}")))

    def pull(self, argv):
        name = argv[-1]
        sys.stderr.write(f"Trying to pull {name}...\n" if self.podman else "")
        if name not in self.names_in("registry"):
            if self.podman:
                self.fail(125, f"initializing source docker://{name}: reading manifest latest in {name}: manifest unknown")
            self.fail(1, f"manifest for {name} not found: manifest unknown: manifest unknown")
        with self.locked(), (self.state / "images").open("a") as file:
            file.write(name + "\n")
        print(
            "Getting image source signatures\nWriting manifest to image destination"
            if self.podman
            else f"Status: Downloaded newer image for {name}"
        )


def now():
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


if __name__ == "__main__":
    Runtime(sys.argv[1], sys.argv[2]).call(sys.argv[3:])
