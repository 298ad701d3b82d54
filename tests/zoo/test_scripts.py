"""The zoo's scripts are what they claim to be: stand-alone, and silent about their own fault.

Static checks only; running all of them takes minutes and is what `ampscope zoo` is for.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ampscope.zoo
from ampscope.rules.verdict import FIX_KINDS
from ampscope.zoo.answers import ANSWERS, HEALTHY, ExpectedAnswer

SCRIPTS = Path(ampscope.zoo.__file__).parent / "scripts"
TWINS = tuple(answer.twin for answer in ANSWERS if answer.twin is not None)
ALL_SCRIPTS = (*(answer.script for answer in ANSWERS), *TWINS, *HEALTHY)
# What causes.md lets ampscope apply; a claim of `appliable` needs at least one of them.
APPLIABLE_KINDS = {
    "rewrite_op",
    "drop_cast",
    "use_bf16",
    "fp32_module",
    "add_scaler",
    "change_scale",
    "move_unscale",
    "raise_eps",
    "fp32_params",
    "fp32_optimizer_state",
    "lower_lr",
    "separate_scalers",
    "refresh_copies",
}

each_answer = pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.id)
each_script = pytest.mark.parametrize("name", ALL_SCRIPTS)


def _imported_packages(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def _attribute_names(tree: ast.Module) -> set[str]:
    """Names under which a script could register a submodule: self.NAME = …, or NAME = …"""
    stored = (ast.Attribute, ast.Name)
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, stored) and isinstance(node.ctx, ast.Store)
    }


def test_the_zoo_has_39_cases_and_10_more_healthy_scripts() -> None:
    assert len(ANSWERS) == len({answer.id for answer in ANSWERS}) == 39
    assert len(HEALTHY) == 10
    assert len(set(ALL_SCRIPTS)) == len(ALL_SCRIPTS)


def test_every_script_in_the_folder_is_accounted_for() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == set(ALL_SCRIPTS)


@each_script
def test_script_parses_and_stands_alone(name: str) -> None:
    tree = ast.parse((SCRIPTS / name).read_text(encoding="utf-8"))
    imported = _imported_packages(tree)
    assert "torch" in imported
    assert "ampscope" not in imported
    assert ast.get_docstring(tree)


@each_script
def test_script_does_not_name_a_cause(name: str) -> None:
    causes = pytest.importorskip("ampscope.causes")
    text = (SCRIPTS / name).read_text(encoding="utf-8").lower()
    for cause in causes.CAUSES:
        assert cause not in text
        assert cause.replace("_", " ") not in text


@each_script
def test_script_is_seeded(name: str) -> None:
    assert "manual_seed" in (SCRIPTS / name).read_text(encoding="utf-8")


@each_answer
def test_answer_uses_the_closed_lists(answer: ExpectedAnswer) -> None:
    causes = pytest.importorskip("ampscope.causes")
    assert {answer.cause, *answer.accept} <= set(causes.CAUSES)
    assert answer.fix_kinds
    assert set(answer.fix_kinds) <= set(FIX_KINDS)
    assert answer.policy in {"native", "cuda", "any"}


@each_answer
def test_appliable_answer_has_a_kind_that_can_be_applied(answer: ExpectedAnswer) -> None:
    assert not answer.appliable or APPLIABLE_KINDS & set(answer.fix_kinds)


@each_answer
def test_twin_differs_from_its_script_unless_nothing_is_wrong(answer: ExpectedAnswer) -> None:
    assert (answer.twin is None) == (answer.cause == "no_fault")
    if answer.twin is not None:
        script, twin = ((SCRIPTS / name).read_text() for name in (answer.script, answer.twin))
        assert ast.dump(ast.parse(script)) != ast.dump(ast.parse(twin))


@each_answer
def test_blamed_module_exists_in_the_script(answer: ExpectedAnswer) -> None:
    if answer.module is not None:
        names = _attribute_names(ast.parse((SCRIPTS / answer.script).read_text()))
        assert {part for part in answer.module.split(".") if not part.isdigit()} <= names


@each_answer
def test_source_is_a_public_report(answer: ExpectedAnswer) -> None:
    if answer.source:
        repository, _, number = answer.source.partition("#")
        assert number.isdigit()
        assert answer.source_url == f"https://github.com/{repository}/issues/{number}"
    else:
        assert answer.source_url == ""
