"""One line in a user's own training: a run of kind "watch" in the store.

    with Watch():
        train()

    model.fit(…, callbacks=[WatchCallback()])

Loss, scale, skips and learning rate of every step; with ``histograms_every=N`` also layers,
activations, gradients and weights of every N-th step. Nothing is changed: on a CPU, where Paddle's
AMP does nothing, it goes on doing nothing. Fp16 rehearsed on a CPU is ``ampscope run``'s matter.

Also here: all instruments at once (:func:`watching`), which a probe and a script use as well;
settings that change a training; the machine.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle

from ampscope.ext.frameworks.adapters import ControlSettings, parse, wanted_gpu
from ampscope.ext.frameworks.paddle.decorated import HalfParameters
from ampscope.ext.frameworks.paddle.emulation import Emulation
from ampscope.ext.frameworks.paddle.layers import LayerPaths, LayerWatch
from ampscope.ext.frameworks.paddle.loss_scales import Scalers
from ampscope.ext.frameworks.paddle.regions import AUTO_CAST, DTYPE_NAMES, OpenRegion
from ampscope.ext.frameworks.paddle.seen_ops import OpCounts
from ampscope.ext.frameworks.paddle.steps import StepWatch
from ampscope.ext.frameworks.paddle.values import subclasses
from ampscope.ext.frameworks.recorder import Recorder
from ampscope.ext.frameworks.watch_run import WatchOptions, WatchRun, on_leaving
from ampscope.patches import Patches
from ampscope.records import Machine, RunSpec, State
from ampscope.runner.child_frame import host_facts

_Callback: Any = paddle.callbacks.Callback
_CallbackList: Any = paddle.hapi.callbacks.CallbackList


class Watch:
    """Records the training inside ``with``.

    Args:
        store: the file to write, default as everywhere.
        histograms_every: steps from one set of histograms to the next; 0 takes none.
        label: what the run is called.

    ``runs`` holds the ids of the runs that were written, the newest last.
    """

    def __init__(
        self, store: str | Path | None = None, histograms_every: int = 0, label: str = ""
    ) -> None:
        self.options = WatchOptions.of(store, histograms_every, label)
        self.runs: list[str] = []
        self._training: _Training | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self.open()
        self._stack.enter_context(self.attached())
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._stack.close()
        training = self._end()
        if training is not None and error is not None:
            training.run.failed(error)
        elif training is not None:
            training.run.close(State.FINISHED)

    def open(self) -> None:
        """Begin a run in the store; nothing is watched yet."""
        self.close()
        spec = self.options.spec("paddle")
        run = WatchRun.opened(self.options, spec, machine)
        if run is not None:
            self.runs.append(run.run_id)
            self._training = _Training(run, spec)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch what trains inside the block."""
        with contextlib.ExitStack() as stack:
            if self._training is not None:
                stack.enter_context(self._training.attached())
            yield

    def close(self) -> None:
        """End the run that is open."""
        self.__exit__(None, None, None)

    def left(self, error: BaseException | None) -> None:
        """A ``fit`` was left by an exception, which may not be known."""
        self._stack.close()
        training = self._end()
        if training is not None:
            training.run.left(error)

    def _end(self) -> _Training | None:
        """What was under way; nothing more comes of it."""
        training, self._training = self._training, None
        if training is not None:
            training.run.take(training.recorder)
        return training


