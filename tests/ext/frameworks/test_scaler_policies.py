"""Loss-scaling policies in step with real scalers of Paddle and Keras, where they are installed.

Each framework is driven in a Python of its own, named by the environment:

    AMPSCOPE_PADDLE_PYTHON=/venv-paddle/bin/python    pip install paddlepaddle "numpy<2.4"
    AMPSCOPE_KERAS_PYTHON=/venv-keras/bin/python      pip install tensorflow-cpu
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from ampscope.scalers.replay import POLICIES, ScalerSettings, allowed
from tests.helpers.overflow_sequences import SEQUENCES

STEPS = 10_000
JOBS = (
    ScalerSettings(2.0**16, 2000),
    ScalerSettings(2.0**16, 7, backoff_after=2),
    ScalerSettings(2.0**100, 3, 4.0, 0.25, backoff_after=3),
    ScalerSettings(3.7, 5, 1.7, 0.3),
)
PYTHONS = {
    "paddle": "AMPSCOPE_PADDLE_PYTHON",
    "keras": "AMPSCOPE_KERAS_PYTHON",
    "tensorflow": "AMPSCOPE_KERAS_PYTHON",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PYTHONS)
def test_the_real_scaler_and_the_policy_agree_at_every_step(name: str) -> None:
    python = os.environ.get(PYTHONS[name])
    if not python:
        pytest.skip(f"{PYTHONS[name]} names no Python that has it")
    policy = POLICIES[name]
    jobs = [
        (allowed(policy, settings), list(itertools.islice(make(random.Random(7)), STEPS)))
        for settings, make in itertools.product(JOBS, SEQUENCES)
    ]
    asked = [
        {
            "settings": dataclasses.asdict(settings),
            "found_inf": "".join("01"[inf] for inf in found),
        }
        for settings, found in jobs
    ]
    script = Path(__file__).parent / f"{name}_scaler.py"
    done = subprocess.run(
        [python, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    for (settings, found), real in zip(jobs, answer["scales"], strict=True):
        state, ours = policy.start(settings), []
        for inf in found:
            state = policy.step(state, inf, settings)
            ours.append(state.scale)
        wrong = [n for n, pair in enumerate(zip(ours, real, strict=True)) if pair[0] != pair[1]]
        assert not wrong, (settings, wrong[:5], [(ours[n], real[n]) for n in wrong[:5]])
