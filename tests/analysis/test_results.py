"""What a script reports, against what its fp32 control reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.results import worse_results
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.control import NUDGED
from ampscope.diagnosis.load import judge_again, load_diagnosis
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Call, Observation, Outcome, Printed
from ampscope.store.reader import Reader
from tests.helpers.evidence_making import FALLING, but, steps
from tests.helpers.script_stores import one_step, run, seen

NAN = math.nan


def view(printed: Mapping[str, Sequence[float]], made: Sequence[Observation] = ()) -> RunView:
    said = [Printed(w, tuple(v), tuple(range(len(v)))) for w, v in printed.items()]
    losses = [Call(n, n, "backward", value=loss) for n, loss in enumerate(FALLING)]
    return RunView("", "", [*losses, *(made or steps()), *said, Outcome("returned")])


def worse(words: str, own: Sequence[float], fp32: Sequence[float]) -> bool:
    both = view({words: own}), view({words: fp32})
    found = worse_results(*both)
    assert (Symptom.RESULTS in symptoms(*both)) == bool(found)
    return bool(found)


@pytest.mark.parametrize(
    ("words", "own", "fp32"),
    [
        ("test error", [0.33], [0.017]),
        ("val acc", [0.002, 0.359, 0.509, 0.537], [0.01, 0.5, 0.9, 1.0]),
        ("eval_accuracy", [54.0], [99.5]),
        ("loss", [2.3, 0.5, 0.3, 0.24], [2.3, 0.2, 0.05, 0.014]),
        ("val_mae", [3.0, NAN], [3.0, 1.0]),
        ("zeal", [1.0, 1.1, 1.2, 1.1, 1.2], [1.0, 2.0, 3.0, 4.0, 5.0]),  # rises as fp32 learns
    ],
)
def test_worse(words: str, own: list[float], fp32: list[float]) -> None:
    assert worse(words, own, fp32)
    assert not worse(words, fp32, own)
    assert not worse(words, fp32, fp32)


@pytest.mark.parametrize(
    ("words", "own", "fp32"),
    [
        ("accuracy", [0.96], [0.975]),
        ("test mse", [0.0005], [0.0002]),  # of a loss that began at 1.5
        ("loss", [2.3, 0.5, 0.011, 0.009], [2.3, 0.5, 0.009, 0.006]),  # both have learned it
        ("zeal", [3.0], [90.0]),  # nothing says which is better
        ("lr", [1e-3], [1e-1]),
        ("scale loss", [65536.0], [1.0]),
        ("reward", [10, 60, 20, 70, 15, 5, 30, 9, 8, 7], [9, 50, 30, 60, 5, 25, 20, 70, 20, 9]),
        ("val loss", [1, 1.2, 1.4, 1.6, 1.8, 2.0], [1, 1.1, 1.2, 1.3, 1.4, 1.5]),  # overfits
        ("loss", [5.0], [NAN]),
        ("val acc", [0.9, 0.95, 0.95, 0.95, 0.95], [0.9, 0.99, 0.99, 0.99, 0.99]),  # 2 of 50
        ("mfu", [1.1, 1.2, 1.3, 1.4, 1.5], [3.0, 4.0, 5.0, 6.0, 7.0]),  # the machine's
        ("cast error", [4e-4, 4e-4, 4e-4, 4e-4], [0.0, 0.0, 0.0, 0.0]),
        # As long a training that prints by the clock, or whenever one is the best so far.
        ("loss", [2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2], [2.0, 1.6, 1.2, 0.8, 0.4]),
        ("best", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.1, 0.3, 0.5, 0.7, 0.8]),
    ],
)
def test_not_worse(words: str, own: list[float], fp32: list[float]) -> None:
    assert not worse(words, own, fp32)


def test_the_rate_that_is_left() -> None:
    kept = steps(lr=1e-3)
    lost = but(kept, range(4, len(kept)), lr=6e-9)
    (found,) = worse_results(view({}, lost), view({}, kept))
    assert (found.words, found.own, found.reference) == ("learning rate", 6e-9, 1e-3)
    assert not worse_results(view({}, kept), view({}, lost))
    plateaus = but(kept, range(20, len(kept)), lr=1e-6)  # noise at the floor of the loss
    assert not worse_results(view({}, plateaus), view({}, kept))
    waits = but(kept, [len(kept) - 1], lr=0.0, skipped=True)
    assert not worse_results(view({}, waits), view({}, kept))


def test_skipped_steps_are_a_delay() -> None:
    """Of a search for the scale that takes 14 of 50 steps."""
    own, fp32 = {"loss": [1.126]}, {"loss": [0.8607]}
    assert worse_results(view(own, steps()), view(fp32, steps()))
    delayed = but(steps(), [0, 1], skipped=True)
    assert not worse_results(view(own, delayed), view(fp32, steps()))
    assert worse_results(view({"loss": [1.5]}, delayed), view(fp32, steps()))


def test_a_rate_that_stands_still_while_the_controls_falls() -> None:
    """0.2 * 0.9985 rounds back to 0.2 in bf16."""
    count = len(steps())
    falls = [replace(a, lr=0.2 * 0.97**n) for n, a in enumerate(steps())]
    stuck = [replace(a, lr=0.2) for a in steps()]
    (found,) = worse_results(view({}, stuck), view({}, falls))
    assert (found.own, found.reference) == (0.2, 0.2 * 0.97 ** (count - 1))
    assert not worse_results(view({}, falls), view({}, stuck))
    coarse = [replace(a, lr=0.2 * 0.97 ** (n // 4 * 4)) for n, a in enumerate(steps())]
    assert not worse_results(view({}, coarse), view({}, falls))  # rounded, and it follows
    plateau = [replace(a, lr=0.2 if n < count - 5 else 0.02) for n, a in enumerate(steps())]
    assert not worse_results(view({}, stuck), view({}, plateau))
    waits = but(stuck, [3], skipped=True)  # a schedule that moves only where a step was taken
    assert not worse_results(view({}, waits), view({}, falls))


def test_losses_that_play_against_each_other_are_no_results() -> None:
    both = [replace(a, optimizer=f"optimizer{a.step % 2}") for a in steps()]
    losses, accuracies = {"g_loss": [1.0, 0.9]}, {"acc": [0.2]}
    assert not worse_results(view(losses, both), view({"g_loss": [1.0, 0.3]}, both))
    assert worse_results(view(accuracies, both), view({"acc": [0.9]}, both))


def test_a_training_for_a_time_is_not_compared() -> None:
    for took, beyond in ((61.0, False), (90.0, True)):
        own, fp32 = view({"acc": [0.5]}), view({"acc": [0.9]})
        own.outcome = Outcome("returned", steps=20, elapsed_s=took)
        fp32.outcome = Outcome("returned", steps=30, elapsed_s=60.0)
        assert bool(worse_results(own, fp32)) is beyond


@pytest.mark.parametrize(("nudged", "is_wrong"), [(130.0, False), (198.0, True)])
def test_a_result_is_held_against_what_one_rounding_leads_to(nudged: float, is_wrong: bool) -> None:
    runs = {"as_is": 130.0, "fp32": 200.0, NUDGED: nudged}
    views = {name: view({"reward": [20.0, 60.0, end]}) for name, end in runs.items()}
    assert (Symptom.RESULTS in Evidence(views, "native").symptoms) is is_wrong


def test_told_with_both_numbers_and_read_back(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    made = [one_step(n, loss) for n, loss in enumerate(FALLING)]
    ids = {
        name: run(store, name, seen(made, Printed("val acc", (0.1, own), (0, 1))))
        for name, own in (("as_is", NAN), ("fp32", 0.9))
    }
    before, after = judge_again(store, ids["as_is"])
    with Reader(store) as reader:
        stored = load_diagnosis(reader, ids["fp32"])
    for result in (before, after, stored):
        assert result.diagnosis.verdict == "inconclusive"
        assert [one.words for one in result.results] == ["val acc"]
        assert "val acc nan, 0.9 in fp32" in result.undecided


def test_a_secret_is_not_recorded(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run_id = run(store, "as_is", seen([one_step(0, 1.0)]))
    with Reader(store) as reader:
        runs = ScriptRuns(reader.run(run_id).spec, store)
    runs._file(run_id, "out").write_text("password 1234\nloss 0.5\nloss 0.25\n")
    runs._keep_printed(run_id)
    runs.folder.cleanup()
    with Reader(store) as reader:
        kept = [o for o in reader.observations(run_id) if isinstance(o, Printed)]
    assert kept == [Printed("loss", (0.5, 0.25), (1, 2))]
