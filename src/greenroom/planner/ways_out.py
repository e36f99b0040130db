"""Ways out for models that take turns, each tried by a replay of the same requests."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from greenroom.core.facts import Device, Model, Setup, SleepTier
from greenroom.core.thrash import is_rate
from greenroom.core.words import gib
from greenroom.ledger.rows import SampleRow

from .replay import Scene, Trial, tried
from .thrash import Fix, Thrash

CUT_MAX = 0.5  # of a model's memory
CUT_EASY = 0.25
MARGIN_MIB = 64
CARDS_GIB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
BUS_MIB_S, RESIDUE_MIB = 20 * 1024, 1536  # of a sleep level that was never measured
LONG_TURNS = 5.0
GOOD_ENOUGH = 0.5  # a fix must leave at most so many of the swaps
WORSE_WAIT = 1.1

Contexts = Sequence[tuple[int, int]]  # (tokens, MiB freed on each device), the largest context first


def fixed(
    one: Thrash,
    scene: Scene,
    *,
    commands: Mapping[str, Sequence[str]] | None = None,
    contexts: Mapping[str, Contexts] | None = None,
    samples: Sequence[SampleRow] = (),
) -> tuple[Thrash, Trial]:
    """The same with its ways out, each replayed on the same arrivals; and the replay of things as they are."""
    base = tried(scene, name="as it is", keep=False)
    fixes = [_checked(fix, scene, base) for fix in candidates(one, scene, commands or {}, contexts or {}, samples)]
    good = [fix for fix in fixes if _helps(fix, base)]
    best = min(good, key=lambda fix: (fix.cost, fix.swaps), default=None)
    ranked = sorted((replace(fix, suggested=fix is best) for fix in fixes), key=lambda fix: (not fix.suggested, fix.cost))
    return replace(one, fixes=tuple(ranked)), base


def _checked(fix: Fix, scene: Scene, base: Trial) -> Fix:
    trial = tried(scene, fix.changes if fix.setup is None else (), setup=fix.setup, keep=False)
    now, then = base.figures, trial.figures
    refused = then.refused - now.refused
    waits = f"mean wait {now.mean_s:.1f} → {then.mean_s:.1f} s, worst {now.worst_s:.0f} → {then.worst_s:.0f} s"
    effect = f"{refused} of {then.requests} requests would be refused" if refused > 0 else waits
    return replace(
        fix,
        effect=effect,
        swaps=then.switches,
        swaps_h=scene.per_hour(then.switches),
        is_rate=is_rate(scene.seconds),
        mean_wait_s=then.mean_s,
        p95_wait_s=then.p95_s,
        refused=max(0, refused),
        moving_share=then.waited_share,
    )


def _helps(fix: Fix, base: Trial) -> bool:
    assert fix.swaps is not None
    assert fix.p95_wait_s is not None
    fewer = fix.swaps <= GOOD_ENOUGH * base.figures.switches
    quicker = (fix.mean_wait_s or 0.0) <= GOOD_ENOUGH * base.figures.mean_s
    no_worse = fix.p95_wait_s <= WORSE_WAIT * base.figures.p95_s + 0.1
    return (fewer or (quicker and fix.kind == "sleep")) and no_worse and not fix.refused


def candidates(
    one: Thrash,
    scene: Scene,
    commands: Mapping[str, Sequence[str]],
    contexts: Mapping[str, Contexts],
    samples: Sequence[SampleRow] = (),
) -> list[Fix]:
    setup = scene.setup
    models = {model.id: model for model in setup.models}
    members = [models[name] for name in one.models if name in models]
    found: list[Fix] = []
    if one.short_mib is None:
        found += _declare(members, samples)
    elif one.short_mib <= 0:
        found += _together(setup, one)
    else:
        found += _raised(setup, one)
        found += _cuts(one, members, commands, contexts, _total_mib(setup, one.device))
    found += _sleepers(setup, members, commands)
    found.append(
        Fix(
            "turns",
            f"Longer turns (quantum_factor {setup.policy.quantum_factor:g} → {LONG_TURNS:g})",
            (f"scheduling.quantum_factor={LONG_TURNS:g}",),
            _scheduling_diff("quantum_factor", setup.policy.quantum_factor, LONG_TURNS),
            cost=2.0,
        )
    )
    found += _second_card(setup, one, members)
    found += [_pin(member, len(members)) for member in members[:2]]
    return found


def _scheduling_diff(name: str, before: float, after: float) -> tuple[str, ...]:
    return (" scheduling:", f"-  {name}: {before:g}", f"+  {name}: {after:g}")


def _total_mib(setup: Setup, device: str) -> int:
    return next((one.total_mib or one.capacity_mib for one in setup.devices if one.id == device), 0)


def _declare(members: Sequence[Model], samples: Iterable[SampleRow]) -> list[Fix]:
    """Models of unknown size take the whole device; what they were seen to hold says whether they must."""
    seen: defaultdict[str, int] = defaultdict(int)
    for row in samples:
        for name, mib in row.own_mib.items():
            seen[name] = max(seen[name], mib)
    unknown = [model for model in members if model.need_mib is None]
    if not unknown or any(not seen[model.id] for model in unknown):
        return []
    sizes = {model.id: int(seen[model.id] * 1.05) + 1 for model in unknown}
    diff = tuple(line for name, mib in sizes.items() for line in (f"   {name}:", f"+    memory: {mib}MiB"))
    names = " and ".join(f"{name} ({gib(mib)})" for name, mib in sizes.items())
    changes = tuple(f"models.{name}.memory={mib}MiB" for name, mib in sizes.items())
    return [Fix("declare", f"Declare the memory of {names}: of unknown size they take the whole device", changes, (" models:", *diff))]


def _together(setup: Setup, one: Thrash) -> list[Fix]:
    """They would fit: only a group keeps them apart."""
    apart = [group for group in setup.groups if len(group.members.intersection(one.models)) > 1 and group.swap]
    if not apart:
        return []
    groups = tuple(replace(group, swap=False) if group in apart else group for group in setup.groups)
    names = " and ".join(group.id for group in apart)
    diff = tuple(line for group in apart for line in (f"   {group.id}:", "-    swap: true", "+    swap: false"))
    return [
        Fix("group", f"Let them be resident together: group {names}, swap: false", (), (" groups:", *diff), replace(setup, groups=groups))
    ]


def _raised(setup: Setup, one: Thrash) -> list[Fix]:
    """A budget below what the device has may simply be too small."""
    assert one.short_mib is not None
    device = next((each for each in setup.devices if each.id == one.device), None)
    if device is None or device.total_mib is None:
        return []
    wanted = device.capacity_mib + one.short_mib + MARGIN_MIB
    if wanted > device.total_mib:
        return []
    both = "both" if len(one.models) == 2 else "all"
    text = f"Raise the budget of {device.id} from {gib(device.capacity_mib)} to {gib(wanted)} (it has {gib(device.total_mib)}): {both} stay"
    diff = (" devices:", f"   {device.id}:", f"-    memory: {device.capacity_mib}MiB", f"+    memory: {wanted}MiB")
    return [Fix("budget", text, (f"device.{device.id}.memory={wanted}MiB",), diff, cost=0.3)]


def _cuts(
    one: Thrash, members: Sequence[Model], commands: Mapping[str, Sequence[str]], contexts: Mapping[str, Contexts], total_mib: int
) -> list[Fix]:
    """What one member must give up so that all fit, the least painful first."""
    assert one.short_mib is not None
    found = []
    for model in members:
        need = model.need_mib or 0
        cut = one.short_mib + MARGIN_MIB
        share = cut / need if need else 1.0
        if share > CUT_MAX:
            continue
        what, left, diff = _cut_of_command(model.id, commands.get(model.id, ()), contexts.get(model.id, ()), need, cut, total_mib)
        text = f"{what}: {gib(need)} → {gib(left)}, and {'both' if len(members) == 2 else 'all'} stay"
        found.append(
            Fix("cut", text, (f"models.{model.id}.memory={left}MiB",), diff, cost=0.5 + share + (1.5 if share > CUT_EASY else 0.0))
        )
    return sorted(found, key=lambda fix: fix.cost)[:2]


def _cut_of_command(
    name: str, argv: Sequence[str], contexts: Contexts, need: int, cut: int, total_mib: int
) -> tuple[str, int, tuple[str, ...]]:
    """What to lower, by the flag that sets it; the MiB that it then needs; the changed lines."""
    line, left = _line(argv), need - cut
    share = re.search(r"--gpu-memory-utilization[= ](0?\.\d+|1(?:\.0*)?)", line)
    if share and total_mib:
        value = max(0.01, float(share.group(1)) - cut / total_mib)
        rounded = int(value * 100) / 100
        after = line.replace(share.group(0), share.group(0).replace(share.group(1), f"{rounded:.2f}"))
        return f"Lower the memory share of {name} from {share.group(1)} to {rounded:.2f}", left, _cmd_diff(name, line, after)
    context = re.search(r"(?:^| )(--max-model-len|--ctx-size|-c)[= ](\d+)(?= |$)", line)
    enough = next(((tokens, freed) for tokens, freed in contexts if freed >= cut), None)
    if context and enough is not None:
        tokens, freed = enough
        after = f"{line[: context.start(2)]}{tokens}{line[context.end(2) :]}"
        return (
            f"Cut the context of {name} from {context.group(2)} to {tokens}, which frees {gib(freed)}",
            need - freed,
            _cmd_diff(name, line, after),
        )
    declared = (" models:", f"   {name}:", f"-    memory: {need}MiB", f"+    memory: {left}MiB")
    if context and contexts:
        most = contexts[-1]
        what = f"Make {name} smaller, a context alone does not do it ({most[0]} tokens free {gib(most[1])})"
        return what, left, declared
    what = f"Cut the context of {name} (now {context.group(2)})" if context else f"Cut the context or the share of {name}"
    return what, left, declared


def _line(argv: Sequence[str]) -> str:
    """As a `cmd` in the configuration: quoted only where it must be, `${PORT}` as it is."""
    return " ".join(shlex.quote(word) if re.search(r"[\s'\"\\]", word) or not word else word for word in argv)


def _cmd_diff(name: str, before: str, after: str) -> tuple[str, ...]:
    return (" models:", f"   {name}:", f"-    cmd: {before}", f"+    cmd: {after}")


def _sleepers(setup: Setup, members: Sequence[Model], commands: Mapping[str, Sequence[str]]) -> list[Fix]:
    """Sleep instead of stop, where the engine is known to be able to and was not told to."""
    awake = [model for model in members if not model.sleep and model.need_mib and _could_sleep(commands.get(model.id, ()))]
    if not awake:
        return []
    slept = {model.id: (_prior(model.need_mib or 0),) for model in awake}
    models = tuple(replace(model, sleep=slept.get(model.id, model.sleep)) for model in setup.models)
    diff = tuple(line for model in awake for line in _sleep_diff(model.id, commands[model.id]))
    names = " and ".join(model.id for model in awake)
    text = f"Let {names} sleep instead of stop: weights wait in host RAM ({gib(sum(t[0].host_mib for t in slept.values()))})"
    return [Fix("sleep", text, (), (" models:", *diff), replace(setup, models=models), cost=1.0)]


def _could_sleep(argv: Sequence[str]) -> bool:
    words = " ".join(argv)
    return ("vllm" in words and "--enable-sleep-mode" not in words) or ("sglang" in words and "--enable-memory-saver" not in words)


def _sleep_diff(name: str, argv: Sequence[str]) -> tuple[str, ...]:
    line = _line(argv)
    flag = "--enable-sleep-mode" if "vllm" in line else "--enable-memory-saver"
    return (f"   {name}:", f"-    cmd: {line}", f"+    cmd: {line} {flag}")


def _prior(need_mib: int) -> SleepTier:
    weights = int(0.9 * need_mib)
    return SleepTier(1, min(RESIDUE_MIB, need_mib // 4), weights, weights / BUS_MIB_S, weights / BUS_MIB_S + 0.1)


def _second_card(setup: Setup, one: Thrash, members: Sequence[Model]) -> list[Fix]:
    moving = min((model for model in members if model.need_mib), key=lambda model: model.need_mib or 0, default=None)
    if moving is None or moving.devices_count > 1 or any(each.id == one.device and each.kind == "ram" for each in setup.devices):
        return []  # what runs on the CPU is not moved by a card alone
    size = next((card for card in CARDS_GIB if card * 1024 * 0.95 >= (moving.need_mib or 0)), None)
    if size is None:
        return []
    name = _fresh(setup)
    device = Device(name, "gpu", int(size * 1024 * 0.97), measured=False)
    models = tuple(replace(model, devices=(name,)) if model is moving else model for model in setup.models)
    diff = (" models:", f"   {moving.id}:", f"+    device: {name}")
    text = f"A second GPU for {moving.id}: {'an' if str(size).startswith('8') else 'a'} {size} GiB card is enough"
    return [Fix("second_gpu", text, (), diff, replace(setup, devices=(*setup.devices, device), models=models), cost=5.0)]


def _fresh(setup: Setup) -> str:
    names = {device.id for device in setup.devices}
    return next(name for n in range(len(names) + 1) if (name := f"gpu{n}") not in names)


def _pin(model: Model, members: int) -> Fix:
    others = "the other one not at all" if members == 2 else "the others share what is left"
    diff = (" models:", f"   {model.id}:", "+    pin: true")
    return Fix("pin", f"Pin {model.id}: it always answers at once, {others}", (f"models.{model.id}.pin=true",), diff, cost=10.0)
