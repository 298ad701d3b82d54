"""Draw (program, form, fault, parameters) by seed, and keep what plain runs prove."""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.faults import planting
from benchmarks.faults.planting import (
    FAULTS,
    FORMS,
    LOOKALIKES,
    MECHANISMS,
    TWINS,
    Kind,
    Planted,
)
from benchmarks.faults.truth import MAIN, Damage, Run, Runs, Source, damage, is_healthy

PROGRAMS = Path(__file__).parent / "programs"
PROVEN = Path(__file__).parent / "mechanisms_proven.json"  # and twins: programs
FORM_SHARE = 0.4  # of the pairs are in another form than the program's own
RAISING = {  # causes that may show as an exception; elsewhere one is an accident of the edit
    "scaler_protocol_error",
    "fp16_params_with_scaler",
    "unsafe_op_under_autocast",
    "mask_constant_overflow",
}
SEEDS = {"tuning": 20_250, "sealed": 90_817_263}
BY_ROUNDING = ("IndexError", "ValueError")  # numbers that are off raise these, of a mechanism


@dataclass(frozen=True, slots=True)
class Pair:
    """A script with its key, before or after it is proven. ``file``: the one with the fault."""

    program: str
    form: str
    planted: Planted
    seed: int
    file: str = MAIN
    files: Source = field(default_factory=dict)  # of the program, before the fault

    def source(self, text: str) -> Source:
        """The program with ``text``, faulty or repaired, in the fault's place."""
        return {**self.files, self.file: text}

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.planted.kind, self.program, self.form, str(self.seed))))


