"""``ampscope explain`` knows the codes that are preflight's own."""

from __future__ import annotations

from click.testing import CliRunner

from ampscope.cli.zoo import explain


def test_a_code_of_preflight_is_explained() -> None:
    said = CliRunner().invoke(explain, ["pre004"], catch_exceptions=False).output
    assert said.startswith("PRE004 Evaluation outside autocast")
    assert "\nRemedy\n  " in said


def test_its_own_codes_follow_the_causes() -> None:
    said = CliRunner().invoke(explain, [], catch_exceptions=False).output
    codes = [line.split()[0] for line in said.splitlines()]
    assert codes[-2:] == ["PRE001", "PRE004"]