class _Training:
    """One run, and the instruments that write it."""

    def __init__(self, run: WatchRun, spec: RunSpec) -> None:
        self.run = run
        self.recorder = Recorder(spec.cadence, run.keep)
        paths = LayerPaths()
        self._steps = StepWatch(self.recorder, paths, is_sparing=True)
        in_fp32 = AppliedSettings(ControlSettings(), OpenRegion(), None).in_fp32
        self._layers = LayerWatch(self.recorder, paths, in_fp32, is_sparing=True)
        self._left = 0.0  # when it was detached last

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch what trains inside the block."""
        self.run.away_s += time.monotonic() - self._left if self._left else 0.0
        with Patches() as patches:
            self._steps.put_on(patches)
            if self.recorder.cadence.histogram > 0:
                self._layers.put_on(patches)
            yield
        self._left = time.monotonic()


class WatchCallback(_Callback):  # type: ignore[misc]  # Paddle has no types
    """:class:`Watch` for ``paddle.Model.fit``; the same arguments, and ``runs`` as well."""

    def __init__(
        self, store: str | Path | None = None, histograms_every: int = 0, label: str = ""
    ) -> None:
        super().__init__()
        self.watch = Watch(store, histograms_every, label)
        self.runs = self.watch.runs
        self._stack = contextlib.ExitStack()

    def on_train_begin(self, logs: object = None) -> None:
        """Begins to record."""
        self._end(None)
        self.watch.__enter__()
        patches = self._stack.enter_context(Patches())
        patches.wrap(self.model, "train_batch", self._train_batch)
        self._stack.callback(on_leaving(_CallbackList, self._left))

    def on_train_end(self, logs: object = None) -> None:
        """Ends the run."""
        self._end(None)

    def _train_batch(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        self._stack.close()
        self.watch.__exit__(None if error is None else type(error), error, None)

    def _left(self, error: BaseException | None) -> None:
        """``fit`` ended by an exception that came from elsewhere: the data, another callback."""
        self._stack.close()
        self.watch.left(error)


# All instruments at once: what trains inside the block is watched, and changed by settings.


_NO_EFFECT = ".*can only be enabled on CUDAPlace.*"  # Paddle on a CPU, where auto_cast is emulated


@contextmanager
def watching(recorder: Recorder, settings: ControlSettings) -> Iterator[list[str]]:
    """Watch; the list fills with sentences on what could not be seen or done."""
    cpu, notes = on_cpu(), list[str]()
    region = OpenRegion(settings.precision)
    emulation = Emulation(region) if cpu else None
    if emulation is not None:
        recorder.half_seen = emulation.halves  # one set, for ops and for layers
    applied = AppliedSettings(settings, region, emulation)
    half = HalfParameters(settings.precision)
    paths = LayerPaths()
    layers = LayerWatch(
        recorder,
        paths,
        applied.in_fp32,
        emulation,
        applied.around if settings.fp32_modules else None,
    )
    counted = None if emulation is None else _CountedOps(recorder, emulation, layers)
    steps = StepWatch(recorder, paths, half, counted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        if emulation is not None:
            warnings.filterwarnings("ignore", _NO_EFFECT, UserWarning)
            stack.enter_context(half.active())
            stack.enter_context(emulation.active())
        patches = stack.enter_context(Patches())
        change_precision(patches, "" if cpu else settings.precision)
        scalers = Scalers(settings, on_cpu=cpu)
        for part in (scalers, steps, applied, layers):
            part.put_on(patches)
        try:
            yield notes
        finally:
            steps.end()
    notes += applied.notes()
    if compiled := paths.compiled():
        named = ", ".join(path or "the model" for path in compiled)
        rounded = ", and on a CPU it is not rounded" if cpu else ""
        notes.append(
            f"paddle.jit.to_static has compiled {named}: what runs there is not seen{rounded}."
        )


class _CountedOps:
    """In the steps whose ops are wanted; those of an optimizer's step are not the model's."""

    def __init__(self, recorder: Recorder, emulation: Emulation, layers: LayerWatch) -> None:
        self._recorder, self._emulation, self._layers = recorder, emulation, layers
        self._counts = OpCounts(self._module)
        self.step_ended()

    def step_begins(self) -> None:
        """The ops since the last step are the model's."""
        self._recorder.ops.add(self._counts.take())
        self._emulation.op_seen = None

    def step_ended(self) -> None:
        """Those of the step itself are not."""
        self._counts.take()
        self._emulation.op_seen = self._counts if self._recorder.wants_ops else None

    def _module(self) -> int | None:
        layers = self._layers
        return self._recorder.index_of(layers.path) if layers.paths.roots else None


# Settings that change a training: learning rate, epsilon, layers in fp32, an added scaler.
#
# Precision is the region's and the decorated parameters' (``OpenRegion`` and ``HalfParameters`` of
# :mod:`.emulation`), the scaler's numbers are those of ``Scalers`` in :mod:`.steps`.


_Optimizer: Any = paddle.optimizer.Optimizer


