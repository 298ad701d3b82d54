"""What is done with an alarm: the caller's function, then the policy; how a run ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampscope.capture.own_ops import script_ops
from ampscope.records import Event, State
from ampscope.watcher.alarms import Alarm, AlarmBounds, StopAsked, TrainingStopped, warn
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.recorder import MAX_MESSAGE

POLICIES = ("warn", "raise", "stop", "ignore")


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """What the caller asked for."""

    every: int | None  # None: the default schedule, which bounds its price
    policy: str | Mapping[str, str]  # of all alarms, or by name, "default" for the others
    name: str
    bounds: AlarmBounds
    limits: CapsuleLimits
    replay: bool
    on_alarm: Callable[[Event], None] | None
    taps: bool = False  # inside compiled code
    webhook: str | None = None  # an address that alarms are sent to
    guard: bool = False
    ema: Any = None

    def policy_of(self, alarm: str) -> str:
        """What is done with the alarm."""
        if isinstance(self.policy, str):
            return self.policy
        return self.policy.get(alarm, self.policy.get("default", "warn"))


class AlarmDispatcher:
    """Reports alarms; ``is_cancelled`` says whether a person asked the run to stop."""

    def __init__(
        self,
        settings: WatchSettings,
        is_cancelled: Callable[[], bool],
        send: Callable[[list[Event]], None],
    ) -> None:
        self.reported: list[Event] = []
        self.should_stop = False
        self.in_block = False  # a `with` block, which a stop may leave
        self._settings = settings
        self._is_cancelled = is_cancelled
        self._send = send  # to the webhook; returns at once

    def dispatch(self, alarms: list[Event]) -> None:
        """Raises Alarm under the policy ``raise``; in a block that is to end, TrainingStopped or
        StopAsked."""
        asked = self._is_cancelled()
        policies = [self._settings.policy_of(alarm.name) for alarm in alarms]
        self.should_stop |= asked or "stop" in policies
        raised = [a for a, policy in zip(alarms, policies, strict=True) if policy == "raise"]
        self.tell(alarms, silent=("ignore", "raise"))
        if raised:
            raise Alarm(raised[0].text)
        if self.should_stop and self.in_block:
            if asked or not alarms:  # an alarm may ring at the same step, under another policy
                raise StopAsked("A person asked the run to stop.")
            raise TrainingStopped(alarms[0].text)

    def tell(self, alarms: list[Event], silent: Sequence[str] = ("ignore",)) -> None:
        """To the webhook, to ``on_alarm``, and by a warning, but for the ``silent`` policies."""
        self._send(alarms)
        if self._settings.on_alarm is not None:
            for alarm in alarms:
                with script_ops():
                    self._settings.on_alarm(alarm)
        for alarm in alarms:
            if self._settings.policy_of(alarm.name) not in silent:
                warn(f"Step {alarm.step}: {alarm.text}")


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
