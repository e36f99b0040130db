"""B27: a start was refused for a shortfall of a few MiB, again and again."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from .card import Card, Slot
from .rig import FE, Rig

TOTAL_MIB = 22_579
WANTED_MIB = 20_322  # 0.90 of the whole card
CARD = (Slot(0, "GPU-aaa", TOTAL_MIB),)
SAID = (
    "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def vllm(folder: Path, rig_home: Path, *knobs: str) -> str:
    """A program called `vllm` that behaves like the fake engine."""
    path = folder / "vllm"
    fixed = f"journal={rig_home / 'journal.jsonl'} claims={rig_home / 'claims'}"
    quoted = " ".join(f"'{knob}'" for knob in knobs)
    path.write_text(
        "#!/bin/sh\n"
        "while [ $# -gt 0 ]; do case $1 in --port) port=$2; shift;; --gpu-memory-utilization) share=$2; shift;; esac; shift; done\n"
        f"exec '{sys.executable}' -S -E '{FE}' --port $port model=$GREENROOM_TEST_MODEL {fixed} {quoted}\n"
    )
    path.chmod(0o755)
    return str(path)


def serving(program: str, model: str, share: str) -> dict[str, Any]:
    command = f"{program} serve some/{model} --port ${{PORT}} --gpu-memory-utilization {share}"
    return {"cmd": command, "env": {"GREENROOM_TEST_MODEL": model}, "checkEndpoint": "/health"}


def numbers(text: str) -> set[int]:
    return {int(each) for each in re.findall(r"\d+", text.replace(",", ""))}


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


async def test_a_share_of_the_card_that_is_not_free_is_refused_before_the_start(tmp_path: Path, bin_dir: Path) -> None:
    """0.90 of 22,579 MiB wants 20,322, another program leaves 20,244: nothing is started, and both numbers are told."""
    card = Card(tmp_path, CARD, foreign={77: (0, 2335)})
    models = {"a": serving(vllm(bin_dir, tmp_path, "vram=20000"), "a", "0.90")}
    config = {"devices": {"gpu0": {"headroom": "0MiB"}}, "scheduling": {"room_wait_s": 0.5}}
    async with card.rig(models, budget_mib=TOTAL_MIB, config=config) as rig:
        reply = await rig.chat("a")
        assert (reply.status, rig.starts("a")) == (503, 0)
        assert {WANTED_MIB, 20_244} <= numbers(reply.error["message"])
        # The other program shrinks to 335 MiB: it simply starts.
        card.foreign[77] = (0, 335)
        assert (await rig.chat("a")).done
        assert (rig.starts("a"), (await rig.model("a"))["need_mib"]) == (1, WANTED_MIB)


async def test_a_share_is_of_the_whole_card_not_of_what_is_free(tmp_path: Path, bin_dir: Path) -> None:
    """0.35 and 0.55 of the card live beside each other, each booked as its share of the total."""
    card = Card(tmp_path, CARD)
    program = vllm(bin_dir, tmp_path, "vram=7000")
    models = {"a": serving(program, "a", "0.55"), "b": serving(program, "b", "0.35")}
    config = {"devices": {"gpu0": {"headroom": "0MiB"}}}
    async with card.rig(models, budget_mib=TOTAL_MIB, config=config) as rig:
        await rig.warm("a", "b")
        assert [(await rig.model(name))["need_mib"] for name in "ab"] == [12_419, 7_903]
        assert (rig.starts("a"), rig.starts("b")) == (1, 1)


async def test_the_same_start_is_not_tried_again_after_the_engine_refused_it(tmp_path: Path, bin_dir: Path) -> None:
    """The probe is blind, so it is started: its last words are understood, told with both sizes, and not provoked a second time."""
    models = {"a": serving(vllm(bin_dir, tmp_path, f"log={SAID}", "fail=exit_at_start:1", "vram=0"), "a", "0.90")}
    config = {"devices": {"gpu0": {"memory": f"{TOTAL_MIB}MiB", "headroom": "0MiB", "probe": "none"}}}
    async with Rig(tmp_path, models, budget_mib=TOTAL_MIB, config=config) as rig:
        reply = await rig.chat("a")
        assert reply.status == 503
        assert {"19.77", "19.84"} <= set(re.findall(r"\d+\.\d+", reply.error["message"])) or {20_317, 20_245} <= numbers(
            reply.error["message"]
        )
        assert rig.starts("a") == 1
        again = await rig.chat("a")
        assert (again.status, int(again.headers["retry-after"]) >= 1, rig.starts("a")) == (503, True, 1)
        assert "share of the device" in (await rig.model("a"))["last_error"]
