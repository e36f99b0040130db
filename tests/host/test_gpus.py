"""GPUs through the real NVML binding, over a stand-in library driven by a text file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.host.gpus import GpuError, GpuInfo, Gpus, here
from tests.fakes import nvml

GIB = 1024**3
MIB = 1024**2

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here to build the stand-in NVML library")

ASK = """
import json, sys
from dataclasses import asdict
from greenroom.host.gpus import GpuError, GpuLost, Gpus

def tell(ask):
    try:
        return ask()
    except GpuError as exc:
        return {type(exc).__name__: str(exc)}

gpus = Gpus()
answers = []
for word in sys.argv[1:]:
    if word == "discover":
        found = gpus.discover()
        answers.append({"found": [asdict(each) for each in found], "why_none": gpus.why_none})
    elif word.startswith("write:"):
        import os
        with open(os.environ["FAKE_NVML"], "w") as file:
            file.write(word[6:])
    else:
        answers.append(tell(lambda: asdict(gpus.sample(word))))
gpus.close()
gpus.close()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    nvml.build(folder)
    return folder


@pytest.fixture
def ask(library, tmp_path):
    """ask(machine, words...): the answers of a fresh process on that machine (None: no driver loaded)."""

    def run(machine: str | None, *words: str) -> list[dict]:
        state = tmp_path / "machine"
        if machine is not None:
            state.write_text(machine)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(state)}
        done = subprocess.run([sys.executable, "-c", ASK, *words], env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        answers = json.loads(done.stdout)
        for answer in answers:
            if "processes" in answer:
                answer["processes"] = {int(pid): mib for pid, mib in answer["processes"].items()}
        return answers

    return run


TWO = (
    f"gpu 0 GPU-aaa {8 * GIB} {GIB} 0 Slow 8G\n"
    f"gpu 1 GPU-bbb {24 * GIB} 0 -1 Fast 24G\n"
    f"proc 0 -1 41 {2 * GIB}\nproc 0 -1 42 {GIB}\nproc 0 -1 43 -1\n"
)
SPLIT = (
    f"gpu 0 GPU-aaa {80 * GIB} {GIB} 1 Card\n"
    f"mig 0 0 MIG-111 {40 * GIB} {GIB // 2} 1 0 Card MIG 3g.40gb\n"
    f"mig 0 3 MIG-222 {20 * GIB} 0 5 0 Card MIG 2g.20gb\n"
    f"proc 0 0 41 {2 * GIB}\nproc 0 3 42 {GIB}\n"
    f"gpu 1 GPU-bbb {80 * GIB} 0 0 Card\n"
)


def infos(answer: dict) -> list[GpuInfo]:
    return [GpuInfo(**each) for each in answer["found"]]


def test_gpus_are_listed_in_bus_order_by_uuid(ask):
    """Names, sizes, UUIDs; a card without MIG is no problem."""
    (answer,) = ask(TWO, "discover")
    assert infos(answer) == [GpuInfo(0, "GPU-aaa", "Slow 8G", 8192), GpuInfo(1, "GPU-bbb", "Fast 24G", 24576)]
    assert answer["why_none"] == ""


def test_a_gpu_in_mig_mode_is_its_parts(ask):
    """The whole card cannot be used then; its MIG devices have UUIDs and sizes of their own, and slots may be empty."""
    (answer,) = ask(SPLIT, "discover")
    assert infos(answer) == [
        GpuInfo(0, "MIG-111", "Card MIG 3g.40gb", 40960, "mig", "GPU-aaa"),
        GpuInfo(0, "MIG-222", "Card MIG 2g.20gb", 20480, "mig", "GPU-aaa"),
        GpuInfo(1, "GPU-bbb", "Card", 81920),
    ]


def test_use_is_sampled_with_its_processes(ask):
    """Used memory of all, and by pid; a process of unknown size is left out."""
    first, idle = ask(TWO, "GPU-aaa", "GPU-bbb")
    assert first == {"used_mib": 4096, "processes": {41: 2048, 42: 1024}}
    assert idle == {"used_mib": 0, "processes": {}}


def test_a_mig_device_shows_only_its_own_use(ask):
    """Neighbours on the same card do not count."""
    assert ask(SPLIT, "MIG-111", "MIG-222") == [
        {"used_mib": 2560, "processes": {41: 2048}},
        {"used_mib": 1024, "processes": {42: 1024}},
    ]


def test_changes_are_seen(ask):
    """A sample is taken anew each time."""
    _, before, after = ask(TWO, "discover", "GPU-aaa", "write:" + TWO.replace(f"proc 0 -1 41 {2 * GIB}\n", ""), "GPU-aaa")
    assert (before["used_mib"], after["used_mib"]) == (4096, 2048)


def test_memory_is_rounded_up(ask):
    """A byte over is a MiB more: the book never promises what is not there."""
    (answer,) = ask(f"gpu 0 GPU-aaa {GIB} 1 0 Card\nproc 0 -1 41 {MIB + 1}\n", "GPU-aaa")
    assert answer == {"used_mib": 2, "processes": {41: 2}}


def test_a_lost_gpu_is_told_apart_from_a_driver_that_refuses(ask):
    """15 (lost) is GpuLost; 999 is a GpuError that may pass."""
    lost, back, refused = ask(
        TWO, "write:" + TWO + "failgpu 0 15\n", "GPU-aaa", "write:" + TWO, "GPU-aaa", "write:" + TWO + "fail 999\n", "GPU-aaa"
    )
    assert lost == {"GpuLost": "GPU-aaa is gone: GPU is lost. Look at `nvidia-smi` and the kernel log."}
    assert back["used_mib"] == 4096
    assert list(refused) == ["GpuError"]


def test_an_unknown_uuid_is_a_lost_gpu(ask):
    """A MIG device that was repartitioned away."""
    (answer,) = ask(SPLIT, "MIG-333")
    assert list(answer) == ["GpuLost"]


def test_one_sick_card_does_not_hide_the_others(ask):
    """It is named in `why_none`."""
    (answer,) = ask(TWO + "failgpu 0 15\n", "discover")
    assert [each.uuid for each in infos(answer)] == ["GPU-bbb"]
    assert answer["why_none"] == "GPU 0 does not answer: GPU is lost."


def test_a_driver_that_was_reloaded_is_opened_again(ask, tmp_path):
    """ "Driver not loaded" in between is a lost GPU, later it is there again."""
    gone, back = ask(TWO, "discover", "write:fail 9\n", "GPU-aaa", "write:" + TWO, "GPU-aaa")[1:]
    assert list(gone) == ["GpuLost"]
    assert back["used_mib"] == 4096


def test_memory_shared_with_the_host_is_unknown_not_zero_used(ask):
    """Some GPUs have no memory of their own to report."""
    (found, sample) = ask(TWO + "nomemory\n", "discover", "GPU-aaa")
    assert [each.total_mib for each in infos(found)] == [0, 0]
    assert sample == {"used_mib": None, "processes": {41: 2048, 42: 1024}}


def test_no_driver_is_a_normal_answer(ask):
    """No error, no GPU, one sentence."""
    answer, sample = ask(None, "discover", "GPU-aaa")
    assert answer == {"found": [], "why_none": "no NVIDIA driver here (Driver Not Loaded)."}
    assert list(sample) == ["GpuLost"]


def test_no_gpu_under_a_driver_is_a_normal_answer(ask):
    """The list is empty and says so."""
    (answer,) = ask("", "discover")
    assert answer == {"found": [], "why_none": "the NVIDIA driver lists no GPU (or only GPUs in MIG mode without a MIG device)."}


@pytest.mark.parametrize("answers", [True, False])
def test_what_is_here_is_asked_once_and_the_driver_left_again(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """No answer is no card."""
    card = GpuInfo(0, "GPU-a", "L4", 24_000)
    left: list[Gpus] = []

    def discover(gpus: Gpus) -> tuple[GpuInfo, ...]:
        if not answers:
            raise GpuError("it does not answer")
        return (card,)

    def close(gpus: Gpus) -> None:
        left.append(gpus)

    monkeypatch.setattr(Gpus, "discover", discover)
    monkeypatch.setattr(Gpus, "close", close)
    assert here() == ((card,) if answers else ())
    assert len(left) == 1


def test_no_library_is_a_normal_answer(tmp_path):
    """A machine without any NVIDIA software."""
    code = "from greenroom.host.gpus import Gpus; gpus = Gpus(); print(gpus.discover(), gpus.why_none)"
    if any(
        Path(folder, "libnvidia-ml.so.1").exists() for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/aarch64-linux-gnu")
    ):
        pytest.skip("this machine has the NVIDIA library")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("() no NVIDIA driver here (")
