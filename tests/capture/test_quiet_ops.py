"""Ops of which there is little to tell leave the same records as when each is looked at in full."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ampscope.capture.script.op_watch import OpWatch
from ampscope.records import RunSpec
from ampscope.runner.script import RunCallbacks, run_script
from ampscope.zoo.answers import script_path

# Masks of minus infinity, an overflow that is swallowed, a NaN of a backward pass, an average of
# weights, clips by hand, sums in half, constants, a GAN of two scalers.
SCRIPTS = (
    "c96_masked_tokens.py", "c13_bucketed_mask.py", "c35_pairwise_distances.py", "c15_rms_norm.py",
    "c55_gradient_clipping.py", "c80_weight_averaging.py", "c85_rotary_attention.py",
    "h04_gan_two_scalers.py", "c100_sparse_activations.py", "c74_half_adam.py",
)  # fmt: skip


_MEASURED = re.compile(r"\b(ended_at|peak_bytes|elapsed_s|step_cpu_s)=[-+\w.]+")


def records(name: str) -> list[str]:
    """As texts, as a NaN equals no other, and without what no two runs have in common."""
    spec = RunSpec(str(script_path(name)), kind="script", steps=6, policy="native", control="as_is")
    observed = run_script(spec, "native", RunCallbacks()).observations
    return [_MEASURED.sub(r"\1", repr(one)) for one in observed]


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_lost(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet, found = OpWatch.quiet, 0

    def counted(watch: OpWatch, *args: Any) -> Any:
        nonlocal found
        given = quiet(watch, *args)
        found += given is not None
        return given

    monkeypatch.setattr(OpWatch, "quiet", counted)
    short = records(name)
    assert found > 50  # or nothing is compared
    monkeypatch.setattr(OpWatch, "quiet", lambda *_: None)
    assert short == records(name)
