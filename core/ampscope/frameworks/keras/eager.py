"""Functions run as plain Python while something is watched: ``model.fit`` and ``tf.function``.

Inside a traced graph a tensor has no numbers to look at. Pipelines of ``tf.data`` stay graphs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import tensorflow as tf

from ampscope.capture.script.patches import Patches


@contextlib.contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Puts back what was set before."""
    before = tf.config.functions_run_eagerly()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tf.data functions.*", category=UserWarning)
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(before)


def keep_functions_eager(patches: Patches, note: Callable[[str], None]) -> None:
    """A script that wants graphs back does not get them; ``note`` takes a sentence on it."""

    def run_functions_eagerly(run_eagerly: bool) -> None:
        if not run_eagerly:
            note(
                "The script asks for graphs (run_functions_eagerly(False)); its functions were run "
                "eagerly, because inside a graph there are no numbers to look at."
            )

    patches.replace(tf.config, "run_functions_eagerly", lambda _: run_functions_eagerly)
