"""``ampscope.watch``: stay inside a training loop that goes on as it was.

    with ampscope.watch(model, optimizer, scaler) as run:
        for batch in loader: ...                 # no other change

    run = ampscope.watch(model)                  # or so: optimizer and scaler are found
    run.close()

A *step* is one optimizer step, taken or skipped; with several optimizers each of them
makes its own. The training's numbers are bit-identical with and without.
"""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampscope.capture.own_ops import own_ops
from ampscope.capture.user_objects import torch_optimizer
from ampscope.errors import AmpscopeError, BadInput
from ampscope.records import Event
from ampscope.store.db import default_path
from ampscope.watcher.alarm_dispatcher import POLICIES, WatchSettings, ending_of
from ampscope.watcher.alarms import AlarmBounds, StopAsked, TrainingStopped
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.live_figure import LiveFigure, as_html, in_notebook
from ampscope.watcher.models import WatchedModels, plain_module
from ampscope.watcher.place import place_now
from ampscope.watcher.replay import StepReplay
from ampscope.watcher.session import Session, close_watches_of
from ampscope.watcher.watched_run import program
from ampscope.watcher.webhook import checked_address

OnAlarm = Callable[[Event], None]
_OF_A_SCALER = ("scale", "step", "unscale_", "update", "get_scale", "is_enabled")


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
        """Alarms reported so far."""
        return list(self._session.dispatcher.reported)

    @property
    def capsules(self) -> list[Path]:
        """Files of failing steps, to be run again with :meth:`replay` or ``ampscope replay``."""
        return self._session.capsule_store.paths

    @property
    def should_stop(self) -> bool:
        """An alarm under the policy ``stop``, or a user's ``ampscope runs cancel``."""
        return self._session.dispatcher.should_stop

    def loss(self, value: Any) -> None:
        """The loss of the step that is coming, where it is not the tensor that backward began at:
        a number or a tensor of one element."""
        with own_ops():
            self._session.now.give(value)

    def record_next(self, steps: int = 1, *, reference: bool = False) -> None:
        """Take histograms of the steps that come after the present one, whatever the schedule.

        With ``reference`` the last of them is run again before its optimizer step: beside fp32,
        which distinguishes lost values from those that were zero, and with its ops traced. That
        takes about as long as five steps, once.
        """
        step = self._session.now.step
        self._session.schedule.ask(step, steps)
        if reference:
            self._session.referenced.add(step + steps)

    def checkpoint(
        self, path: str | Path, *, keep: bool = False, problem: str | None = None
    ) -> bool:
        """Say that a checkpoint was saved at ``path``, a file or folder, of the state as it is now.

        Where weights, averages, buffers and optimizer state are finite it is marked healthy: named
        by `ampscope.last_healthy(folder)` and in later alarms. With ``keep`` it is kept from the
        trainer's rotation by hard links in ``ampscope-healthy/`` beside it, until the next healthy
        one; later checkpoints must then be new files, not the same one overwritten. ``problem`` is
        what :meth:`state_problem` said when the state was saved, where it has changed since.

        Returns:
            Whether it was marked healthy. Why not is recorded in the run.

        Raises:
            BadInput: the watch was made without ``guard=True``.
        """
        with own_ops():
            return self._session.checkpoint(Path(path), keep=keep, problem=problem)

    def state_problem(self) -> str:
        """What is not finite now of weights, averages, buffers and optimizer state; "" where all of
        it is. Raises BadInput where the watch was made without ``guard=True``."""
        with own_ops():
            return self._session.state_problem()

    def replay(self) -> StepReplay:
        """Run the newest kept step again, here and now, with the weights as they are.

        Raises BadInput when no step was kept, or when it cannot be run again.
        """
        return self._session.bad.replay()

    def close(self, error: BaseException | None = None) -> None:
        """Take everything off and finish the run; again does nothing."""
        with own_ops():
            self._session.close(*ending_of(error))
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):  # a figure that fails must hide no error
                live.update(last=True)

    def __enter__(self) -> Watch:
        self._session.dispatcher.in_block = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        self.close(error)
        return isinstance(error, TrainingStopped | StopAsked)

    def show(self) -> None:
        """Show the live figure in this cell of a notebook; `watch` does so by itself."""
        live = LiveFigure(self.store, self.id)
        self._session.recorder.after_each_flush(live.update)
        self._live = live

    def __repr__(self) -> str:
        return f"<ampscope run {self.id}, {self._session.now.step} steps, in {self.store}>"

    def _repr_html_(self) -> str:
        """The live figure of a notebook."""
        self._session.recorder.wait()
        try:
            return as_html(self.store, self.id)
        except AmpscopeError as error:
            return f"<p>{html.escape(str(error))}</p>"


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
    taps: bool = False,
    group: str = "",
    guard: bool = False,
    ema: Any = None,
    webhook: str | None = None,
) -> Watch:
    """Watch ``model`` from here on; returns at once. An earlier watch of the same model is closed.

    Args:
        model: one, a list or a dict of them. Wrappers (DDP, torch.compile) are looked through.
        optimizer: one or a list. None follows every optimizer that holds a watched parameter.
        scaler: one or a list. None follows every `torch.amp.GradScaler` that steps one of them.
        every: steps from one set of histograms to the next; 0 takes them only when a step goes bad.
            None: every tenth step, until histograms have taken 2 s; then as often as their price
            stays about 1 % of the training's time.
        store: the file to write; a folder gets one file per rank. None: what AMPSCOPE_STORE names,
            else ~/.local/share/ampscope/runs.db.
        name: what the run is called.
        on_alarm: called with each alarm, in the thread that trains.
        policy: what an alarm does besides: ``warn``, ``raise``, ``stop`` or ``ignore``; or a dict
            from alarms' names to these, with ``"default"`` for the others.
        alarms: when an alarm is raised.
        capsules: what is kept of failing steps.
        replay: run a kept step again at once and record the first bad op. Runs the model's forward
            once more; whatever that does besides computing (printing, counting) happens again.
        taps: count inside code that torch.compile makes from here on, through inductor: outputs of
            modules and the gradients there. Ask for it before the first step. It breaks no graph;
            what is read is kept in memory, so the last bits of a loss may differ from those without
            (docs/compiled.md has the measurements). False: a compiled model is seen from outside.
        group: name that all ranks of one training share; found by itself under torchrun and Slurm.
        guard: look at optimizer state, buffers and averages of weights at every step, and mark
            healthy checkpoints (:meth:`Watch.checkpoint`).
        ema: averages of weights for ``guard``: a module, a dict or list of tensors, or a function
            that returns one of these.
        webhook: an http or https address that gets a POST for each alarm; what is sent is listed in
            docs/privacy.md.

    Raises:
        BadInput: what was given is no model, no optimizer or no scaler.

    A store that cannot be written, or that another program holds for 3 s, is one warning: the
    training goes on, with its alarms and without a record.
    """
    if every is not None and every < 0:
        raise BadInput("every is a number of steps, or 0 for bad steps only.")
    for one in [policy] if isinstance(policy, str) else policy.values():
        if one not in POLICIES:
            raise BadInput(f"policy is one of {', '.join(POLICIES)}, not {one!r}.")
    place = place_now(group)
    with own_ops():
        models = WatchedModels(named(model), place.rank)
    if not models.parameters:
        raise BadInput("The model has no parameters: there is nothing to train.")
    path = path_of(store)
    if store is not None and str(store).endswith("/"):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the recorder says it
            path.expanduser().mkdir(parents=True, exist_ok=True)
    settings = WatchSettings(
        every=every,
        policy=policy,
        name=name or name_of(models),
        bounds=alarms or AlarmBounds(),
        limits=capsules or CapsuleLimits(),
        replay=replay,
        on_alarm=on_alarm,
        taps=taps,
        webhook=None if webhook is None else checked_address(webhook),
        guard=guard,
        ema=ema,
    )
    given = optimizers_of(optimizer), scalers_of(scaler)
    close_watches_of(models)
    with own_ops():
        session = Session(models, *given, path, place, settings)
        session.open()
    run = Watch(session)
    if in_notebook() and not session.recorder.error:
        with contextlib.suppress(AmpscopeError):  # another program holds the store
            run.show()
    return run


