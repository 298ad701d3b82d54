"""Two runs against each other: distances, noise, alignment and the verdict, on made digests."""

from __future__ import annotations

import base64
import itertools
import math
import struct

import numpy as np
import pytest

from ampscope.ext.diff.run_diff import (
    Held,
    RunDiff,
    TensorValues,
    compared,
    distance,
    first_output,
    paired,
    values_of,
)
from ampscope.ext.diff.words import sentences
from ampscope.observations import (
    Digests,
    DtypeEntry,
    Observation,
    OptimizerStep,
    Outcome,
    Surroundings,
)

Row = list[tuple[str, float]]


def packed(value: float) -> str:
    return base64.b64encode(struct.pack("<d", value)).decode()


def digests(
    step: int, role: str, row: Row, dtype: str = "fp32", ops: tuple[str, ...] = ()
) -> Digests:
    """A tensor is one number here, which is its norm and its sketch."""
    values = [value for _, value in row]
    return Digests(
        step=step, role=role, scale=1.0, names=tuple(name for name, _ in row),
        dtypes=(dtype,) * len(row), totals=(1,) * len(row),
        checksums=tuple(f"{dtype}{value!r}" for value in values),
        norms=tuple(map(abs, values)), peaks=tuple(map(abs, values)), nonfinite=(0,) * len(row),
        sketches=tuple(map(packed, values)), ops=ops,
        lines=tuple(f"train.py:{n}" for n in range(len(ops))),
    )  # fmt: skip


def one_step(step: int, loss: float) -> OptimizerStep:
    return OptimizerStep(
        step, "optimizer0", "", loss, "fp32", 1.0, False, False, 1, 1, 0, 0, 1.0, 1.0, 0.1, 1.0,
        1.0, 0, "fp32", "fp32", "fp32",
    )  # fmt: skip


def run(
    *records: Observation, steps: int = 3, losses: float = 1.0, ended: str = "returned"
) -> TensorValues:
    outcome = Outcome(ended=ended, steps=steps, error_type="ValueError", error_text="no")
    made = [one_step(step, losses) for step in range(steps)]
    return values_of([*records, *made, outcome])


def of_steps(values: dict[int, float], other: float = 1.0) -> list[Digests]:
    """Modules ``a`` and ``b`` over three steps; ``b`` as named, else 2."""
    return [
        digests(step, "activation", [("a", other), ("b", values.get(step, 2.0))])
        for step in range(3)
    ]


def test_the_first_module_and_step_that_differ_are_named() -> None:
    found = compared([run(*of_steps({}))] * 3, [run(*of_steps({1: 2.1, 2: 9.0}))])
    assert (found.verdict, found.noise.largest) == ("different", 0)
    assert found.first is not None
    assert (found.first.step, found.first.module, found.first.role) == (1, "b", "activation")
    assert found.first.distance == pytest.approx(0.1 / 2.1)
    assert found.first.roundings == pytest.approx(0.1 / 2.1 * 2**23, rel=0.01)


def test_an_output_that_says_nothing_is_passed_over() -> None:
    """Of compiled code: a tensor of another size, and the same numbers in another order."""

    def held(total: int, *sketch: float) -> Held:
        return Held("fp32", total, str(sketch), 1.0, 0, np.array(sketch))

    def of(**outputs: Held) -> TensorValues:
        row = {(name, 0): output for name, output in outputs.items()}
        return TensorValues({(0, "activation"): row}, (0,), (1.0,))

    one = of(size=held(4, 1, 0), order=held(4, 1, 0), gone=held(4, 1, 0), right=held(4, 1, 0))
    other = of(size=held(8, 0, 1), order=held(4, 0, 1), right=held(4, 1, 1e-3))
    found = first_output(one, other, 0, 0.0)
    assert found is not None
    assert (found.module, found.distance) == ("right", pytest.approx(1e-3))
    assert first_output(one, other, 0, 1e-2) is None


def test_repeats_set_the_noise_and_it_hides_what_is_smaller() -> None:
    repeats = [run(*of_steps({1: 2.0 + n * 1e-6})) for n in range(3)]
    assert compared(repeats, [run(*of_steps({1: 2.0 + 5e-6}))]).verdict == "same"
    different = compared(repeats, [run(*of_steps({1: 2.001}))])
    assert different.verdict == "different"
    assert different.first is not None
    assert different.first.allowed == pytest.approx(8e-6, rel=0.01)
    # Noise begins by chance: before the step at which repeats showed it, as much is allowed.
    assert compared(repeats, [run(*of_steps({0: 2.0 + 5e-6}))]).verdict == "same"


