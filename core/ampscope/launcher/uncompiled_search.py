"""What of a script has to stay uncompiled: searched once the layer of the compiler is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ampscope.analysis.compiled_runs import (
    AOT_EAGER,
    AOT_TAPPED,
    DECOMPOSED,
    GRAPH_ALONE,
    Layer,
    decomposed_ops,
    is_back,
    kept_out,
    layer,
    suspect_ops,
    suspects,
)
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE, COMPILED, Control
from ampscope.diagnosis import result
from ampscope.launcher.smallest_set import smallest_set

MAX_SEARCH_RUNS, MAX_SEARCH_S = 14, 60.0  # of code that is compiled without inductor
MAX_COMPILED_RUNS = 8
MAX_SUSPECTS = 3  # the module that taps point at, and what holds it
MAX_SUSPECT_OPS = 2

# What differs without inductor already is searched without it: that compiles nothing.
_THROUGH = {
    Layer.KERNEL: COMPILED, Layer.DECOMPOSITION: DECOMPOSED, Layer.GRAPH: AOT_EAGER,
    Layer.CAPTURE: GRAPH_ALONE,
}  # fmt: skip


class UncompiledSearch:
    """Looks for an op to keep out of the compiler's kernels, and for the smallest set of modules to
    leave uncompiled, where the compiler is to blame for more than its rounding.

    ``views`` are the diagnosis's runs by control; ``control`` makes one more, ``control_until`` one
    that a deadline of the monotonic clock may cut short, which is None then.
    """

    def __init__(
        self,
        views: Mapping[str, RunView],
        control: Callable[[str], RunView],
        control_until: Callable[[float, str], RunView | None],
    ) -> None:
        self._views = views
        self._control = control
        self._control_until = control_until

    def run(self) -> None:
        """Ops first, where kernels are made of them; then modules."""
        blamed = layer(self._views)
        if blamed is None or blamed not in _THROUGH:
            return
        took = self._views[COMPILED].outcome.elapsed_s  # compiling takes most of it
        self._deadline = time.monotonic() + max(MAX_SEARCH_S, MAX_SUSPECTS * took)
        self._through = _THROUGH[blamed]
        if blamed is Layer.KERNEL:
            ops = suspect_ops(self._views)[:MAX_SUSPECT_OPS]
            any(self._is_cure(Control.of(COMPILED, unfused=(op,))) for op in ops)
        if blamed is Layer.DECOMPOSITION and smallest_set(
            decomposed_ops(self._views),
            lambda ops: self._is_cure(Control.of(self._through, unfused=ops)),
            MAX_SEARCH_RUNS,
        ):
            return
        if any(self._is_left_out((path,)) for path in suspects(self._views)[:MAX_SUSPECTS]):
            return
        if kept_out(self._views) is None:  # else the op is known, and its module is not worth runs
            self._search_modules()

    def _search_modules(self) -> None:
        """First among the modules that own parameters, then among their parents, whose own code may
        be what is compiled wrongly, or that of a part without parameters."""
        most = MAX_COMPILED_RUNS if self._through == COMPILED else MAX_SEARCH_RUNS
        owners = names = result.modules_with_parameters(self._views[BASELINE])
        while names and not (found := smallest_set(names, self._is_left_out, most)):
            names = [p for p in dict.fromkeys(n.rpartition(".")[0] for n in names) if p]
        if names and names is not owners and found and len(found) == 1:
            self._search_parts(found[0], owners)

    def _search_parts(self, module: str, owners: Sequence[str]) -> None:
        """Among the parts of ``module`` that have no parameters and hold none: taps name them."""
        if self._through == COMPILED:
            return
        taps = self._control(AOT_TAPPED).taps
        below = [m for m in dict.fromkeys(t.module for t in taps) if m.startswith(f"{module}.")]
        parts = [m for m in below if not any(f"{o}.".startswith(f"{m}.") for o in owners)]
        any(self._is_left_out((path,)) for path in parts[:MAX_SUSPECTS])

    def _is_left_out(self, paths: tuple[str, ...]) -> bool:
        return self._is_cure(Control.of(self._through, uncompiled=paths))

    def _is_cure(self, control: Control) -> bool:
        done = self._control_until(self._deadline, control)
        return done is not None and is_back(self._views, control)
