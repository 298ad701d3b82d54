"""A verdict from a capsule: what one step of a training can decide, and what it leaves open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import ampscope
from ampscope.analysis.run_view import RunView
from ampscope.cli.main import main
from ampscope.diagnosis.captured_step import cures_the_step
from ampscope.diagnosis.compiled import diagnosis_with_compiled_run
from ampscope.observations import CAPTURED_FORWARD, CAPTURED_STEP, OpUse, Scan
from ampscope.rules.verdict import Status
from tests.helpers.diagnosis_contract import checked
from tests.helpers.evidence_making import INF, NAN, OVERFLOWED, evidence, fp32_run, run, steps
from tests.helpers.evidence_of_ops import ACTIVATION, STEEP
from tests.helpers.overflowing import Overflowing, overflow

SIGN = OpUse(CAPTURED_STEP, "loss", "", "", 0, 40007.0, 65536.0)
BROKEN = steps((NAN,), **OVERFLOWED)
WEIGHT = Scan("start", "parameter", "head.weight", "fp32", 8, nan=3, inf=0, max_abs=1.0)


def diagnose(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, arguments)])


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A user's file that builds the model, and leaves a file behind when it is imported."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "from tests.helpers.overflowing import Overflowing\n\n\n"
        "def build():\n    return Overflowing()\n"
    )
    return file


def test_an_op_of_the_step_stands_as_the_cause() -> None:
    found = diagnosis_with_compiled_run(
        evidence(run(BROKEN, ACTIVATION, SIGN), fp32_run(steps((1.5,))))
    )
    assert found.verdict == "fault"
    assert all(f.verdict.op and f.verdict.status is Status.FOUND for f in found.findings)
    assert any("step 40,007 of the training" in note for note in found.notes)
    assert not any(
        "captured" in n
        for n in diagnosis_with_compiled_run(evidence(run(BROKEN, ACTIVATION))).notes
    )


@pytest.mark.parametrize(
    ("baseline", "reference", "says"),
    [
        (run(BROKEN, WEIGHT, SIGN), fp32_run(BROKEN, WEIGHT), "head.weight held NaN"),
        (run(BROKEN, SIGN), fp32_run(steps((INF,), grad_norm=INF)), "not finite in fp32 either"),
        (run(steps((1.5,), **OVERFLOWED), STEEP, SIGN), fp32_run(steps((1.5,))), "aten.mm gave"),
        (run(steps((1.5,)), SIGN), fp32_run(steps((1.5,))), "the loss function"),
    ],
    ids=["weights broken before", "fp32 too", "backward", "the loss function"],
)
def test_what_needs_a_history_is_undetermined(
    baseline: RunView,
    reference: RunView,
    says: str,
) -> None:
    found = diagnosis_with_compiled_run(evidence(baseline, reference))
    assert (found.verdict, found.findings, found.latent) == ("inconclusive", (), ())
    assert says in found.undecided


@pytest.mark.parametrize(
    ("loss", "norm", "others", "cured"),
    [
        (1.49, 2.0, (), True),
        (1.2, 2.0, (), False),
        (1.5, 3.0, (), False),
        (1.5, None, (), False),
        (1.5, 3.0, (OpUse(CAPTURED_FORWARD, "", "", "", 0),), True),  # backward is not judged
        (NAN, 2.0, (), False),
    ],
)
def test_a_fixed_step_must_give_what_fp32_gives(
    loss: float, norm: float | None, others: tuple[OpUse, ...], cured: bool
) -> None:
    fixed = run(steps((loss,), grad_norm=norm), SIGN, *others)
    assert cures_the_step(fixed, fp32_run(steps((1.5,), grad_norm=2.0))) is cured


def test_without_a_finite_control_no_fix_is_diagnosis_with_compiled_run() -> None:
    assert cures_the_step(run(steps((1.5,)), SIGN), fp32_run(steps((NAN,)))) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--capsule", "{capsule}"], "none is imported unless you trust it"),
        (["--capsule", "/gone.safetensors", "--trust", "m.py:build"], "There is no capsule at"),
        (["--capsule", "{capsule}", "--trust", "{model}", "train.py"], "leave train.py out"),
        (["--trust", "m.py:build", "train.py"], "--trust goes with --capsule"),
        ([], "Name the script"),
    ],
)
def test_nothing_is_imported_without_being_trusted(
    tmp_path: Path, model_file: Path, arguments: list[str], says: str
) -> None:
    capsule = tmp_path / "c.safetensors"
    capsule.write_bytes(b"")
    given = [a.format(capsule=capsule, model=f"{model_file}:build") for a in arguments]
    done = diagnose("--store", tmp_path / "d.db", *given)
    assert done.exit_code == 2
    assert says in str(done.exception) + done.output
    assert not (tmp_path / "imported").exists()


def test_an_overflow_of_a_captured_step_is_named_and_fixed(
    tmp_path: Path, model_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its loss is the mean of the outputs, so a backward in fp16 overflows too: 8 rows, scale 2,
    64 * 4096 * 2 / 8 = 65,536. Both layers have to be in fp32."""
    watched, _, _ = overflow(tmp_path / "runs.db")
    watched.close()
    out = tmp_path / "o.json"
    done = diagnose(
        "--store", tmp_path / "d.db", "--json", out,
        "--capsule", watched.capsules[0], "--trust", f"{model_file}:build",
    )  # fmt: skip
    document = checked(out.read_text(), one_step=True)
    assert (document["verdict"], done.exit_code) == ("fault", 1), capfd.readouterr().err
    first = document["findings"][0]
    assert (first["cause"], first["module"], first["op"]) == (
        "activation_overflow", "second", "aten.mm",
    )  # fmt: skip
    assert first["fix"]["verified"] is True
    assert "['first', 'second']" in first["fix"]["patch"]
    assert document["controls"]["fp32"]["ok"] is True
    assert any("step 2 of the training" in note for note in document["notes"])


@pytest.fixture
def outside(tmp_path: Path) -> Callable[[], Path]:
    """A capsule of a step whose loss function divides by zero."""

    def made() -> Path:
        torch.manual_seed(0)
        model = Overflowing()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with ampscope.watch(
            model, optimizer, store=tmp_path / "runs.db", policy="ignore"
        ) as watched:
            for step in range(3):
                optimizer.zero_grad()
                loss = model(torch.rand(8, 4)).mean()
                (loss / (loss - loss) if step == 2 else loss).backward()
                optimizer.step()
        return watched.capsules[0]

    return made


def test_a_fault_of_the_loss_function_is_not_laid_on_the_model(
    tmp_path: Path, model_file: Path, outside: Callable[[], Path]
) -> None:
    out = tmp_path / "o.json"
    done = diagnose(
        "--store", tmp_path / "d.db", "--json", out,
        "--capsule", outside(), "--trust", f"{model_file}:build",
    )  # fmt: skip
    document = json.loads(out.read_text())
    assert (document["verdict"], done.exit_code) == ("inconclusive", 2)
    assert "the model is finite throughout, forward and backward" in document["reason"]
    assert "loss function" in document["reason"]
