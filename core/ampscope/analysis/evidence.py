"""Evidence: all runs of one script, and the views that several rules share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ampscope.analysis.root_op import RootOp, root_op
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms


class Evidence:
    """What the rules may look at; ``runs`` maps a control's word to its run, as_is among them."""

    def __init__(self, runs: Mapping[str, RunView], policy: str) -> None:
        self.runs = dict(runs)
        self.policy = policy

    @property
    def as_is(self) -> RunView:
        """The script as it is; every diagnosis has this run."""
        return self.runs["as_is"]

    @property
    def framework(self) -> str:
        """torch, keras or paddle; without torch's op trace some causes cannot be judged."""
        return self.as_is.outcome.framework

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
        """What is wrong with the script as it is."""
        return symptoms(self.as_is, self.fp32)

    @cached_property
    def fp32_symptoms(self) -> frozenset[Symptom]:
        """What is wrong with the fp32 control by itself; nothing when it was not run."""
        if self.fp32 is None:
            return frozenset()
        found = symptoms(self.fp32, None)
        # A lack of memory says nothing of the training.
        return found - {Symptom.EXCEPTION} if self.fp32.outcome.is_out_of_memory else found

    @cached_property
    def fp32_fails(self) -> bool:
        """The fp32 control has non-finite numbers, raises or diverges: AMP may be innocent."""
        return bool(self.fp32_symptoms)

    @cached_property
    def fp32_fails_first(self) -> bool:
        """fp32 goes wrong in the same attempt as the script as it is, or before it."""
        if self.fp32 is None or not self.fp32_fails:
            return False
        own, reference = self.as_is.first_bad_attempt, self.fp32.first_bad_attempt
        return reference is not None and (own is None or reference <= own)

    @property
    def has_the_range_of_fp32(self) -> bool:
        """bf16 is the only half format that the script was seen to use, and nothing runs in fp16
        unasked: cuDNN's recurrent layers do under bf16 autocast."""
        outcome = self.as_is.outcome
        formats = {*f"{outcome.uses_autocast}+{outcome.uses_half_model}".split("+")} - {""}
        return formats == {"bf16"} and "rnn" not in outcome.gaps

    @cached_property
    def uses_half(self) -> bool:
        """The script computes in half precision at all."""
        outcome = self.as_is.outcome
        return bool(outcome.uses_autocast or outcome.uses_half_model)

    @cached_property
    def root(self) -> RootOp | None:
        """The op to which the non-finite loss, gradient or evaluation goes back."""
        return root_op(self.as_is)

    @cached_property
    def lost_share(self) -> float | None:
        """Gradient entries that are zero here and not in fp32, as a share of all."""
        if self.fp32 is None:
            return None
        own, reference = self.as_is.zero_share, self.fp32.zero_share
        return None if own is None or reference is None else own - reference
