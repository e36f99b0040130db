"""The rig without vLLM: what the ledger says is what greenroom sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .rig import MIB, PretendGpu

LOOK = """
import json
from greenroom.host.gpus import Gpus
gpus = Gpus()
(gpu,) = gpus.discover()
sample = gpus.sample(gpu.uuid)
print(json.dumps([gpu.uuid, gpu.total_mib, sample.used_mib, sample.processes]))
"""


def test_greenroom_sees_the_ledger_as_a_gpu(tmp_path: Path) -> None:
    """Size, what another program holds, and what each process holds."""
    with PretendGpu(tmp_path, 2000) as gpu, gpu.taken_outside(300):
        gpu.ledger.take(500 * MIB)
        gpu.show()
        seen = subprocess.run([sys.executable, "-c", LOOK], env={**os.environ, **gpu.env}, capture_output=True, text=True, check=True)

    assert json.loads(seen.stdout) == ["GPU-pretend", 2000, 800, {str(os.getpid()): 500}]
