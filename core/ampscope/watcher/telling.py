"""What is done with an alarm: the caller's function, then the policy; how a run ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ampscope.records import Event, State
from ampscope.watcher.alarms import Alarm, AlarmBounds, AmpscopeWarning, StopAsked, TrainingStopped
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.recorder import MAX_MESSAGE

POLICIES = ("warn", "raise", "stop", "ignore")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the caller asked for."""

    every: int
    policy: str
    name: str
    bounds: AlarmBounds
    limits: CapsuleLimits
    replay: bool
    on_alarm: Callable[[Event], None] | None


class Telling:
    """Tells alarms; ``is_cancelled`` says whether a person asked the run to stop."""

    def __init__(self, settings: Settings, is_cancelled: Callable[[], bool]) -> None:
        self.told: list[Event] = []
        self.should_stop = False
        self.in_block = False  # a `with` block, which a stop may leave
        self._settings = settings
        self._is_cancelled = is_cancelled

    def tell(self, alarms: list[Event]) -> None:
        """Raises Alarm under the policy ``raise``; in a block that is to end, TrainingStopped or
        StopAsked."""
        self.should_stop |= self._is_cancelled()
        if self._settings.on_alarm is not None:
            for alarm in alarms:
                self._settings.on_alarm(alarm)
        for alarm in alarms:
            if self._settings.policy == "raise":
                raise Alarm(alarm.text)
            if self._settings.policy != "ignore":
                warnings.warn(f"Step {alarm.step}: {alarm.text}", AmpscopeWarning, stacklevel=2)
            self.should_stop |= self._settings.policy == "stop"
        if self.should_stop and self.in_block:
            if not alarms:
                raise StopAsked("A person asked the run to stop.")
            raise TrainingStopped(alarms[0].text)


def ending_of(error: BaseException | None) -> tuple[State, str]:
    """How a run ends that ``error`` ended; None ends it well."""
    if error is None:
        return State.FINISHED, ""
    if isinstance(error, TrainingStopped):
        return State.FINISHED, f"Stopped by an alarm: {error}"
    if isinstance(error, StopAsked):
        return State.CANCELLED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return State.CANCELLED, "Interrupted by a person."
    return State.FAILED, f"The training raised {type(error).__name__}: {error}"[:MAX_MESSAGE]
