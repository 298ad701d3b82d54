"""One piece of evidence for each cause that lies in calls, numbers of whole runs, or errors."""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.compiled_runs import (
    AOT_EAGER,
    EAGER_CASTS,
    EAGER_RANDOM,
    GRAPH_ALONE,
    TAPPED,
)
from ampscope.analysis.evidence import Evidence
from ampscope.control import COMPILED
from ampscope.observations import (
    COMPILED_FRAMES,
    COMPILED_NOTE,
    STALE_CACHED,
    HalfSite,
    OpUse,
    ParameterGradient,
)
from tests.helpers.evidence_making import (
    BACKWARD,
    DIRECT_STEP,
    FALLING,
    FLAT,
    INF,
    NAN,
    OVERFLOWED,
    SCALE,
    SCALED_LOOP,
    STEP,
    STEPS,
    UNSCALE,
    UPDATE,
    WITHOUT_SCALER,
    ZERO,
    but,
    evidence,
    fp32_run,
    log,
    run,
    scan,
    search,
    steps,
)
from tests.helpers.evidence_of_ops import OF_OPS, STEEP

CLIP = replace(ZERO, name="clip", subject="", value=38825.0, scaled=True, note="1")
GRAD = replace(ZERO, name="grad", subject="", scaled=True, create_graph=True)
LOAD = replace(ZERO, name="load", subject="", note="without scaler state", line="train.py:73")
RNN_LIKE_GROWTH = [10.0**n for n in range(20)]  # each loss ten times the one before


TABLE = HalfSite(
    "cast", "train.py:7", "Tensor.half", "fp16", "data", prepares=True, calls=1, elements=4096,
    changed=4000, whole=False, largest=9131.0, error=0.3,
)  # fmt: skip


def rounded_table() -> Evidence:
    """The loss stays where it is, and with one line's cast lifted it comes down as in fp32."""
    lifted = "fp32_lines:train.py:7"
    return evidence(
        run(steps(FLAT, **WITHOUT_SCALER), TABLE),
        **{lifted: run(steps(**WITHOUT_SCALER), control=lifted)},
    )


def raised(kind: str, text: str) -> Evidence:
    """The script raised at its first step; fp32 trains."""
    ended = {
        "ended": "exception",
        "error_type": kind,
        "error_text": text,
        "error_line": "train.py:9",
    }
    return evidence(run([], calls=log((SCALE, BACKWARD), (1.5,)), **ended))


def compiled_apart(*wrong: str) -> Evidence:
    """Eager code trains; compiled, and compiled otherwise, the runs in ``wrong`` have a loss that
    is larger by a half."""
    names = (COMPILED, EAGER_RANDOM, AOT_EAGER, GRAPH_ALONE, EAGER_CASTS, TAPPED)
    frames = OpUse(COMPILED_FRAMES, "", "", "train.py:7", 0, count=2)
    off = [1.5 * loss for loss in FALLING]
    runs = {n: run(steps(off if n in wrong else FALLING), frames, control=n) for n in names}
    return evidence(run(steps(), notes=(COMPILED_NOTE,)), **runs)


def clip_before_unscale() -> Evidence:
    """pytorch#40907: the clip saw a norm of 38,825, and nothing is learnt."""
    return evidence(run(steps(FLAT), calls=log((ZERO, SCALE, BACKWARD, CLIP, STEP, UPDATE))))


def scaler_bypassed() -> Evidence:
    """imageclassification#1: optimizer.step() again after scaler.step()."""
    return evidence(run(steps(), calls=log((ZERO, SCALE, BACKWARD, STEP, DIRECT_STEP, UPDATE))))


def accumulation_mismatch() -> Evidence:
    """pytorch#36601: unscale_ and update in each of two micro-batches, one step at the end."""
    micro = (SCALE, BACKWARD, UNSCALE, UPDATE)
    return evidence(run(steps(), calls=log((ZERO, *micro, *micro, STEP))))


def scaled_penalty() -> Evidence:
    """stylegan2-pytorch#103: autograd.grad of a scaled output, never divided by the scale."""
    return evidence(run(steps(), calls=log((ZERO, SCALE, GRAD, BACKWARD, STEP, UPDATE))))


