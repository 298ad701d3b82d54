"""Records as JSON: one decoder by type hints, and one spelling of NaN for other programs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from ampscope.record_json import NONFINITE, Decoder, Refusal, dumps


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    share: float
    pair: tuple[str, int] | None = None
    is_set: bool = False


GOOD = {"inner": [{"name": "a", "sizes": [1, 2]}], "share": 1, "pair": ["x", 2], "newer": 3}


def test_a_record_is_made_by_its_hints() -> None:
    made = Decoder().record(Outer, GOOD)
    assert made == Outer((Inner("a", (1, 2)),), 1.0, ("x", 2))
    assert Decoder().record(Outer, {"inner": [], "share": math.inf}).pair is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inner": [{"name": 3}]}, "inner[0].name: is of type int"),
        ({"inner": [{"name": "a", "sizes": [1, 2.0]}]}, "inner[0].sizes[1]: is of type float"),
        ({"inner": [{}]}, "inner[0]: name is missing"),
        ({"inner": {}}, "inner: is of type dict"),
        ({"share": True}, "share: is of type bool"),
        ({"share": "nan"}, "share: is of type str"),
        ({"pair": ["x"]}, "pair: 2 values were expected, not 1"),
        ({"is_set": 1}, "is_set: is of type int"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(Refusal) as refused:
        Decoder().record(Outer, GOOD | change)
    assert str(refused.value) == says


def test_numbers_that_json_has_not_are_texts_at_any_depth() -> None:
    values = {"a": [math.nan, (math.inf, {"b": -math.inf})], "c": 1.5}
    assert json.loads(dumps(values)) == {"a": ["nan", ["inf", {"b": "-inf"}]], "c": 1.5}
    assert {str(value) for value in NONFINITE.values()} == set(NONFINITE)
