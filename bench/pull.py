"""How fast models come: greenroom's pull beside curl of the same blob, from a docker-registry on this machine.

    python -m bench.pull [--mib 1024] [--rounds 5] [--folder DIR]

Both write the same bytes to the same disk, by turns, so that what else the machine does meets both.  curl neither checks what it
got nor makes sure that it is on the disk; a pull does both.  `share` is greenroom's speed over curl's: the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.harness import free_port, median, print_table, process, workplace
from greenroom.store.facts import Reference, Stored
from greenroom.store.library import Library
from greenroom.store.pull import Options, Puller
from greenroom.store.push import Pusher, loose
from greenroom.store.references import parse

CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def write_model(path: Path, mib: int) -> Path:
    """A GGUF file of about so many MiB, with random weights."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("bench")
    random = np.random.default_rng(0)
    for number in range(max(1, mib // 64)):
        writer.add_tensor(f"blk.{number}.ffn_up.weight", random.standard_normal((1 << 12, 1 << 12), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="", help="where everything is written; default: a temporary folder")
    options = parser.parse_args()
    for program in ("docker-registry", "curl"):
        if shutil.which(program) is None:
            sys.exit(f"bench.pull: {program} is not on PATH")
    with workplace(options.folder) as work:
        measure(work, options.mib, options.rounds)


def measure(work: Path, mib: int, rounds: int) -> None:
    port = free_port()
    config = work / "registry.yml"
    config.write_text(CONFIG.format(root=work / "registry", port=port), encoding="utf-8")
    reference = parse(f"oci://127.0.0.1:{port}/bench/model:v1")
    with process(["docker-registry", "serve", str(config)], port, work, ready_path="/v2/", name="registry"):
        stored = loose(write_model(work / "model.gguf", mib))
        uvloop.run(pushed(work, stored, reference))
        os.sync()  # what was written to get here is no part of the first round
        blob = f"http://127.0.0.1:{port}/v2/{reference.path}/blobs/{stored.files[0].digest}"
        command = [str(Path(sys.executable).with_name("greenroom")), "pull", "-q", str(reference)]
        rates: dict[str, list[float]] = {"curl": [], "pull": [], "greenroom pull": []}
        for _ in range(rounds):
            rates["curl"].append(rate(stored.size, timed(["curl", "-sf", "-o", str(work / "curl.out"), blob])))
            (work / "curl.out").unlink()
            began = time.perf_counter()
            uvloop.run(pulled(work, reference))
            rates["pull"].append(rate(stored.size, time.perf_counter() - began))
            shutil.rmtree(work / "store")
            rates["greenroom pull"].append(rate(stored.size, timed(command, work / "store")))
            shutil.rmtree(work / "store")
    shares = {name: [mine / other for mine, other in zip(found, rates["curl"], strict=True)] for name, found in rates.items()}
    rows = [["", "MB/s", "share of curl", "lowest", "highest"]]
    for name, found in rates.items():
        share = shares[name]
        rows.append([name, f"{median(found):.0f}", f"{median(share):.2f}", f"{min(share):.2f}", f"{max(share):.2f}"])
    print(f"{stored.size / 1e6:.0f} MB, {rounds} rounds, {os.cpu_count()} CPUs; `greenroom pull` includes its start")
    print_table(rows)
    print(json.dumps({name: round(median(share), 3) for name, share in shares.items()}))


async def pushed(work: Path, stored: Stored, reference: Reference) -> None:
    await Pusher(Library(work / "unused")).push(stored, reference, "modelpack")


async def pulled(work: Path, reference: Reference) -> None:
    await Puller(Library(work / "store"), Options(alone=True)).pull(reference)


def timed(command: Sequence[str], store: Path | None = None) -> float:
    began = time.perf_counter()
    environment = {**os.environ, **({"GREENROOM_MODELS": str(store)} if store else {})}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began


def rate(size: int, seconds: float) -> float:
    return size / seconds / 1e6


if __name__ == "__main__":
    main()