@dataclass(frozen=True, slots=True)
class Proof:
    """What plain runs say of a pair; ``why_not`` is empty when it is used."""

    why_not: str
    damage: Damage | None = None
    modules: dict[str, list[str]] | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A proven pair; ``place``: how many pairs of its sequence were tried up to it."""

    pair: Pair
    proof: Proof
    place: int


def programs(quantities: bool = False) -> dict[str, Source]:
    """Programs by name: a script, or a folder whose train.py imports its other files. With
    ``quantities`` those, too, that have ids, timestamps, coordinates and the like: mechanisms alone
    are planted there, so that the sequences of the other faults stay what they were."""
    folders = {p.parent for p in PROGRAMS.glob(f"*/{MAIN}")}
    several = {f.name: {p.name: p.read_text() for p in sorted(f.glob("*.py"))} for f in folders}
    scripts = [*PROGRAMS.glob("*.py"), *(PROGRAMS.glob("quantities/*.py") if quantities else ())]
    found = {p.stem: {MAIN: p.read_text()} for p in scripts} | several
    return dict(sorted(found.items()))


def made(kind: Kind, program: str, files: Source, seed: int, formed: bool = True) -> Pair | None:
    """A pair, its form and parameters drawn by ``seed``; None where the program has no place.
    Of several files one with a place is drawn."""
    rng = random.Random(seed)
    order, form = sorted(files), ""
    random.Random(seed).shuffle(order)
    if formed and rng.random() < FORM_SHARE and FORMS:
        drawn_form = rng.choice(sorted(FORMS))
        for name in order:
            if changed := planting.reform(FORMS[drawn_form], files[name], seed):
                files, form = {**files, name: changed}, drawn_form
                break
    for name in order:
        try:
            planted = planting.plant(kind, files[name], seed)
        except ValueError:  # two edits in one place
            continue
        if planted:
            return Pair(program, form, planted, seed, name, files)
    return None


def prove(runs: Runs, pairs: list[Pair]) -> list[Proof]:
    """Whether the fault damages and its repair does not; of a look-alike, whether it is harmless."""
    wanted: list[tuple[Source, bool]] = []
    for pair in pairs:
        faulty = pair.source(pair.planted.faulty)
        repaired = pair.source(pair.planted.repaired)
        wanted += [(repaired, False), (repaired, True), (faulty, False), (faulty, True)]
    done = runs.get(wanted)
    return [_proof(pair, *done[4 * n : 4 * n + 4]) for n, pair in enumerate(pairs)]


def _proof(pair: Pair, repaired: Any, exact: Any, faulty: Any, faulty_exact: Any) -> Proof:
    if not is_healthy(repaired, exact):
        return Proof("the repaired script is not healthy")
    seen = damage(faulty, repaired, exact)
    if pair.planted.cause == "no_fault":
        # what it changes on purpose (frozen parts, another scale) is in its own fp32 run as well
        if not is_healthy(faulty, faulty_exact) or seen.lost_progress > 0.3:
            return Proof("not harmless", seen)
        return Proof("", damage(faulty, faulty_exact, faulty_exact), faulty.modules)
    if not seen.kinds:
        return Proof("no damage", seen)
    left = faulty.error.startswith("SystemExit")  # the script's own guard
    by_rounding = pair.planted.mechanism and faulty.error.startswith(BY_ROUNDING)
    if faulty.error and not left and not by_rounding and pair.planted.cause not in RAISING:
        return Proof("raises", seen)
    if pair.planted.cause == "fp16_params_with_scaler" and "FP16 gradients" not in faulty.error:
        return Proof("raises before the scaler", seen)
    in_fp32 = damage(faulty_exact, exact, exact)
    if pair.planted.fp32 == "trains" and (in_fp32.is_harmed or not in_fp32.is_harmless):
        return Proof("fp32 is damaged too", seen)
    if pair.planted.fp32 == "trains" and set(seen.kinds) <= set(in_fp32.kinds):
        return Proof("fp32 shows the same damage", seen)  # a clip that now cuts, for one
    if pair.planted.fp32 == "fails" and not in_fp32.is_harmed:
        return Proof("fp32 is not damaged", seen)
    if pair.planted.cause == "not_amp_divergence" and not _diverges(faulty_exact):
        return Proof("fp32 does not diverge", seen)
    return Proof("", seen, repaired.modules)


def _diverges(run: Run) -> bool:
    """Worse than a script that learns less than it could."""
    first, last = run.losses[0], run.losses[-1]
    return bool(run.error) or not math.isfinite(last) or last > 2 * abs(first)


def key_modules(pair: Pair, proof: Proof) -> list[str]:
    """Dotted paths of the modules that are right; none where no module is to blame."""
    if pair.planted.module is None or not proof.modules:
        return []
    owner, attribute = pair.planted.module
    paths = proof.modules.get(owner, [])
    return [f"{p}.{attribute}".strip(".") if attribute else p for p in paths]


def drawn(
    which: str,
    kinds: dict[str, Kind],
    runs: Runs,
    ahead: int = 4,
    offset: int = 0,
    after: int = 0,
) -> Iterator[Drawn]:
    """Proven pairs without end: a cause, one of its faults, a program with a place for it; of
    mechanisms a role and place, and one of its sites.
    ``offset`` gives another tuning set; ``after`` leaves out as many pairs, unproven."""
    tried = enumerate(drawing(which, kinds, offset), 1)
    for batch in iter(lambda: list(islice(tried, ahead)), []):
        new = [(place, pair) for place, pair in batch if place > after]
        proofs = prove(runs, [pair for _, pair in new])
        for (place, pair), proof in zip(new, proofs, strict=True):
            if not proof.why_not:
                yield Drawn(pair, proof, place)


def drawing(which: str, kinds: dict[str, Kind], offset: int) -> Iterator[Pair]:
    """Pairs that no run has proven yet, none twice."""
    lists = (FAULTS, LOOKALIKES, MECHANISMS, TWINS)
    nth = next(n for n, each in enumerate(lists) if each is kinds)
    rng = random.Random(SEEDS[which] + nth % 2 + 1_000 * (nth // 2) + 2 * offset)
    texts = programs(quantities=kinds is MECHANISMS or kinds is TWINS)
    by_cause: dict[str, list[Kind]] = defaultdict(list)
    for kind in kinds.values():
        what = kind.mechanism
        by_cause[f"{what.role}, {what.place}" if what else kind.cause].append(kind)
    seen: set[str] = set()
    while True:
        kind = rng.choice(by_cause[rng.choice(sorted(by_cause))])
        program = rng.choice(_with_a_place(kind) if kind.mechanism else sorted(texts))
        pair = made(kind, program, texts[program], rng.randrange(10**9))
        if pair and pair.planted.faulty not in seen:
            seen.add(pair.planted.faulty)
            yield pair


@functools.cache
def _with_a_place(kind: Kind) -> list[str]:
    """Programs in which a mechanism has one: few have ids, positions or a checkpoint."""
    texts = programs(quantities=True)
    return [name for name in texts if made(kind, name, texts[name], 0, formed=False)]


def _proofs(runs: Runs, pairs: list[Pair], enough: int | None) -> Iterator[tuple[Pair, Proof]]:
    """All pairs with their proofs, or the first until ``enough`` programs have proven one."""
    size = enough or len(pairs)
    proven: set[str] = set()
    for start in range(0, len(pairs), size or 1):
        part = pairs[start : start + size]
        for pair, proof in zip(part, prove(runs, part), strict=True):
            yield pair, proof
            proven |= set() if proof.why_not else {pair.program}
        if enough and len(proven) >= enough:
            return


def _listed(file: Path, name: str, program: str) -> None:
    """Adds a program to those on which a transformation is proven."""
    known: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    known[name] = sorted({*known.get(name, []), program})
    lines = (f" {json.dumps(n)}: {json.dumps(known[n])}" for n in sorted(known))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Try every transformation on every program, and print what is proven."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="file of kept runs")
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--programs", nargs="*")
    parser.add_argument("--mechanisms", action="store_true", help="these and their twins alone")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--enough", type=int, help="proven pairs of a transformation; default: all")
    parser.add_argument("--out", type=Path, help="a line of JSON for each pair")
    parser.add_argument("--proven", type=Path, help="list of what is proven, to be added to")
    asked = parser.parse_args()
    planting.load()
    runs = Runs(asked.cache, asked.jobs)
    all_texts = programs(quantities=asked.mechanisms)
    texts = {n: t for n, t in all_texts.items() if not asked.programs or n in asked.programs}
    why: dict[str, Counter[str]] = defaultdict(Counter)
    both = {**MECHANISMS, **TWINS} if asked.mechanisms else {**FAULTS, **LOOKALIKES}
    for name, kind in both.items():
        if asked.kinds and name not in asked.kinds and kind.cause not in asked.kinds:
            continue
        order = list(texts)
        if asked.enough:  # other programs for each, so that all are used
            random.Random(name).shuffle(order)
        pairs = [
            pair
            for seed in range(asked.seeds)
            for program in order
            if (pair := made(kind, program, texts[program], seed, formed=seed > 0))
        ]
        for pair, proof in _proofs(runs, pairs, asked.enough):
            why[name][proof.why_not or "proven"] += 1
            if asked.proven and not proof.why_not:
                _listed(asked.proven, name, pair.program)
            if asked.out:
                row = {"kind": name, "program": pair.program, "form": pair.form, "seed": pair.seed,
                       "why_not": proof.why_not, "params": pair.planted.params,
                       "damage": asdict(proof.damage) if proof.damage else None}  # fmt: skip
                with asked.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
            if asked.programs or asked.mechanisms:
                print(f"  {pair.program:20} {proof.why_not or 'proven'} "
                      f"{proof.damage.kinds if proof.damage else ''} {pair.planted.params}")  # fmt: skip
        print(f"{kind.cause:30} {name:36} {dict(why[name])}", flush=True)
    print(sum(c["proven"] for c in why.values()), "proven pairs")


if __name__ == "__main__":
    main()
