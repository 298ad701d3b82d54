"""The sealed set's counts: they add up, and each drawing goes on where the last one ended."""

from __future__ import annotations

import datetime
import json
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import print_accuracy
from benchmarks.faults import draw, planting, score
from benchmarks.faults.counts import added, counts, seconds, summary
from benchmarks.faults.draw import Drawn, Proof
from benchmarks.faults.planting import FAULTS, LOOKALIKES
from benchmarks.faults.truth import Damage

planting.load()
CAUSES = ("no_fault", "gradient_underflow", "activation_overflow")
HARM = Damage(False, False, 0.5, 0, 0, 0, 0, 0)


def drawn_rows(number: int, seed: int = 3) -> list[dict[str, Any]]:
    """Rows as ``row_of`` makes them, with every kind of answer among them."""
    rng = random.Random(seed)
    rows = []
    for n in range(number):
        cause = rng.choice(CAUSES)
        found = rng.choice([*CAUSES, "inconclusive"])
        right, healthy = found == cause, cause == "no_fault"
        wrong = not right and found not in ("no_fault", "inconclusive")
        rows.append(
            {
                "script": f"s{n}",
                "cause": cause,
                "program": rng.choice("pqr"),
                "form": rng.choice(["", "log_file"]),
                "policy": rng.choice(["native", "cuda"]),
                "found": [found],
                "right": right,
                "among_three": right,
                "wrong_cause": wrong,
                "undetermined": found == "inconclusive",
                "no_fault": found == "no_fault",
                "module_right": rng.choice([None, True, False]) if right and not healthy else None,
                "line_right": rng.choice([None, True, False]) if right and not healthy else None,
                "verified": rng.choice([None, True, False]),
                "harmed": rng.random() < 0.7,
                "latent": ["small_update_lost"] * rng.randrange(2),
                "elapsed_s": rng.choice([None, rng.uniform(3, 90)]),
            }
        )
    return rows


@pytest.mark.parametrize("cuts", [(0, 40), (1, 7, 29), (20, 20, 21)])
def test_counts_of_parts_add_up_to_those_of_the_whole(cuts: tuple[int, ...]) -> None:
    rows = drawn_rows(60)
    edges = [0, *cuts, len(rows)]
    parts = [rows[a:b] for a, b in pairwise(edges)]
    whole = counts(rows)
    assert added(map(counts, parts)) == whole
    assert summary(added(map(counts, parts))) == summary(whole)


def test_counts_say_what_a_count_by_hand_says() -> None:
    rows = drawn_rows(80)
    found = counts(rows)
    faulty = [r for r in rows if r["cause"] != "no_fault"]
    right = [r for r in faulty if r["right"]]
    for group in ("by cause", "by program", "by form", "by policy"):
        assert [sum(x) for x in zip(*found[group].values(), strict=True)] == [
            len(right),
            len(faulty),
        ]
    confused = found["confusion"]
    assert sum(sum(c.values()) for c in confused.values()) == len(rows)
    assert sum(confused[c].get(c, 0) for c in confused if c != "no_fault") == len(right)
    assert found["faults"] + found["healthy"] == len(rows)
    tried = [r["verified"] for r in right if r["verified"] is not None]
    assert Fraction(*found["shares"]["fix cured, of those run"]) == Fraction(
        tried.count(True), len(tried)
    )
    times = sorted(round(r["elapsed_s"]) for r in rows if r["elapsed_s"] is not None)
    assert seconds(found) == (times[(len(times) - 1) // 2], times[-1])


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Drawn]]:
    """Draws in which every third pair is not proven, without any run."""

    def prove(_: object, pairs: list[draw.Pair]) -> list[Proof]:
        return [Proof("no damage" if p.seed % 3 == 0 else "", HARM, {}) for p in pairs]

    monkeypatch.setattr(draw, "prove", prove)
    return lambda **given: draw.drawn("sealed", runs=None, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [FAULTS, LOOKALIKES])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_drawing_goes_on_where_the_last_one_ended(
    unproven: Callable[..., Iterator[Drawn]], kinds: Any, cut: int
) -> None:
    whole = list(islice(unproven(kinds=kinds), 8))
    first = whole[:cut]
    rest = list(islice(unproven(kinds=kinds, after=first[-1].place), 8 - cut))
    assert [(d.pair, d.place) for d in first + rest] == [(d.pair, d.place) for d in whole]