def named(models: object) -> dict[str, nn.Module]:
    """The models that a caller gave, by name. Raises BadInput for anything that is not a model."""
    if isinstance(models, Mapping):
        pairs = [(str(name), model) for name, model in models.items()]
    elif isinstance(models, list | tuple):
        names = _class_names([type(plain_module(model)).__name__ for model in models])
        pairs = list(zip(names, models, strict=True))
    else:
        pairs = [("model", models)]
    for name, model in pairs:
        if not isinstance(model, nn.Module):
            raise BadInput(
                f"watch() takes a torch.nn.Module, a list of them or a dict of them; {name!r} is "
                f"of type {type(model).__name__}."
            )
    if not pairs:
        raise BadInput("watch() was given no model.")
    return dict(pairs)


def _class_names(names: list[str]) -> list[str]:
    """Each class's name, numbered where several models have it."""
    return [
        name if names.count(name) == 1 else f"{name}{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def path_of(store: str | Path | None) -> Path:
    """The file to write. A home that is not there stays as it was written: the recorder says it."""
    with contextlib.suppress(RuntimeError):
        return default_path() if store is None else Path(store).expanduser()
    return Path(store or os.environ.get("AMPSCOPE_STORE") or "~/ampscope.db")


def name_of(models: WatchedModels) -> str:
    """What the run is called by default: the models and the script."""
    script = Path(program()).name
    kinds = "+".join(type(root.plain).__name__ for root in models.roots)
    return f"{kinds} in {script}" if script.endswith(".py") else kinds


def optimizers_of(given: Any) -> list[Optimizer]:
    """Raises BadInput for anything that is no optimizer."""
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found = []
    for given_one in several:
        optimizer = torch_optimizer(given_one)
        if optimizer is None:
            raise BadInput(
                "watch() takes torch.optim.Optimizer objects or wrappers of them; it was given "
                f"one of type {type(given_one).__name__}. Leave it out to have it found."
            )
        found.append(optimizer)
    return found


def scalers_of(given: Any) -> list[Any]:
    """Raises BadInput for anything that does not scale."""
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for scaler in several:
        if not all(callable(getattr(scaler, name, None)) for name in _OF_A_SCALER):
            raise BadInput(
                "watch() takes torch.amp.GradScaler objects; it was given one of type "
                f"{type(scaler).__name__}. Leave it out to have it found."
            )
    return list(several)