def test_a_loss_that_repeats_round_alike_has_the_noise_of_activations() -> None:
    repeats = [run(*of_steps({1: 2.0 + n * 1e-6})) for n in range(3)]
    assert compared(repeats, [run(*of_steps({}), losses=1.0 + 1e-7)]).verdict == "same"
    assert compared(repeats, [run(*of_steps({}), losses=1.01)]).verdict == "different"
    # What no op has computed yet gets none of it.
    first = [run(*of_steps({1: 2.0 + n * 1e-6}), digests(0, "input", [("x", 1)])) for n in range(3)]
    other = run(*of_steps({}), digests(0, "input", [("x", 1 + 1e-7)]))
    assert compared(first, [other]).verdict == "different"


def test_noise_as_large_as_the_numbers_cannot_tell() -> None:
    repeats = [run(*of_steps({0: 2.0 * n})) for n in (1, 2, 3)]
    found = compared(repeats, [run(*of_steps({0: 50.0}))])
    assert (found.verdict, found.blind_from) == ("unknown", 0)


def test_weights_that_differ_between_repeats_cannot_tell() -> None:
    repeats = [run(digests(0, "start", [("a.weight", n)])) for n in (1.0, 2.0)]
    found = compared(repeats, [run(digests(0, "start", [("a.weight", 3.0)]))])
    assert found.verdict == "unknown"
    assert "Set its seeds" in found.reason


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (run(ended="exception"), "B failed: ValueError"),
        (run(ended="killed"), "B was killed"),
        (run(steps=0), "B made no optimizer step"),
        (
            run(
                *of_steps({}), digests(0, "activation", [("a", 1.0), ("b", 2.0), ("c", 1.0)]),
                DtypeEntry("parameter", "c.weight", "fp32", "", ""),
            ),
            "Only one of the runs has c",
        ),
    ],
    ids=["failed", "killed", "no step", "another module"],
)  # fmt: skip
def test_what_cannot_be_told_says_why(other: TensorValues, reason: str) -> None:
    found = compared([run(*of_steps({}))] * 2, [other])
    assert found.verdict == "unknown"
    assert reason in found.reason


def test_a_run_that_ends_earlier_is_different() -> None:
    found = compared([run(*of_steps({}))], [run(*of_steps({})[:2], steps=2)])
    assert (found.verdict, found.first) == ("different", None)
    assert "A makes 3 optimizer steps, B 2" in found.reason


def test_dtypes_do_not_part_equal_numbers_and_rounding_can_be_allowed() -> None:
    first = run(digests(0, "activation", [("a", 1.0), ("b", 0.1)]))
    half = run(digests(0, "activation", [("a", 1.0), ("b", 0.0999755859375)], "fp16"))
    found = compared([first], [half])
    assert found.first is not None
    assert found.first.name == "b"
    assert found.first.roundings == pytest.approx(0.25, rel=0.01)
    assert found.beyond_rounding is None
    assert compared([first], [half], allow_rounding=True).verdict == "same"
    worse = run(digests(0, "activation", [("a", 1.0), ("b", 0.5)], "fp16"))
    assert compared([first], [worse], allow_rounding=True).verdict == "different"


def test_ops_are_aligned_across_dtypes_with_casts_left_out() -> None:
    row: Row = [("a", 1.0), ("a", 2.0), ("b", 3.0)]
    ops = ("mm(fp32)", "relu(fp32)", "mm(fp32)")
    first = run(digests(0, "op", row, ops=ops), digests(0, "activation", [("a", 1), ("b", 3)]))
    halves = [("a", 1.0), ("a", 1.0), ("a", 2.0), ("b", 3.5)]
    names = ("_to_copy(fp32)", "mm(fp16)", "relu(fp16)", "mm(fp16)")
    second = run(
        digests(0, "op", halves, "fp16", names), digests(0, "activation", [("a", 1), ("b", 3.5)])
    )
    found = compared([first], [second]).first
    assert found is not None
    assert found.op is not None
    assert (found.op.op, found.op.other) == ("mm(fp32)", "mm(fp16)")
    assert (found.op.module, found.op.line, found.op.other_line) == (
        "b",
        "train.py:2",
        "train.py:3",
    )


def test_an_op_that_one_run_alone_makes_is_named() -> None:
    first = run(
        digests(0, "op", [("a", 1.0), ("a", 2.0)], ops=("mm(fp32)", "relu(fp32)")),
        digests(0, "activation", [("a", 2.0)]),
    )
    second = run(
        digests(0, "op", [("a", 1.0), ("a", 1.5), ("a", 3.0)],
                ops=("mm(fp32)", "mul(fp32)", "relu(fp32)")),
        digests(0, "activation", [("a", 3.0)]),
    )  # fmt: skip
    found = compared([first], [second]).first
    assert found is not None
    assert found.op is not None
    assert (found.op.op, found.op.other) == ("", "mul(fp32)")


