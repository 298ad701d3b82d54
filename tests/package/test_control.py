"""Controls: the text that is stored with a run and what it says, everywhere in the same words."""

from __future__ import annotations

import ast
import json
import math
import random
from pathlib import Path

import pytest

from ampscope.control import INTERVENTIONS, KINDS, LISTS, Control
from ampscope.errors import BadInput
from ampscope.records import RunSpec
from ampscope.rules.verdict import FIX_KINDS
from ampscope.runner import controls
from ampscope.store.codec import spec_from_json, to_json

ROOT = Path(__file__).parents[2]
_ALPHABET = "abz.0_-/é[]{}=: \n\"'"


def _places(rng: random.Random) -> tuple[str, ...]:
    names = ("".join(rng.choices(_ALPHABET, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 4)))
    return tuple(names)


def _some_control(seed: int) -> tuple[Control, list[str], dict[str, object]]:
    rng = random.Random(seed)
    plain = [n for n, kind in KINDS.items() if not kind.takes and rng.random() < 0.2]
    valued: dict[str, object] = {}
    for name, kind in KINDS.items():
        if not kind.takes or rng.random() < 0.6:
            continue
        if name == "op_lists":
            valued[name] = {f"op{n}": rng.choice(LISTS) for n in range(rng.randint(1, 4))}
        elif kind.takes == "NUMBER":
            valued[name] = rng.choice([1, 1024.0, 2.0**40, 0.1, 1e-4, 12345.678])
        else:
            valued[name] = _places(rng)
    return Control.of(*plain, **valued), plain, valued  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(300))
def test_what_is_put_together_is_what_is_read(seed: int) -> None:
    made, plain, valued = _some_control(seed)
    again = Control(str(made))
    assert (again, type(str(made)), again.parts) == (made, str, made.parts)
    assert ";".join(part.text for part in made.parts) == made
    assert [part.name for part in made.parts] == [*plain, *valued]
    for name, value in valued.items():
        if isinstance(value, tuple):
            assert made.values(name) == value
        elif isinstance(value, dict):
            assert dict(made.list_changes) == value
        else:
            assert math.isclose(float(made.values(name)[0]), float(value), rel_tol=1e-5)  # type: ignore[arg-type]
    assert "under" not in made.words


@pytest.mark.parametrize("text", ["", ";", "a;;b", ":", "fp32:", "x:1:2", "\n;é:", "fp32_modules:"])
def test_any_text_keeps_its_bytes(text: str) -> None:
    spec = RunSpec("train.py", kind="script", control=Control(text))
    assert str(Control(text)) == text
    assert spec_from_json(to_json(spec)) == RunSpec("train.py", kind="script", control=text)
    assert json.dumps(Control(text)) == json.dumps(text)
    assert Control(text).words


def _spelled() -> list[str]:
    """Every constant text in the package and the dashboard that is a control."""
    found = set()
    for folder in ("core/ampscope", "app"):
        for path in (ROOT / folder).rglob("*.py"):
            if "zoo/scripts" in path.as_posix() or "lessons/scripts" in path.as_posix():
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                    continue
                name, colon, _ = node.value.partition(":")
                if name in KINDS and bool(colon) == bool(KINDS[name].takes):
                    found.add(node.value)
    return sorted(found)


@pytest.mark.parametrize("text", _spelled())
def test_what_the_code_spells_is_a_control(text: str) -> None:
    if not Control(text).is_compiled and not KINDS[Control(text).first.name].is_compiled:
        Control(text).check()
    assert Control.of(*(part.text for part in Control(text).parts)) == text


def test_the_code_spells_some() -> None:
    assert {"as_is", "fp32", "bf16", "eps:0.0001", "fp32_state"} <= set(_spelled())


def test_each_name_is_applied_offered_and_explained() -> None:
    applied = {*controls._PLAIN, *controls._VALUED, "fp32_modules", "fp32_lines", "uncompiled"}
    assert applied == set(KINDS) - {
        "as_is",
        "repeat",
        "compiled",
        "taps",
    }  # these are the recorder's
    assert [text.partition(":")[0] for text in INTERVENTIONS.split(", ")] == [
        name for name, kind in KINDS.items() if not kind.is_compiled
    ]
    compiled = {
        "compiled",
        "backend",
        "eager_casts",
        "eager_random",
        "uncompiled",
        "unfused",
        "taps",
    }
    assert {name for name, kind in KINDS.items() if kind.is_compiled} == compiled
    assert {kind.fix for kind in KINDS.values()} - {""} <= set(FIX_KINDS)
    assert Control("init_scale:8;growth_interval:2000").fix_kind == "change_scale"
    assert Control("scale:8").fix_kind == Control("a_new_one:3").fix_kind == ""


def test_an_unknown_part_is_refused_by_the_run_too() -> None:
    with (
        pytest.raises(BadInput, match=r"There is no intervention 'nonsense'\. Use one of: as_is"),
        controls.applied("fp32;nonsense"),
    ):
        pass


@pytest.mark.parametrize("text", ["compiled", "fp32:1", "fp32;", "op_lists:softmax", "eps:-1",
                                  "growth_interval:2e3", "fp32_modules:a,,b"])  # fmt: skip
def test_what_no_user_can_ask_for(text: str) -> None:
    with pytest.raises(BadInput):
        Control(text).check()


def test_words_of_lists_and_of_a_frozen_scale() -> None:
    assert Control("op_lists:softmax=half,mm=fp32").words == "with softmax in half, mm in fp32"
    assert Control("scale:1024;bf16").words == "at a loss scale frozen at 2^10 and in bf16"
    assert Control("").words == "unchanged"
    assert Control("lr:0.1").in_fp32.words == "in fp32 and at 0.1 times its learning rate"
