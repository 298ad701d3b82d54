"""The trajectory that a policy would have taken over a recorded run's gradients.

    scale of step 0 = the policy's first
    for each recorded step: would its gradients have overflowed at the scale? (overflow.fate)
        the policy's step function says the next scale

What the weights would have become is not replayed: a step that a policy skips, or does not, changes
the gradients after it. The answer is exact for the gradients as they were recorded. Where a
histogram cannot tell (the top bin is too coarse, or the step overflowed when it was recorded and a
smaller scale is asked for), the replay takes the likelier way and counts the step as a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ampscope.scalers.overflow import Fate, StepGradients, fate
from ampscope.scalers.policies import Policy, ScalerState, Settings, allowed
from ampscope.scalers.turns import ONLY, Turn

_NO_STARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a replay."""

    step: int
    scale: float
    skipped: bool
    fate: Fate
    is_guess: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole trajectory."""

    policy: str
    settings: Settings
    steps: tuple[Replayed, ...]

    @property
    def skips(self) -> int:
        """Steps that the policy would have left out."""
        return sum(step.skipped for step in self.steps)

    @property
    def guesses(self) -> tuple[int, ...]:
        """Steps whose fate the histograms do not tell."""
        return tuple(step.step for step in self.steps if step.is_guess)

    @property
    def first_guess(self) -> int | None:
        """From here on the trajectory may be another."""
        return self.guesses[0] if self.guesses else None


def replay(
    gradients: Sequence[StepGradients],
    policy: Policy,
    settings: Settings,
    turns: Sequence[Turn] | None = None,
    starts: Mapping[str, float] = _NO_STARTS,
) -> Replay:
    """Over recorded steps in order.

    ``turns`` say which steps share an update of a scaler, else each is a turn of its own;
    ``starts`` are first scales of scalers, where they are not the settings'. A step in no turn went
    through no scaler: it is not skipped, at whatever scale.
    """
    used = allowed(policy, settings)
    if turns is None:
        turns = [Turn(ONLY, (place,)) for place in range(len(gradients))]
    later = _later_tops(gradients)
    states: dict[str, ScalerState] = {}
    made: dict[int, Replayed] = {}
    for turn in turns:
        if turn.scaler not in states:
            first = starts.get(turn.scaler, used.initial_scale)
            states[turn.scaler] = policy.start(replace(used, initial_scale=first))
        state = states[turn.scaler]
        for place in turn.places:
            made[place] = _step(gradients[place], state, later[place])
        looked_at = turn.places[-1:] if policy.last_decides else turn.places
        found_inf = any(made[place].skipped for place in looked_at)
        states[turn.scaler] = policy.step(state, found_inf, used)
    steps = [made.get(n) or Replayed(g.step, 1.0, False, Fate.FINITE, False)
             for n, g in enumerate(gradients)]  # fmt: skip
    return Replay(policy.name, used, tuple(steps))


def _step(recorded: StepGradients, state: ScalerState, later: StepGradients | None) -> Replayed:
    seen = fate(recorded, state.scale)
    skipped, is_guess = _decided(seen, recorded, state, later)
    return Replayed(recorded.step, state.scale, skipped, seen, is_guess)


def _decided(
    seen: Fate, recorded: StepGradients, state: ScalerState, later: StepGradients | None
) -> tuple[bool, bool]:
    """(skipped, a guess)."""
    if seen is Fate.COARSE:
        return True, True
    if seen is not Fate.UNKNOWN:
        return seen is Fate.OVERFLOW, False
    # The next step that has finite gradients in a histogram tells how large they are about now.
    if later is None or not state.scale:
        return recorded.found_inf, True
    return fate(later, state.scale) in (Fate.OVERFLOW, Fate.COARSE), True


def _later_tops(gradients: Sequence[StepGradients]) -> list[StepGradients | None]:
    """For each step the next one with finite gradients in a histogram."""
    found: list[StepGradients | None] = []
    following: StepGradients | None = None
    for recorded in reversed(gradients):
        if not recorded.found_inf and recorded.has_histogram:
            following = recorded
        found.append(following)
    return found[::-1]
