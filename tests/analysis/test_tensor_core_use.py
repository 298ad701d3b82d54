"""The decision from two signs as a truth table, the rate's sign on numbers made by hand, and what
padding gains."""

from __future__ import annotations

import json

import pytest

from ampscope.analysis.tensor_core_use import (
    Ceilings,
    CoreVerdict,
    answer,
    best_gain,
    core_use,
    cores_json,
    layout,
    padding_gains,
    rate_sign,
    shapes,
    verdict,
)
from ampscope.hardware.capability import Fit, Sign
from ampscope.records import Matmul, Operand, Padded, Place, RunInfo, State
from tests.helpers import core_results
from tests.helpers.core_results import H100, ceiling, copy, linear, step, timing, used

H100_CEILINGS = Ceilings({"fp32": 50e12, "bf16": 700e12, "tf32": 400e12}, 2.6e12)
BIG = 2 * 4096**3  # FLOPs of the matmuls below


def big(seconds: float, control_s: float | None, dtype: str = "bf16") -> Matmul:
    return linear(4096, 4096, 4096, seconds, control_s, dtype=dtype)


@pytest.mark.parametrize(
    ("names", "rate", "expected"),
    [
        (Sign.USED, Sign.USED, CoreVerdict.USED),
        (Sign.USED, Sign.NOTHING, CoreVerdict.USED),
        (Sign.USED, Sign.NOT_USED, CoreVerdict.UNKNOWN),
        (Sign.NOT_USED, Sign.USED, CoreVerdict.UNKNOWN),
        (Sign.NOT_USED, Sign.NOTHING, CoreVerdict.NOT_USED),
        (Sign.NOT_USED, Sign.NOT_USED, CoreVerdict.NOT_USED),
        (Sign.NOTHING, Sign.USED, CoreVerdict.USED),
        (Sign.NOTHING, Sign.NOTHING, CoreVerdict.UNKNOWN),
        (Sign.NOTHING, Sign.NOT_USED, CoreVerdict.NOT_USED),
    ],
)
def test_the_truth_table(names: Sign, rate: Sign, expected: CoreVerdict) -> None:
    assert verdict(names, rate) is expected


@pytest.mark.parametrize(
    ("reached", "control", "expected"),
    [
        (600e12, 45e12, Sign.USED),
        (100e12, 45e12, Sign.USED),  # over twice the control, though far below the ceiling
        (60e12, 45e12, Sign.NOTHING),
        (45e12, 45e12, Sign.NOT_USED),
        (40e12, 45e12, Sign.NOT_USED),
        (10e12, 10e12, Sign.NOTHING),  # something else holds both up
    ],
)
def test_the_rate_against_its_control(reached: float, control: float, expected: Sign) -> None:
    assert rate_sign(big(BIG / reached, BIG / control), H100_CEILINGS).sign is expected


def test_half_the_bytes_explain_twice_the_rate() -> None:
    """A matmul of a vector waits for its matrix: 64 MiB in fp32 take 26 µs at 2.6 TB/s."""
    waits = linear(8, 4096, 4096, 13e-6, 27e-6)
    assert rate_sign(waits, H100_CEILINGS).sign is Sign.NOTHING
    assert rate_sign(linear(8, 4096, 4096, 6e-6, 27e-6), H100_CEILINGS).sign is Sign.USED


def test_a_wide_spread_is_no_proof() -> None:
    steady = big(BIG / 110e12, BIG / 45e12)
    shaky = linear(4096, 4096, 4096, BIG / 110e12, None)
    assert rate_sign(steady, H100_CEILINGS).sign is Sign.USED
    wide = Matmul(
        **{f: getattr(shaky, f) for f in Matmul.__slots__}
        | {"control": timing(BIG / 45e12, spread=0.6)}
    )
    assert rate_sign(wide, H100_CEILINGS).sign is Sign.NOTHING


def test_where_the_dtype_is_no_faster_a_rate_tells_nothing() -> None:
    """TF32 on a consumer Ampere: the same peak as fp32."""
    even = Ceilings({"fp32": 30e12, "tf32": 31e12}, 9e11)
    assert rate_sign(big(BIG / 28e12, BIG / 27e12, "tf32"), even).sign is Sign.NOTHING


def test_where_the_dtype_is_slower_it_is_not_used() -> None:
    """bf16 on a V100: 9.6 against 14 TFLOP/s (github.com/lablup/mlxcel/issues/1654)."""
    slower = Ceilings({"fp32": 14e12, "bf16": 9.6e12}, 8e11)
    assert rate_sign(big(BIG / 9.4e12, BIG / 13.5e12), slower).sign is Sign.NOT_USED


def test_plain_fp32_is_its_own_control() -> None:
    assert rate_sign(big(1e-3, None, "fp32"), H100_CEILINGS).sign is Sign.NOT_USED