def state_lost() -> Evidence:
    """ultralytics#22189: a steady scale of 2^-5 before, 2^16 after, and 21 steps are skipped."""
    before = [replace(a, scale=2.0**-5) for a in steps(FALLING)]
    after = search(steps(FALLING), 65536.0, 21)
    moved = [replace(a, step=a.step + STEPS) for a in after]
    first = log(SCALED_LOOP)
    load = replace(LOAD, seq=len(first), step=STEPS)
    second = [replace(c, step=c.step + STEPS) for c in log(SCALED_LOOP, start=len(first) + 1)]
    return evidence(run([*before, *moved], calls=[*first, load, *second]))


def two_optimizers(own_scalers: bool = False, zeros: int = 1000) -> Evidence:
    """stylegan2-pytorch#100: one overflows in each step, and the other ends with zero gradients."""
    critic = but(steps(FLAT), range(STEPS), **OVERFLOWED)
    critic = [replace(a, step=2 * a.step, scale=2.0 ** (16 - a.step)) for a in critic]
    other = [
        replace(
            a, step=2 * a.step + 1, optimizer="optimizer1", scale=2.0 ** (16 - a.step),
            scaler="scaler1" if own_scalers else "scaler0",
            grad_zero=zeros if a.step > 20 else 0,
        )
        for a in steps(FLAT)
    ]  # fmt: skip
    made = sorted([*critic, *other], key=lambda a: a.step)
    return evidence(run(made))


def scale_too_high() -> Evidence:
    """neosr#4: 2^40 at first; 22 of 60 steps are lost before it is low enough."""
    losses = [*FLAT[:22], *(1.5 - 0.02 * n for n in range(38))]
    return evidence(run(search(steps(losses), 2.0**40, 22)), fp32_run(steps([*FALLING, *FALLING])))


def loss_too_large() -> Evidence:
    """LightningDOT#5: a summed loss of 4.6e6; 18 skips take the scale from 2^16 to 0.25."""
    losses = [4.6e6 - 4e4 * n for n in range(60)]
    fp32 = fp32_run(steps(losses, grad_max=2.6e5))
    return evidence(run(search(steps(losses), 65536.0, 18), replace(STEEP, count=18)), fp32)


def nothing_arrives(scaler: bool = False) -> Evidence:
    """Open-Rig3R#35: no scaler and a loss near 1e-6; every gradient is zero, no weight moves."""
    facts = {} if scaler else WITHOUT_SCALER
    dead = steps(FLAT, grad_zero=1000, moved_share=0.0, grad_norm=0.0, **facts)
    gone = ParameterGradient(0, "optimizer0", "net.0.weight", 0, 1000, 1000, 0, 0.0)
    kept = replace(gone, zero=0, norm=1.0)
    return evidence(run(dead, gone), fp32_run(None, kept))


def adam_in_half() -> Evidence:
    """glide-finetune#5: fp16 state, eps 1e-8, a column that is always zero: 0/0."""
    half = {"weight_dtypes": "fp16", "grad_dtypes": "fp16", "state_dtypes": "fp16", "eps": 1e-8}
    made = but(
        steps((1.5, *(NAN,) * (STEPS - 1)), **half, **WITHOUT_SCALER), [0], weight_nonfinite=16
    )
    late = but(made, range(1, STEPS), grad_nonfinite=1000, weight_nonfinite=1000)
    return evidence(run(late, uses_autocast="", uses_half_model="fp16"))


def gains_of_one() -> Evidence:
    """ao#1124: bf16 weights of 1.0 and steps of 1e-3, below half of 2^-7: nothing moves."""
    half = {"weight_dtypes": "bf16", "grad_dtypes": "bf16", "state_dtypes": "bf16"}
    made = steps(FLAT, moved_share=0.0, update_norm=0.0, **half, **WITHOUT_SCALER)
    return evidence(run(made, uses_autocast="", uses_half_model="bf16"))


