"""The palette against the WCAG contrast formula and simulated colour deficiency."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest

from ampscope.story import palette
from tests.helpers.wcag import TEXT, contrast, linear

THEME = tomllib.loads(Path("app/.streamlit/config.toml").read_text())["theme"]
BACKGROUNDS = tuple(THEME[name]["backgroundColor"] for name in ("light", "dark"))


def _matrix(*values: float) -> np.ndarray:
    return np.array(values).reshape(3, 3)


# Machado, Oliveira and Fernandes 2009, severity 1, in linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": _matrix(
        *(0.152286, 1.052583, -0.204868),
        *(0.114503, 0.786281, 0.099216),
        *(-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": _matrix(
        *(0.367322, 0.860646, -0.227968),
        *(0.280085, 0.672501, 0.047413),
        *(-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": _matrix(
        *(1.255528, -0.076749, -0.178779),
        *(-0.078411, 0.930809, 0.147602),
        *(0.004733, 0.691367, 0.303900),
    ),
}
# Ottosson's OKLab (bottosson.github.io/posts/oklab): distances follow what people see.
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
CLOSEST_ZONES = 0.08  # Okabe and Ito's own blue and green are 0.086 apart under tritanopia
CLOSEST_DTYPES = 0.045  # fp32 and e4m3 under tritanopia, which never share a model


def seen(color: str, deficiency: np.ndarray) -> np.ndarray:
    lms = TO_LMS @ np.clip(deficiency @ linear(color), 0, None)
    return TO_LAB @ np.cbrt(lms)


def closest(colors: dict[str, str], deficiency: np.ndarray) -> float:
    points = [seen(color, deficiency) for color in colors.values()]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(points, 2))


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_lines_and_outlines_reach_the_contrast_for_graphics(background: str) -> None:
    for color in (palette.OUTLINE, palette.MEASURE, palette.OTHER_DTYPE, palette.NONFINITE):
        assert contrast(color, background) >= 2.9, color
    for name, color in palette.DTYPES.items():
        assert contrast(color, background) >= (2.7 if name == "e5m2" else 3.0), name


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_filled_zones_stand_out_and_their_outline_does_the_rest(background: str) -> None:
    for name, color in palette.ZONES.items():
        assert contrast(color, background) >= (1.8 if name == "zero" else 2.2), name


@pytest.mark.parametrize("name", DEFICIENCIES)
def test_zones_and_dtypes_differ_for_every_kind_of_sight(name: str) -> None:
    zones = {k: v for k, v in palette.ZONES.items() if k != "zero"}
    assert closest(zones, DEFICIENCIES[name]) >= CLOSEST_ZONES
    assert closest(dict(palette.DTYPES), DEFICIENCIES[name]) >= CLOSEST_DTYPES


def test_no_colour_means_two_things() -> None:
    colors = [
        *palette.ZONES.values(),
        *palette.DTYPES.values(),
        palette.OTHER_DTYPE,
        palette.MEASURE,
    ]
    assert len(set(colors)) == len(colors)


def test_a_precision_mode_has_the_colour_of_its_dtype() -> None:
    assert palette.dtype_color("fp16-noscaler") == palette.DTYPES["fp16"]
    assert palette.dtype_color("bf16-pure") == palette.DTYPES["bf16"]
    assert palette.dtype_color("int64") == palette.OTHER_DTYPE


@pytest.mark.parametrize("color", [*palette.DTYPES.values(), palette.OTHER_DTYPE])
def test_a_dtype_is_read_on_its_own_colour(color: str) -> None:
    assert contrast(palette.text_on(color), color) >= TEXT
