"""Loss-scaling policies in step with the real scalers, over random and adversarial sequences."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from ampscope.scalers.replay import POLICIES, ScalerSettings
from tests.helpers.overflow_sequences import (
    SEQUENCES,
    Sequence,
)

STEPS = 10_000


SETTINGS = (
    ScalerSettings(2.0**16, 2000),
    ScalerSettings(2.0**16, 7),
    ScalerSettings(2.0**120, 3, 4.0, 0.25),
    ScalerSettings(3.7, 5, 1.7, 0.3),
    ScalerSettings(1.0, 1, 2.0, 0.5),
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda s: s.__name__)
def test_torch(sequence: Sequence, settings: ScalerSettings) -> None:
    """torch's own scaler, driven by the kernel that its update() calls."""
    policy, chance = POLICIES["torch"], random.Random(1)
    scaler = torch.amp.GradScaler(
        "cpu", settings.initial_scale, settings.growth_factor, settings.backoff_factor,
        settings.growth_interval,
    )  # fmt: skip
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    state = policy.start(settings)
    for number, found_inf in enumerate(itertools.islice(sequence(chance), STEPS)):
        scaler.scale(parameter.sum())
        assert scaler.get_scale() == state.scale, number
        parameter.grad = torch.full((1,), math.inf if found_inf else 0.0)
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        state = policy.step(state, found_inf, settings)
        assert scaler.get_scale() == state.scale, number
        assert scaler.state_dict()["_growth_tracker"] == state.good, number
        assert torch.equal(parameter.detach(), before)
        if state.scale < 2.0**-120:  # finite gradients write Inf below this (torch's own limit)
            break


def test_torch_refuses_to_grow_to_infinity() -> None:
    policy, settings = POLICIES["torch"], ScalerSettings(2.0**127, 1)
    state = policy.step(policy.start(settings), found_inf=False, settings=settings)
    assert (state.scale, state.good) == (2.0**127, 0)


# Trajectories written by hand from the frameworks' rules, where the framework
# itself is not installed; tests/ext/frameworks drives the real ones.
def scales(name: str, found: list[bool], settings: ScalerSettings) -> list[float]:
    policy = POLICIES[name]
    state = policy.start(settings)
    seen = []
    for found_inf in found:
        state = policy.step(state, found_inf, settings)
        seen.append(state.scale)
    return seen


def test_paddle_waits_for_so_many_in_a_row() -> None:
    found = [True, False, True, True, False, True, True, True]
    settings = ScalerSettings(64.0, 100, backoff_after=2)
    assert scales("paddle", found, settings) == [64, 64, 64, 32, 32, 32, 16, 16]


def test_paddle_and_keras_may_grow_to_infinity_and_stay() -> None:
    for name in ("paddle", "keras"):
        grown = scales(name, [False, False, True], ScalerSettings(2.0**127, 1))
        assert grown == [math.inf, math.inf, math.inf]


def test_tensorflow_has_a_floor_and_refuses_infinity() -> None:
    assert scales("tensorflow", [True] * 3, ScalerSettings(2.0, 10)) == [1, 1, 1]
    assert scales("tensorflow", [False], ScalerSettings(2.0**127, 1)) == [2.0**127]


def test_keras_falls_to_zero_below_the_smallest_normal_number() -> None:
    assert scales("keras", [True, True], ScalerSettings(2.0**-125, 10)) == [2.0**-126, 0.0]


def test_an_interval_that_was_lowered_never_ends_but_in_tensorflow() -> None:
    """The equality test of torch, Paddle and Keras is passed by for good; TF1's is not."""
    for name, grows in (("torch", 0), ("paddle", 0), ("keras", 0), ("tensorflow", 20)):
        policy = POLICIES[name]
        state = policy.start(ScalerSettings(8.0, 100))
        for _ in range(10):
            state = policy.step(state, False, ScalerSettings(8.0, 100))
        lowered, found = ScalerSettings(8.0, 1), 0
        for _ in range(20):
            before = state.scale
            state = policy.step(state, False, lowered)
            found += state.scale > before
        assert found == grows, name


def test_defaults_are_those_of_the_frameworks() -> None:
    assert POLICIES["torch"].defaults.initial_scale == torch.amp.GradScaler("cpu")._init_scale
    assert {
        n: (p.defaults.initial_scale, p.defaults.growth_interval) for n, p in POLICIES.items()
    } == {
        "torch": (65536, 2000),
        "paddle": (65536, 2000),
        "paddle-amp-scaler": (32768, 1000),
        "keras": (32768, 2000),
        "tensorflow": (32768, 2000),
    }
