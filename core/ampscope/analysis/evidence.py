"""Evidence: all runs of one script, and the views of them that several rules share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ampscope.analysis.repeatability import FLOOR, beyond_floor
from ampscope.analysis.results import are_beyond
from ampscope.analysis.root_op import RootOp, root_op
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms, symptoms_of_control
from ampscope.control import BASELINE, NUDGED, REPEAT


class Evidence:
    """What the rules may look at; ``runs`` maps a control's word to its run, as_is among them.
    ``emulates_bf16``: the GPU has no bf16 instructions, so bf16 is evidence, and no fix."""

    def __init__(
        self, runs: Mapping[str, RunView], policy: str, *, emulates_bf16: bool = False
    ) -> None:
        self.runs = dict(runs)
        if REPEAT in self.runs:
            self.runs[BASELINE].repeat = self.runs[REPEAT]
        self.policy = policy
        self.emulates_bf16 = emulates_bf16

    @property
    def baseline(self) -> RunView:
        """The baseline: the unchanged script. Every diagnosis has this run."""
        return self.runs[BASELINE]

    @property
    def framework(self) -> str:
        """torch, keras or paddle; without torch's op trace some causes cannot be judged."""
        return self.baseline.outcome.framework

    @property
    def fp32(self) -> RunView | None:
        """The fp32 control; None when it was not run."""
        return self.runs.get("fp32")

    @property
    def bf16(self) -> RunView | None:
        """The bf16 control; None when it was not run."""
        return self.runs.get("bf16")

    @cached_property
    def symptoms(self) -> frozenset[Symptom]:
        """What is wrong with the baseline run. A loss that falls less than in fp32, and a result
        that is worse, are nothing where the least change carries the training as far."""
        found = symptoms(self.baseline, self.fp32)
        nudged = self.runs.get(NUDGED)
        if nudged is None or self.fp32 is None:
            return found
        runs = self.baseline, self.fp32, nudged
        chance = set[Symptom]()
        if Symptom.BEHIND in found and beyond_floor(*runs) is False:
            chance.add(Symptom.BEHIND)
        if Symptom.RESULTS in found and not are_beyond(*runs, FLOOR):
            chance.add(Symptom.RESULTS)
        return found - chance

    @cached_property
    def fp32_symptoms(self) -> frozenset[Symptom]:
        """What is wrong with the fp32 control by itself; nothing when it was not run."""
        if self.fp32 is None:
            return frozenset()
        found = symptoms_of_control(self.fp32, self.baseline)
        # A lack of memory says nothing of the training.
        return found - {Symptom.EXCEPTION} if self.fp32.outcome.is_out_of_memory else found

    @cached_property
    def fp32_fails(self) -> bool:
        """The fp32 control has non-finite numbers, raises or diverges: AMP may be innocent. An
        error that the baseline run does not meet is the control's own: it acquits no precision."""
        raised_alone = {Symptom.EXCEPTION} - self.symptoms
        return bool(self.fp32_symptoms - raised_alone)

    @cached_property
    def fp32_fails_first(self) -> bool:
        """fp32 goes wrong at the same step as the baseline run, or earlier."""
        if self.fp32 is None or not self.fp32_fails:
            return False
        own, reference = self.baseline.first_bad_step, self.fp32.first_bad_step
        return reference is not None and (own is None or reference <= own)

    @property
    def has_the_range_of_fp32(self) -> bool:
        """bf16 is the only half format that the script was seen to use, and nothing runs in fp16
        unasked: cuDNN's recurrent layers do under bf16 autocast."""
        outcome = self.baseline.outcome
        named = f"{outcome.uses_autocast}+{outcome.uses_half_model}".split("+")
        formats = {*named, *outcome.flop_dtypes} & {"fp16", "bf16"}
        return formats == {"bf16"} and "rnn" not in outcome.gaps

    @cached_property
    def already_in_bf16(self) -> bool:
        """A bf16 control would repeat the script: nothing that was recorded is in fp16, and no
        scaler is there to be switched off."""
        run = self.baseline
        formats = {use.makes for use in run.line_uses} | {op.dtype for op in run.bad_ops}
        formats |= {dtype for use in run.line_uses for dtype in use.takes}
        formats |= {site.dtype for site in run.sites} | {scan.dtype for scan in run.scans}
        for step in run.steps:
            kinds = step.weight_dtypes, step.grad_dtypes, step.state_dtypes
            formats |= {dtype for kind in kinds for dtype in kind.split("+")}
        no_fp16 = "fp16" not in formats and not any("fp16" in a.written_in for a in run.steps)
        return self.has_the_range_of_fp32 and no_fp16 and not run.has_scaler

    @cached_property
    def uses_half(self) -> bool:
        """The script uses half precision at all: under autocast, in a model of it, in ops on
        tensors that it casts itself, or at a site that only stores numbers in it."""
        outcome = self.baseline.outcome
        in_half = outcome.half_ops or {"fp16", "bf16"} & {*outcome.flop_dtypes}
        is_named = outcome.uses_autocast or outcome.uses_half_model
        return bool(is_named or in_half or self.baseline.sites)

    @cached_property
    def root(self) -> RootOp | None:
        """The op to which the non-finite loss, gradient or evaluation goes back."""
        return root_op(self.baseline)

    @cached_property
    def lost_share(self) -> float | None:
        """Gradient entries that are zero here and not in fp32, as a share of all."""
        if self.fp32 is None:
            return None
        own, reference = self.baseline.zero_share, self.fp32.zero_share
        return None if own is None or reference is None else own - reference