def poisoned_statistics() -> Evidence:
    """pytorch#88474: step 5 overflowed and was skipped; the running mean is NaN for good."""
    made = but(steps(), [5], loss=NAN, **OVERFLOWED)
    ends = scan("end", "buffer", "bn.running_mean", nan=16, max_abs=None)
    return evidence(
        run(made, scan("start", "buffer", "bn.running_mean"), ends, eval_nonfinite=True)
    )


def bad_batch() -> Evidence:
    """Marigold#111: a NaN in batch 7; AMP skips that step, fp32 never recovers."""
    batch = scan("batch", "batch", "input 0 of Depth", nan=1, step=7)
    own = but(steps(), [7], loss=NAN, **OVERFLOWED)
    dead = but(steps([*FALLING[:7], *(NAN,) * 23]), range(7, STEPS), grad_nonfinite=1000)
    return evidence(
        run(own, batch), fp32_run(but(dead, range(7, STEPS), weight_nonfinite=9), batch)
    )


def old_copies() -> Evidence:
    """Flow-Factory#186: one autocast region around the loop; the loss stays where it was."""
    use = OpUse(STALE_CACHED, "aten.addmm", "inp", "train.py:80", 1, STEPS - 1, 0.3, 10)
    return evidence(run(steps(FLAT, **WITHOUT_SCALER), use, uses_autocast="bf16"))


def diverging() -> Evidence:
    """nanoGPT#136: rate 30; fp32 grows tenfold a step into NaN, AMP skips 28 of 30 steps."""
    bad = {"grad_nonfinite": 1000, "weight_nonfinite": 1000, "grad_norm": None}
    dead = but(steps([*RNN_LIKE_GROWTH, INF, *(NAN,) * 9], lr=30.0), range(20, STEPS), **bad)
    own = but(steps((1.0, 10.0, *(10.0,) * 28), lr=30.0), range(2, STEPS), **OVERFLOWED)
    return evidence(run(own), fp32_run(dead))


def bad_weights() -> Evidence:
    """transformers#46002: the head holds NaN before the first step, in every precision."""
    weight = scan("start", "parameter", "classifier.weight", nan=64)
    dead = {"grad_nonfinite": 1000, "weight_nonfinite": 64}
    fp32 = fp32_run(steps((NAN,) * STEPS, **dead), weight)
    return evidence(run(steps((NAN,) * STEPS, **OVERFLOWED, weight_nonfinite=64), weight), fp32)


UNSCALED_TWICE = "unscale_() has already been called on this optimizer since the last update()."
HALF_REFUSED = "Attempting to unscale FP16 gradients."
OF_RUNS = {
    "scaler_protocol_error": lambda: raised("RuntimeError", UNSCALED_TWICE),
    "fp16_params_with_scaler": lambda: raised("ValueError", HALF_REFUSED),
    "clip_before_unscale": clip_before_unscale,
    "scaler_bypassed": scaler_bypassed,
    "accumulation_scale_mismatch": accumulation_mismatch,
    "scaled_gradient_penalty": scaled_penalty,
    "scaler_state_lost": state_lost,
    "shared_scaler_interference": two_optimizers,
    "loss_scale_too_high": scale_too_high,
    "loss_magnitude_overflow": loss_too_large,
    "gradient_underflow": nothing_arrives,
    "optimizer_state_range": adam_in_half,
    "small_update_lost": gains_of_one,
    "batchnorm_stats_corrupted": poisoned_statistics,
    "bad_input_data": bad_batch,
    "stale_low_precision_copy": old_copies,
    "not_amp_divergence": diverging,
    "bad_initial_state": bad_weights,
    "harmful_rounding": rounded_table,
}  # fmt: skip
OF_COMPILERS = {
    "compiler_precision": lambda: compiled_apart(COMPILED, EAGER_RANDOM),
    "compiler_kernel": lambda: compiled_apart(COMPILED, EAGER_RANDOM, EAGER_CASTS, TAPPED),
    "vanishes_when_observed": lambda: compiled_apart(COMPILED, EAGER_RANDOM, EAGER_CASTS),
    "graph_semantics": lambda: compiled_apart(COMPILED, EAGER_RANDOM, AOT_EAGER),
}
EVIDENCE_OF = {**OF_COMPILERS, **OF_OPS, **OF_RUNS}
