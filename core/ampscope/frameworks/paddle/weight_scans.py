"""All weights and buffers at the start and the end of a run, for the rules."""

from __future__ import annotations

from typing import Any

from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.rounding import MARK
from ampscope.frameworks.paddle.values import is_floating, view
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.tensors import Values


def scan_weights(recorder: Recorder, paths: LayerPaths, moment: str, trained: list[Any]) -> None:
    """``trained``: the parameters that some optimizer has; all others are frozen."""
    known = {id(parameter) for parameter in trained}
    kinds: dict[str, dict[str, Values]] = {"parameter": {}, "frozen": {}, "buffer": {}}
    for name, parameter in paths.parameters().items():
        kind = "parameter" if id(parameter) in known else "frozen"
        kinds[kind][name] = view(parameter, getattr(parameter, MARK, ""))
    for name, buffer in paths.buffers().items():
        if is_floating(buffer):
            kinds["buffer"][name] = view(buffer, getattr(buffer, MARK, ""))
    for kind, weights in kinds.items():
        recorder.weights(moment, weights, kind)