def test_an_op_that_one_run_makes_earlier_is_told_beside_the_first_that_differs() -> None:
    ops = ("mm(fp32)", "sum(fp32)", "sub(fp32)")
    first = run(
        digests(0, "op", [("", 1.0), ("", 5.0), ("", 2.0)], ops=ops),
        digests(0, "activation", [("a", 2.0)]),
    )
    others = ("mm(fp32)", "sigmoid(fp32)", "sum(fp32)", "sub(fp32)")
    second = run(
        digests(0, "op", [("", 1.0), ("", 0.7), ("", 5.0), ("", 3.0)], ops=others),
        digests(0, "activation", [("a", 3.0)]),
    )
    result = compared([first], [second])
    assert result.first is not None
    found = result.first.op
    assert found is not None
    assert found.before is not None
    assert (found.op, found.before.op, found.before.other) == ("sub(fp32)", "", "sigmoid(fp32)")
    assert "Before it only B makes the op sigmoid(fp32)" in " ".join(sentences(result))


def test_a_renamed_module_is_aligned_by_its_place() -> None:
    first = run(*of_steps({}))
    renamed = [digests(s, "activation", [("a", 1.0), ("mlp", 2.0 + s)]) for s in range(3)]
    found = compared([first], [run(*renamed)])
    assert found.first is not None
    assert (found.first.name, found.first.other_name, found.first.step) == ("b", "mlp", 1)


def test_every_ledger_row_that_differs_is_listed() -> None:
    def side(dtype: str, line: str) -> TensorValues:
        entries = [
            DtypeEntry("parameter", "a.weight", dtype, line, "module cast"),
            DtypeEntry("buffer", "a.mean", "fp32", "", "torch's default dtype"),
        ]
        return run(*of_steps({}), *entries, Surroundings(("eps", "lr"), (dtype, "1")))

    found = compared([side("fp32", "")], [side("bf16", "train.py:9")])
    (row,) = found.ledger
    assert row.second is not None
    assert (row.name, row.second.line) == ("a.weight", "train.py:9")
    assert [(s.name, s.first, s.second) for s in found.settings] == [("eps", "fp32", "bf16")]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("eps",), "Set differently: eps 0 in A and 1 in B."),
        (
            ("eps", "lr", "momentum", "torch", "seed"),
            "Set differently: eps 0 in A and 1 in B; lr 0 in A and 1 in B; "
            "momentum 0 in A and 1 in B; and 2 more.",
        ),
        ((), None),
    ],
)
def test_what_is_set_differently_is_said_before_what_follows_from_it(
    names: tuple[str, ...], says: str | None
) -> None:
    def side(value: str, changed: dict[int, float]) -> TensorValues:
        around = Surroundings((*names, "same"), (*(value for _ in names), "9"))
        return run(*of_steps(changed), around)

    said = sentences(compared([side("0", {})], [side("1", {1: 1e-3})]))
    assert said[0].startswith("A and B are different from step 1 on. The first difference is in ")
    assert (said[1] == says) if says else not any("Set diff" in one for one in said)
    equal = compared([side("0", {})], [side("1", {})])
    assert not any("Set differently" in one for one in sentences(equal))


def test_losses_are_held_against_seeds() -> None:
    seeds = [run(losses=1.3), run(losses=0.9)]
    found = compared([run(losses=1.0)], [run(losses=1.2)], seeds=seeds).loss
    assert found is not None
    assert found.between_seeds == pytest.approx(0.4)
    assert (found.first_step, found.seeds) == (0, 2)


def held(value: float, dtype: str = "fp32", nonfinite: int = 0) -> Held:
    (entry,) = run(digests(0, "activation", [("a", value)], dtype)).row(0, "activation").values()
    return Held(dtype, 1, entry.checksum, abs(value), nonfinite, entry.sketch)


def test_distances() -> None:
    assert distance(held(1.0), held(1.0)) == 0
    assert distance(held(1.0), held(-1.0)) == 2
    assert distance(held(1.0), held(1.0, "fp16")) == 0
    assert distance(held(1.0), held(1.0, nonfinite=1)) == 0  # equal bits are equal
    assert math.isinf(distance(held(1.0), held(2.0, nonfinite=1)))
    tiny = Held("fp32", 1, "another", 1.0, 0, held(1.0).sketch)
    assert 0 < distance(held(1.0), tiny) < 1e-16  # only the bits show it


def test_pairs_keep_the_order_of_the_first() -> None:
    names = ["a", "b", "c"]
    for order in itertools.permutations(names):
        row = {(name, 0): held(1.0) for name in order}
        assert paired({(n, 0): held(1.0) for n in names}, row) == [((n, 0), (n, 0)) for n in names]


def test_the_result_of_equal_runs_is_empty() -> None:
    found: RunDiff = compared([run(*of_steps({}))] * 3, [run(*of_steps({}))])
    assert (found.verdict, found.first, found.ledger, found.settings) == ("same", None, (), ())