def test_rows_come_in_the_order_of_the_draw_and_none_is_lost_at_the_end() -> None:
    """The first diagnosis ends last; nothing is drawn once the time is over."""
    later, drawn = threading.Event(), []

    def pairs() -> Iterator[int]:
        for n in range(100):
            drawn.append(n)
            yield n

    def diagnose(n: int) -> dict[str, int]:
        if n == 0:
            later.wait(10)
        if n == 2:
            later.set()
        return {"number": n}

    rows = score.in_order(pairs(), diagnose, 2, lambda: len(drawn) == 7)  # type: ignore[arg-type]
    assert [(n, row["number"]) for n, row in rows] == [(n, n) for n in range(7)]


class _Tomorrow(datetime.date):
    @classmethod
    def today(cls) -> datetime.date:
        return datetime.date(2031, 5, 6)


def _asked(place: Path, faults: int, healthy: int, jobs: int = 2) -> Namespace:
    return Namespace(
        kept=place / "kept.json", policy="native", faults=faults, healthy=healthy, jobs=jobs,
        minutes=60.0, time_limit=60.0, cache=None, out=None, mechanisms=False,
    )  # fmt: skip


def test_drawings_of_two_days_are_one_drawing_of_both(
    unproven: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diagnosed(script: Path, policy: str, limit_s: float) -> dict[str, Any]:
        text = script.read_text()  # the script is there, and the answer depends on it alone
        cause = CAUSES[len(text) % 3]
        findings = [] if cause == "no_fault" else [{"cause": cause}]
        verdict = "fault" if findings else "no_fault"
        return {"verdict": verdict, "findings": findings, "elapsed_s": len(text) / 100}

    monkeypatch.setattr(score, "diagnosed", diagnosed)
    (tmp_path / "whole").mkdir()
    whole = score.score_sealed(_asked(tmp_path / "whole", 10, 5))
    score.score_sealed(_asked(tmp_path, 6, 2))
    score.score_sealed(_asked(tmp_path, 2, 1))  # the same day and rules: it goes on
    monkeypatch.setattr(score.datetime, "date", _Tomorrow)
    monkeypatch.setattr(score, "rules_version", lambda: "better rules")
    score.score_sealed(_asked(tmp_path, 2, 2))
    kept = score.kept_drawings(tmp_path / "kept.json")
    assert [d["on"] for d in kept] == [datetime.datetime.now().date().isoformat(), "2031-05-06"]
    assert kept[0]["to"] == kept[1]["from"]
    assert added(d["counts"] for d in kept) == whole
    assert kept[1]["to"] == score.kept_drawings(tmp_path / "whole" / "kept.json")[0]["to"]
    assert not any(kind in (tmp_path / "kept.json").read_text() for kind in FAULTS)
    monkeypatch.setattr(score, "rules_version", lambda: "rules improved on the same day")
    with pytest.raises(SystemExit, match="tomorrow"):
        score.score_sealed(_asked(tmp_path, 1, 1))


def test_the_page_prints_the_sum_of_the_drawings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(print_accuracy, "RESULTS", tmp_path)
    assert print_accuracy.sealed() == "The sealed set has not been drawn."
    rows = drawn_rows(60)
    entry = {"rules": "1 (a)", "commit": "b", "policy": "native"}
    drawings = [
        {**entry, "on": "2031-05-06", "counts": counts(rows[:25])},
        {**entry, "on": "2031-05-07", "counts": counts(rows[25:])},
    ]
    (tmp_path / "faults_sealed.json").write_text(json.dumps({"drawings": drawings}))
    text = print_accuracy.sealed()
    right = sum(r["right"] for r in rows if r["cause"] != "no_fault")
    faults = sum(r["cause"] != "no_fault" for r in rows)
    assert f", {right} of {faults} |" in text
    assert "2031-05-06" in text
    monkeypatch.setattr(print_accuracy, "SECTIONS", {"sealed": print_accuracy.sealed})
    page = print_accuracy.replaced("a <!-- sealed -->old<!-- /sealed --> b")
    assert text in page
    assert "old" not in page
    assert print_accuracy.confusion().count("<rect") > 9
