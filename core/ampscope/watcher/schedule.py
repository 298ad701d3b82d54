"""At which steps histograms are taken: every k-th, and for a few steps after a bad one.

A *round* is one step of each optimizer, so that with two of them (a GAN) both are looked at.
A step is bad when its loss or a gradient was not finite. The first bad step after good ones
tightens the schedule for :data:`TIGHT_STEPS` steps. A run that goes bad again and again would be
recorded at every step for days: each tightening doubles the wait before the next, up to
:data:`LONGEST_WAIT`; a calm that lasts ten times as long makes the wait short again. Of a streak
of bad steps the first :data:`STREAK` are recorded as scheduled, then those whose number in the
streak is a power of two: a run that stays NaN overnight has nothing new to say at each step.

Histograms of a small model may take as long as its step. Where the caller named no interval, they
may take :data:`FREE_S` seconds in all, and from then on :data:`SHARE` of the training's time: the
next due round at which they have taken less is recorded. A short run gets every one of them. The
first ones are free: they load, compile and allocate what later ones find.
"""

from __future__ import annotations

TIGHT_STEPS = 4  # the step after a skip retries with half the scale; four see a scale fall 16-fold
FIRST_WAIT = 2 * TIGHT_STEPS  # steps from one tightening to the next
LONGEST_WAIT = 100_000
CALM = 10  # waits
STREAK = 64  # bad steps in a row; twice what a scale needs to fall from 2^32 to 1
WEIGHTS_EVERY = 10  # of the recorded rounds; weights change slowly, and there are many
EVERY = 10  # rounds, where the caller named none
FREE_S = 2.0
SHARE = 0.01


class Schedule:
    """Decides the detail of each step; the caller says which steps were bad."""

    def __init__(self, every: int | None) -> None:
        self.every = EVERY if every is None else every  # rounds; 0: none unless a step goes bad
        self._is_bounded = every is None
        self._spent_s = self._trained_s = 0.0
        self._has_first = False  # histograms were taken
        self._round = -1  # the last that was recorded because it was due
        self._recorded = 0  # rounds, for the same reason
        self._tight_until = -1
        self._next_tightening = 0
        self._wait = FIRST_WAIT
        self._streak = 0  # bad steps in a row so far

    def detail(self, step: int, round_: int) -> tuple[bool, bool]:
        """Whether to take histograms at ``step``, which belongs to round ``round_``; and whether of
        the weights too, and of how far the step moves them."""
        tight = step <= self._tight_until
        due = self.every > 0 and round_ % self.every == 0 and self.is_news
        if due and round_ != self._round:
            due = not self._is_bounded or self._spent_s <= FREE_S + SHARE * self._trained_s
            self._recorded += due
            self._round = round_ if due else self._round
        # Who asks for every step asks for everything.
        weights = due and (self.every == 1 or self._recorded % WEIGHTS_EVERY == 1)
        return due or tight, weights

    def took(self, histograms_s: float, step_s: float) -> None:
        """A step that took ``step_s`` seconds is over; of these its histograms took so many."""
        self._spent_s += histograms_s if self._has_first else 0.0
        self._has_first |= histograms_s > 0
        self._trained_s += step_s

    @property
    def is_news(self) -> bool:
        """Whether one more bad step would be worth its histograms."""
        return self._streak < STREAK or self._streak & (self._streak - 1) == 0

    def ask(self, step: int, steps: int) -> None:
        """Record ``steps`` steps after ``step`` as well."""
        self._tight_until = max(self._tight_until, step + steps)

    def saw(self, step: int, *, bad: bool) -> bool:
        """Take note of how ``step`` went; True when the schedule tightens now."""
        onset = bad and not self._streak
        self._streak = self._streak + 1 if bad else 0
        if not onset or step < self._next_tightening:
            return False
        if step > self._next_tightening + CALM * self._wait:
            self._wait = FIRST_WAIT
        self._tight_until = step + TIGHT_STEPS
        self._next_tightening = step + self._wait
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True
