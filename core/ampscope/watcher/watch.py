"""``ampscope.watch``: stay inside a training loop that goes on as it was.

    with ampscope.watch(model, optimizer, scaler) as run:
        for batch in loader: ...                 # no other change

    run = ampscope.watch(model)                  # or so: optimizer and scaler are found
    run.close()

A *step* is one attempted optimizer step, taken or skipped; with several optimizers each of them
makes its own. The training's numbers are bit-identical with and without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from ampscope.errors import BadInput
from ampscope.records import Event
from ampscope.store.db import default_path
from ampscope.watcher.alarms import AlarmBounds, StopAsked, TrainingStopped
from ampscope.watcher.arguments import name_of, named, optimizers_of, scalers_of
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.notebook import LiveFigure, as_html, in_notebook
from ampscope.watcher.ranks import place_now
from ampscope.watcher.replay import Replay
from ampscope.watcher.session import Session
from ampscope.watcher.telling import POLICIES, Settings, ending_of

OnAlarm = Callable[[Event], None]


class Watch:
    """A training that is being watched; made by :func:`watch`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._live: LiveFigure | None = None

    @property
    def id(self) -> str:
        """The run's id in the store."""
        return self._session.recorder.run_id

    @property
    def store(self) -> Path:
        """The file that is written."""
        return self._session.recorder.path

    @property
    def alarms(self) -> list[Event]:
        """What was told so far."""
        return list(self._session.telling.told)

    @property
    def capsules(self) -> list[Path]:
        """Files of failing steps, to be run again with :meth:`replay` or ``ampscope replay``."""
        return self._session.keeper.paths

    @property
    def should_stop(self) -> bool:
        """An alarm under the policy ``stop``, or somebody's ``ampscope runs cancel``."""
        return self._session.telling.should_stop

    def loss(self, value: Any) -> None:
        """The loss of the step that is coming, where it is not the tensor that backward began at:
        a number or a tensor of one element."""
        self._session.now.give(value)

    def record_next(self, steps: int = 1, *, reference: bool = False) -> None:
        """Take histograms of the steps that come after the present one, whatever the schedule.

        With ``reference`` the last of them is run again before its optimizer step: beside fp32,
        which tells lost values from those that were zero, and with its ops traced. That takes about
        as long as five steps, once.
        """
        step = self._session.now.step
        self._session.schedule.ask(step, steps)
        if reference:
            self._session.referenced.add(step + steps)

    def replay(self) -> Replay:
        """Run the newest kept step again, here and now, with the weights as they are.

        Raises BadInput when no step was kept, or when it cannot be run again.
        """
        return self._session.bad.replay()

    def close(self, error: BaseException | None = None) -> None:
        """Take everything off and finish the run; again does nothing."""
        self._session.close(*ending_of(error))
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):  # a figure that fails must hide no error
                live.update(last=True)

    def __enter__(self) -> Watch:
        self._session.telling.in_block = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        self.close(error)
        return isinstance(error, TrainingStopped | StopAsked)

    def show(self) -> None:
        """Show the live figure in this cell of a notebook; `watch` does so by itself."""
        live = LiveFigure(self.store, self.id)
        self._session.recorder.after_flush = live.update
        self._live = live

    def __repr__(self) -> str:
        return f"<ampscope run {self.id}, {self._session.now.step} steps, in {self.store}>"

    def _repr_html_(self) -> str:
        """The live figure of a notebook."""
        self._session.recorder.wait()
        return as_html(self.store, self.id)


def watch(
    model: nn.Module | Iterable[nn.Module] | dict[str, nn.Module],
    optimizer: Any = None,
    scaler: Any = None,
    every: int | None = None,
    store: str | Path | None = None,
    name: str | None = None,
    *,
    on_alarm: OnAlarm | None = None,
    policy: str | Mapping[str, str] = "warn",
    alarms: AlarmBounds | None = None,
    capsules: CapsuleLimits | None = None,
    replay: bool = False,
    group: str = "",
) -> Watch:
    """Watch ``model`` from here on; returns at once.

    Args:
        model: one, a list or a dict of them. Wrappers (DDP, torch.compile) are looked through.
        optimizer: one or a list. None follows every optimizer that holds a watched parameter.
        scaler: one or a list. None follows every `torch.amp.GradScaler` that steps one of them.
        every: steps from one set of histograms to the next; 0 takes them only when a step goes bad.
            None: every tenth step, until histograms have taken 2 s; then as often as their price
            stays about 1 % of the training's time.
        store: the file to write, default as everywhere; a folder gets one file a rank.
        name: what the run is called.
        on_alarm: called with each alarm, in the thread that trains.
        policy: what an alarm does besides: ``warn``, ``raise``, ``stop`` or ``ignore``; or a dict
            from alarms' names to these, with ``"default"`` for the others.
        alarms: when an alarm is raised.
        capsules: what is kept of failing steps.
        replay: run a kept step again at once and record the first bad op. Runs the model's forward
            once more; whatever that does besides computing (printing, counting) happens again.
        group: name that all ranks of one training share; found by itself under torchrun and Slurm.

    Raises:
        BadInput: what was given is no model, no optimizer or no scaler.
        StoreError: the store cannot be written.
    """
    if every is not None and every < 0:
        raise BadInput("every is a number of steps, or 0 for bad steps only.")
    for one in [policy] if isinstance(policy, str) else policy.values():
        if one not in POLICIES:
            raise BadInput(f"policy is one of {', '.join(POLICIES)}, not {one!r}.")
    place = place_now(group)
    models = WatchedModels(named(model), place.rank)
    if not models.parameters:
        raise BadInput("The model has no parameters: there is nothing to train.")
    path = default_path() if store is None else Path(store).expanduser()
    if store is not None and str(store).endswith("/"):
        path.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        every=every,
        policy=policy,
        name=name or name_of(models),
        bounds=alarms or AlarmBounds(),
        limits=capsules or CapsuleLimits(),
        replay=replay,
        on_alarm=on_alarm,
    )
    session = Session(models, optimizers_of(optimizer), scalers_of(scaler), path, place, settings)
    session.open()
    run = Watch(session)
    if in_notebook():
        run.show()
    return run