def test_without_a_control_or_ceilings_nothing_is_said() -> None:
    assert rate_sign(big(1e-3, None), H100_CEILINGS).sign is Sign.NOTHING
    assert rate_sign(big(1e-4, 1e-3), Ceilings()).sign is Sign.NOTHING


def head(padded_s: float) -> Matmul:
    """GPT-2's: 50257 characters."""
    padded = Padded(((50257, 50304),), 2 * 1024 * 50304 * 768, timing(padded_s))
    return linear(1024, 50257, 768, 1.8e-3, 2.5e-3, module="lm_head", padded=(padded,))


def test_a_step_as_a_sentence() -> None:
    slow = linear(512, 512, 512, 1e-5, None, module="loss", dtype="fp32", kernels=())
    use = used(head(1e-3), slow)
    assert use.calls() == 2
    assert [one.verdict for one in use.uses] == [CoreVerdict.USED, CoreVerdict.NOT_USED]
    assert use.uses[0].eligibility.fit is Fit.REDUCED
    big_share = 100 * 1024 * 50257 * 768 / (1024 * 50257 * 768 + 512**3)
    assert answer(use) == (
        f"1 of 2 matmuls and convolutions, {big_share:.1f} % of the FLOPs, run on Tensor "
        "Cores; lm_head misses by one dimension: padding 50257 to 50304 gains 1.8×, measured."
    )


def test_a_gain_within_the_spread_is_not_promised() -> None:
    assert best_gain([head(1.79e-3)]) is None
    assert "padding" not in answer(used(head(1.79e-3)))


def test_a_layers_matmuls_are_added_up() -> None:
    """Forward n, backward k and m: 1.8 + 2 x 1.2 ms become 1.0 + 2 x 0.8."""
    change = ((50257, 50304),)
    backward = linear(
        1024,
        768,
        50257,
        1.2e-3,
        2e-3,
        places=(Place("lm_head", "backward", 2),),
        padded=(Padded(change, 1, timing(0.8e-3)),),
    )
    (gain,) = padding_gains([head(1e-3), backward])
    assert (gain.module, gain.changes, gain.matmuls) == ("lm_head", change, 3)
    assert gain.gain == pytest.approx(4.2 / 2.6)
    assert gain.low < gain.gain < gain.high


def test_a_cpu_is_named_for_what_it_is() -> None:
    matmul = linear(1024, 256, 256, 1e-3, 2e-3, kernels=("matmul brg_matmul:avx512_core_bf16",))
    text = answer(used(matmul, device="cpu"))
    assert "this CPU's half-precision instructions (AVX512-BF16)" in text
    assert "Tensor" not in text


def test_none_says_why() -> None:
    text = answer(used(linear(64, 64, 64, 1e-5, None, dtype="fp32", kernels=())))
    assert text.startswith("None of 1 matmul or convolution runs on Tensor Cores. ")
    assert "TF32 switched off" in text


def test_what_is_not_measured_yet_is_counted() -> None:
    matmul = big(BIG / 600e12, BIG / 45e12)
    results = [
        step([matmul], more_calls=5),
        ceiling("fp32", 50e12),
        ceiling("bf16", 7e14),
        matmul,
    ]
    use = core_use(results, H100)
    assert use is not None
    assert "5 are not measured yet" in answer(use)
    assert core_use([copy(1e12)], H100) is None


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((8, 4), (4, 1), "contiguous"),
        ((8, 4), (1, 8), "transposed"),
        ((2, 8, 4), (32, 1, 8), "transposed"),
        ((8, 4), (0, 1), "expanded"),
        ((8, 4), (16, 1), "strided"),
        ((2, 16, 8, 8), (1024, 1, 128, 16), "channels_last"),
        ((2, 16, 8, 8), (1024, 64, 8, 1), "contiguous"),
        ((), (), "contiguous"),
    ],
)
def test_layouts(shape: tuple[int, ...], stride: tuple[int, ...], expected: str) -> None:
    assert layout(Operand(shape, stride, "fp16")) == expected


def test_shapes_name_what_is_not_contiguous() -> None:
    operands = (Operand((8, 4), (4, 1), "fp16"), Operand((4, 6), (1, 4), "fp16"))
    assert shapes(operands) == "8×4 · 4×6 transposed"


def test_json_holds_every_number_and_its_verdict() -> None:
    use = used(head(1e-3))
    info = RunInfo(
        "id", core_results.SPEC, State.FINISHED, 1.0, 2.0, 3.0, None, None, H100, "", "", 1, None
    )
    found = json.loads(cores_json(info, use))
    (matmul,) = found["products"]
    assert matmul["verdict"] == "used"
    assert matmul["timing"]["repeats"] == 20
    assert matmul["flops_s"] == pytest.approx(2 * 1024 * 50257 * 768 / 1.8e-3)
    assert found["machine"]["capability"] == "9.0"
    assert found["padding"][0]["gain"] == pytest.approx(1.8)
