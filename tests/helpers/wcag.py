"""WCAG 2.2's contrast ratio: of two colours, and of a text over whatever lies below it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

TEXT = 4.5  # least ratio for text of usual size (success criterion 1.4.3)


def linear(color: str) -> np.ndarray:
    """Red, green and blue of ``#rrggbb`` as linear light, 0 to 1."""
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """From 1, the same lightness, to 21, black on white."""
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


def over(layers: Sequence[str]) -> str:
    """What is seen of CSS colours, topmost first; the last is opaque."""
    seen = np.zeros(3)
    for layer in reversed(layers):
        red, green, blue, *alpha = (float(n) for n in re.findall(r"[\d.]+", layer))
        share = alpha[0] if alpha else 1.0
        seen = share * np.array([red, green, blue]) + (1 - share) * seen
    return "#" + "".join(f"{round(channel):02x}" for channel in seen)
