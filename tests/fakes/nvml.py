"""The stand-in for NVIDIA's library, compiled."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "fake_nvml.c"
NAME = "libnvidia-ml.so.1"


def build(folder: Path) -> None:
    """Into a folder for LD_LIBRARY_PATH."""
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", folder / NAME, SOURCE], check=True)