class AppliedSettings:
    """``put_on`` while a script trains; ``around`` for the calls of layers."""

    def __init__(
        self, settings: ControlSettings, region: OpenRegion, emulation: Emulation | None
    ) -> None:
        self.settings = settings
        self._region = region
        self._emulation = emulation
        self._scaler: Any = None
        self._met: set[str] = set()
        self._depth = 0

    def put_on(self, patches: Patches) -> None:
        """Apply them; optimizers and layers are as before afterwards, their numbers are not."""
        settings = self.settings
        if settings.lr_factor != 1.0:
            patches.wrap(_Optimizer, "get_lr", self._rate)
            patches.wrap(_Optimizer, "_create_param_lr", self._scaled_rate)
        if settings.eps is not None or settings.add_scaler:
            for kind in subclasses(_Optimizer):
                if "step" in vars(kind):
                    patches.wrap(kind, "step", self._step)
        if settings.add_scaler:
            patches.wrap(paddle.Tensor, "backward", self._backward)

    def notes(self) -> list[str]:
        """What could not be applied, after the training."""
        missing = [p for p in self.settings.fp32_modules if p not in self._met]
        if not missing:
            return []
        return [f"No layer is called {', '.join(missing)}; it was not kept in fp32."]

    def around(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` in fp32 where the settings name the layer or one that holds it."""
        named = [m for m in self.settings.fp32_modules if path == m or path.startswith(f"{m}.")]
        if not named:
            return call
        self._met.update(named)
        return functools.partial(self.in_fp32, call)

    def in_fp32(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Every op inside runs in fp32, whatever region is open."""
        if self._emulation is not None:
            self._emulation.fp32_depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._emulation.fp32_depth -= 1
        region = self._region.now()
        if region is None:
            return call(*args, **kwargs)
        # Level OD runs in half what is on the white list and nothing else; with an empty one every
        # op casts its inputs, half parameters among them, to fp32.
        none = {"level": "OD", "custom_black_list": region.white, "dtype": DTYPE_NAMES[region.half]}
        with paddle.amp.auto_cast(**none):
            return call(*args, **kwargs)

    def _rate(self, original: Any, optimizer: Any) -> float:
        return float(original(optimizer)) * self.settings.lr_factor

    def _scaled_rate(self, original: Any, optimizer: Any, pair: Any) -> Any:
        return original(optimizer, pair) * self.settings.lr_factor

    def _step(self, original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.settings.eps is not None and hasattr(optimizer, "_epsilon"):
            optimizer._epsilon = self.settings.eps
        if self._scaler is None or self._depth:
            return original(optimizer, *args, **kwargs)
        self._depth += 1
        try:
            self._scaler.step(optimizer)
            return self._scaler.update()
        finally:
            self._depth -= 1

    def _backward(self, original: Any, loss: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._scaler is None and AUTO_CAST.amp_global_state().amp_dtype == "float16":
            self._scaler = paddle.amp.GradScaler()
        if self._scaler is not None:
            return original(self._scaler.scale(loss), *args, **kwargs)
        return original(loss, *args, **kwargs)


def change_precision(patches: Patches, half: str) -> None:
    """On CUDA, where Paddle's own auto_cast works: every region and ``decorate`` in ``half``; for
    "fp32" regions are off and ``decorate`` does nothing; "" changes nothing."""
    if not half:
        return

    def guard(original: Any, enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        names = ("custom_white_list", "custom_black_list", "level", "dtype", "use_promote")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if half == "fp32":
            return original(enable=False, **given)
        return original(enable=enable, **{**given, "dtype": DTYPE_NAMES[half]})

    def decorate(
        original: Any, models: Any, optimizers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if half == "fp32":
            return models if optimizers is None else (models, optimizers)
        names = ("level", "dtype", "master_weight", "save_dtype", "master_grad", "excluded_layers")
        given = {**dict(zip(names, args, strict=False)), **kwargs, "dtype": DTYPE_NAMES[half]}
        return original(models, optimizers, **given)

    for owner in (AUTO_CAST, paddle.amp):
        patches.wrap(owner, "amp_guard", guard)
        patches.wrap(owner, "amp_decorate", decorate)


# Where a run of Paddle takes place: the fields of ``Machine``.


def on_cpu() -> bool:
    """Whether Paddle computes on a CPU now."""
    return str(paddle.get_device()).startswith("cpu")


def machine(spec: RunSpec) -> Machine:
    """The device that Paddle uses now. Half on a CPU is emulated, and its scaler forced on."""
    cpu, here = on_cpu(), host_facts()
    # A watched training is not changed: on a CPU Paddle then computes everything in fp32.
    half = spec.kind != "watch" and "fp32" not in (spec.precision, parse(spec.control).precision)
    scaler = "" if not half else "forced" if cpu else "real"
    if spec.kind == "probe" and spec.precision != "fp16":
        scaler = ""
    return Machine(
        device="cpu" if cpu else str(paddle.get_device()).replace("gpu", "cuda"),
        device_name=here.cpu if cpu else str(paddle.device.cuda.get_device_name()),
        policy="rehearsal" if cpu and half else "native" if cpu else "cuda",
        capability="" if cpu else ".".join(map(str, paddle.device.cuda.get_device_capability())),
        python=here.python,
        platform=here.platform,
        host=here.host,
        framework="paddle",
        framework_version=str(paddle.__version__),
        arithmetic="emulated" if cpu and half else "real",
        scaler=scaler,
    )


def choose_device(spec: RunSpec) -> None:
    """Take the device that was asked for, if one was. Raises BadInput for one that is not there."""
    count = int(paddle.device.cuda.device_count())  # 0 in a build for CPUs
    if spec.device == "cpu":
        paddle.set_device("cpu")
    elif wanted_gpu(spec.device, count, "Paddle") is not None:
        paddle.set_device(spec.device.replace("cuda", "gpu"))
