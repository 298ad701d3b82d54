"""Functions run as plain Python while something is watched: ``model.fit`` and ``tf.function``.

Inside a traced graph a tensor has no numbers to look at. Pipelines of ``tf.data`` stay graphs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import tensorflow as tf


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
