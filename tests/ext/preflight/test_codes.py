"""``ampscope explain`` knows the codes that are preflight's own."""

from __future__ import annotations

from click.testing import CliRunner

from ampscope.cli.zoo import explain


def test_a_code_of_preflight_is_explained() -> None:
    said = CliRunner().invoke(explain, ["pre002"], catch_exceptions=False).output
    assert said.startswith("PRE002 The scaler is never enabled")
    assert "\nRemedy\n  " in said


def test_its_own_codes_follow_the_causes() -> None:
    said = CliRunner().invoke(explain, [], catch_exceptions=False).output
    codes = [line.split()[0] for line in said.splitlines()]
    assert codes[-4:] == ["PRE001", "PRE002", "PRE003", "PRE004"]
