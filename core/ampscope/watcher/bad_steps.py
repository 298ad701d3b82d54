"""What is done about a step that is not finite: say where, keep it, run it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ampscope.analysis.ranks import SHARED
from ampscope.capture.own_ops import script_ops
from ampscope.capture.tensors import all_finite
from ampscope.errors import BadInput
from ampscope.number_words import value
from ampscope.records import Event
from ampscope.watcher.alarm_dispatcher import WatchSettings
from ampscope.watcher.capsule import SHARDED, About
from ampscope.watcher.capsule_store import CapsuleStore
from ampscope.watcher.flight import FlightRecorder, Forward
from ampscope.watcher.guard import Guard
from ampscope.watcher.histograms import StepHistograms
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.place import RankPlace
from ampscope.watcher.recorder import Recorder
from ampscope.watcher.replay import StepReplay, replay
from ampscope.watcher.sentinel import Sentinel
from ampscope.watcher.step import StepNumbers


class BadSteps:
    """Examines the bad steps of one watched training."""

    def __init__(
        self, models: WatchedModels, histograms: StepHistograms, flight: FlightRecorder,
        capsule_store: CapsuleStore, recorder: Recorder, place: RankPlace, policy: str,
        settings: WatchSettings, guard: Guard,
    ) -> None:  # fmt: skip
        self.sentinel = Sentinel(models, guard) if place.world > 1 else None  # entered by the owner
        self._replays_at_once = settings.replay
        self._models = models
        self._histograms = histograms
        self._flight = flight
        self._capsule_store = capsule_store
        self._recorder = recorder
        self._place = place
        self.policy = policy  # whose autocast rules the training follows
        self._told = ("", "")  # what was last said of this streak of bad steps

    @property
    def is_in_streak(self) -> bool:
        """Whether the last step that was judged went bad."""
        return self._told != ("", "")

    def end_step(self) -> list[Tensor]:
        """The step is over: what the sentinel saw of it, for :meth:`examine`."""
        return [] if self.sentinel is None else self.sentinel.take()

    @property
    def sums(self) -> list[Tensor]:
        """What the sentinel has seen of the present step."""
        return [] if self.sentinel is None else self.sentinel.sums

    def good(self) -> None:
        """A step went well."""
        self._told = ("", "")
        self._capsule_store.good()

    def examine(
        self, step: int, numbers: StepNumbers, forwards: Sequence[Forward],
        sums: Sequence[Tensor], *, is_late: bool,
    ) -> list[Event]:  # fmt: skip
        """Events of a bad step, of whose backward the sentinel took the ``sums``. ``is_late``: it
        is over, and the weights may be other ones. Waits for the device."""
        loss, scale = numbers.loss, numbers.scale
        loss_is_bad = numbers.is_loss_bad and not numbers.is_search
        where, text = self._first_sign(loss if loss_is_bad else None, forwards, sums)
        if numbers.is_search:
            where = "backward"
            text = f"A gradient that the loss is computed with made it {value(loss)}."
        fault = self._capsule_store.is_fault(scale, loss_is_bad=loss_is_bad)
        sign = ("nonfinite" if fault else "calibration", where)
        # A run that stays bad says so once, not at every step for days.
        events = [] if sign == self._told else [Event(step, *sign, text)]
        self._told = sign
        if not fault or not self._capsule_store.has_room or where == SHARED:
            return events  # of a shared one another rank has the cause
        about = About(
            run=self._recorder.run_id,
            step=step,
            rank=self._place.rank,
            where=where,
            reason=text,
            scale=scale or 1.0,
            policy=self.policy,
            torch=torch.__version__,
        )
        why = SHARDED if self._models.is_sharded else "the step was over" if is_late else ""
        try:
            kept = self._capsule_store.keep(about, forwards, self._recorder, without_weights=why)
            events.append(kept)
        except torch.OutOfMemoryError:
            text = "There was no memory left to keep the step."
            return [*events, Event(step, "note", "no capsule", text)]
        if self._replays_at_once and not is_late:
            again = _said(self.replay)
            text = again if isinstance(again, str) else again.text
            events.append(Event(step, "replay", "first bad op", text))
        return events

    def replay(self) -> StepReplay:
        """Run the newest kept step again on the live models."""
        kept = self._capsule_store.last
        if kept is None:
            raise BadInput("No failing step was kept: there is nothing to run again.")
        return self._run_again(kept.forwards, kept.about.scale).explained(kept.about.where)

    def reference(self, forwards: Sequence[Forward], scale: float | None) -> StepReplay | str:
        """The present step once more, beside fp32; a sentence when that cannot be."""
        return _said(lambda: self._run_again(forwards[-1:], scale or 1.0))

    def _run_again(self, forwards: Sequence[Forward], scale: float) -> StepReplay:
        plain = {root.name: root.plain for root in self._models.roots}
        with self.paused(), script_ops():
            return replay(plain, forwards, scale, self._models)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile is none of the training's."""
        self._pause(on=True)
        try:
            yield
        finally:
            self._pause(on=False)

    def _pause(self, *, on: bool) -> None:
        self._flight.is_paused = on
        self._histograms.pause(on=on)
        if self.sentinel is not None:
            self.sentinel.is_paused = on

    def _first_sign(
        self, bad_loss: float | None, forwards: Sequence[Forward], sums: Sequence[Tensor]
    ) -> tuple[str, str]:
        """Where this process itself saw the step go bad. Without ``sums`` nothing is known of its
        own backward (a single process, a compiled model)."""
        held = [gradient for f in forwards for gradient in f.gradients.values()]
        if bad_loss is not None:
            return "loss", f"The loss was {value(bad_loss)}."
        if not all(map(all_finite, held)):
            return "output gradient", "The gradient at the model's output was not finite."
        if not sums or not all(map(all_finite, sums)):
            return "backward", "The loss was finite, and gradients were not."
        return SHARED, "This rank's own gradients were finite, and their sum was not."


def _said(run: Callable[[], StepReplay]) -> StepReplay | str:
    """What came of it, or why it cannot be done here."""
    try:
        return run()
    except BadInput as error:
        return f"The step could not be run again: {error}"
    except torch.OutOfMemoryError:
        return "The step could not be run again beside the training: out of memory."
