"""Scripts that are diagnosed from start to end in tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampscope.diagnosis.result import DiagnosisResult
from ampscope.launcher.plan import run_diagnosis
from ampscope.records import RunSpec
from ampscope.render.contract import document


def spec(path: Path, **facts: object) -> RunSpec:
    """The baseline run of the script at ``path``: up to 60 steps in its own precision."""
    made = RunSpec(
        str(path), kind="script", steps=60, policy="native", time_limit_s=60.0,
        precision="as_is", group="g", label=path.name,
    )  # fmt: skip
    return replace(made, **facts)  # type: ignore[arg-type]  # fields by name


def diagnosed(path: Path, store: Path, verify: bool = True, **facts: object) -> DiagnosisResult:
    return run_diagnosis(spec(path, **facts), store, verify=verify)


def told(report: DiagnosisResult) -> tuple[str, str | None, bool | None]:
    """Cause, module and whether the fix is verified, as the JSON has them."""
    assert not report.could_not_run, report.could_not_run
    found = document(report)["findings"]
    assert found, report.undecided or report.notes
    return found[0]["cause"], found[0]["module"], found[0]["fix"]["verified"]
