"""The first sentence of a verdict: which precision ran, why none did, and how many steps."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.precision_use import PrecisionUse, precision_use
from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.load import load_diagnosis
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import HalfSite, OpUse
from ampscope.render.contract import to_json
from ampscope.render.markdown import to_markdown, to_notebook
from ampscope.render.terminal import print_sections
from ampscope.store.reader import Reader
from ampscope.story.build import document
from ampscope.story.diagnosis import summary
from ampscope.story.verdict_words import precision_headline, precision_no_fault, verdict
from tests.helpers import script_stores
from tests.helpers.evidence_making import WITHOUT_SCALER, evidence, fp32_run, run, steps
from tests.helpers.script_runner import Runner, spec, write_script

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

HEAD = """
import contextlib, torch, warnings
warnings.simplefilter("ignore")
torch.manual_seed(0)
dev = "cpu"
m = torch.nn.Linear(4, 2)
o = torch.optim.SGD(m.parameters(), 0.01)
"""
LOOP = """
for i in range(6):
    o.zero_grad()
    with region: loss = m(torch.randn(8, 4)).float().square().mean()
    loss.backward(); o.step()
"""
TRAINER = """
import tempfile, torch
from transformers import Trainer, TrainingArguments
class M(torch.nn.Module):
    def __init__(s):
        super().__init__(); s.a = torch.nn.Linear(8, 1)
    def forward(s, x=None, labels=None):
        return {"loss": (s.a(x).squeeze(-1) - labels).square().mean()}
data = [{"x": torch.randn(8), "labels": torch.tensor(1.0)} for _ in range(16)]
args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=6, report_to=[], fp16=True,
    per_device_train_batch_size=4, disable_tqdm=True, dataloader_pin_memory=False)
Trainer(model=M(), args=args, train_dataset=data).train()
"""
REGIONS = {
    "bf16": 'torch.autocast("cpu", torch.bfloat16)',
    "missing": 'torch.autocast("cuda")',
    "off": 'torch.autocast("cpu", enabled=False)',
    "guarded": 'torch.autocast("cuda") if torch.cuda.is_available() else contextlib.nullcontext()',
    "plain": "contextlib.suppress()",
    # Both: what is asked of CUDA comes to nothing, and something else runs in bf16.
    "both": 'torch.autocast("cuda"); region = torch.autocast("cpu", torch.bfloat16)',
}


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PrecisionUse]]:
    folder = tmp_path_factory.mktemp("precision")
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        runner = Runner(runs)
        texts = {name: f"{HEAD}region = {r}\n{LOOP}" for name, r in REGIONS.items()}
        texts["scaler"] = HEAD + (
            "region = contextlib.suppress(); s = torch.amp.GradScaler('cpu', enabled=False)" + LOOP
        )
        texts["average"] = HEAD + (
            "region = contextlib.suppress(); e = m.weight.detach().bfloat16()"
            + LOOP
            + "    e.add_(m.weight.detach().bfloat16())"
        )
        started = {
            name: runner.start(write_script(folder, f"{name}.py", text))
            for name, text in texts.items()
        }
        found = {}
        for name, run_id in started.items():
            ran = runner.fetch(run_id).run
            view = RunView("as_is", run_id, ran.observations)
            found[name] = precision_use(view, view)
            notes[name] = " ".join(view.outcome.notes)
        yield found


notes: dict[str, str] = {}


def test_flops_are_counted_by_dtype_forward_and_backward(uses: dict[str, PrecisionUse]) -> None:
    use = uses["bf16"]
    # 8 x 4 by 4 x 2: the product, and of its backward the weight's gradient alone (x needs none).
    assert use.flops == (("bf16", 6 * 2 * (2 * 8 * 4 * 2)),)
    assert (use.half_share, use.steps, use.compared, use.no_half) == (1.0, 6, 6, False)
    assert precision_headline(use) == (
        "All FLOPs (matmuls and convolutions, forward and backward) ran in bf16; "
        "6 optimizer steps were judged."
    )


@no_cuda
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "autocast on CUDA at missing.py:8 is off, because this machine has no CUDA"),
        ("off", "autocast at off.py:12 is disabled"),
        ("guarded", "torch.cuda.is_available() at guarded.py:8 finds no device on this machine; "
         "nullcontext is entered at guarded.py:12"),
        ("plain", "it opens no autocast region and has no half-precision weights"),
        ("scaler", "the GradScaler at scaler.py:8 is disabled"),
    ],
)  # fmt: skip
def test_a_run_without_half_says_so_first_and_why(
    name: str, why: str, uses: dict[str, PrecisionUse]
) -> None:
    said = precision_headline(uses[name])
    assert said.startswith("This run used no half precision: ")
    assert why in said
    assert "6 optimizer steps were judged, in fp32." in said
    assert "trains as its fp32 control" not in precision_no_fault(uses[name])


@no_cuda
def test_amp_was_not_switched_off_where_something_ran_in_bf16(
    uses: dict[str, PrecisionUse],
) -> None:
    assert precision_headline(uses["both"]).startswith("All FLOPs")
    assert "autocast on CUDA" in notes["both"]
    assert "fp32 run" not in notes["both"]
    assert "switched AMP off and this was an fp32 run" in notes["missing"]


def test_ops_without_flops_count_too(uses: dict[str, PrecisionUse]) -> None:
    use = uses["average"]
    assert not use.no_half
    assert "ran in fp32; 6 other ops computed in half precision" in precision_headline(use)


@no_cuda
def test_a_run_that_only_stores_in_half_is_not_called_one_without_half() -> None:
    site = HalfSite("saved", "train.py:9", "Tensor.half", "fp16", "saved activations", calls=3)
    recorded = run(steps(), traced_ops=9, flop_dtypes=("fp32",), flop_counts=(8,), uses_autocast="")
    assert precision_use(recorded, None).no_half
    stored = RunView("as_is", "1", [*recorded.steps, site, recorded.outcome])
    use = precision_use(stored, None)
    assert use.sites == ("train.py:9",)
    assert not use.no_half
    assert use.computed_none
    assert "train.py:9" in precision_headline(use)
    assert "used no half" not in precision_headline(use)
    assert Evidence({"as_is": stored}, "native").uses_half
    assert not Evidence({"as_is": recorded}, "native").uses_half


def test_fp16_of_a_trainer_on_a_cpu() -> None:
    pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = write_script(folder, "trainer.py", TRAINER)
        with ScriptRuns(spec(), folder / "runs.db") as runs:
            ran = Runner(runs)(script)
        assert ran.outcome.steps == 6, ran.err.decode()
        view = RunView("as_is", ran.run.info.id, ran.run.observations)
    said = precision_headline(precision_use(view, None))
    assert "no half precision: the trainer was asked for fp16, which Accelerate leaves out" in said


def test_too_few_steps_are_no_comparison() -> None:
    made = steps()[:4]
    facts: dict[str, Any] = {"flop_dtypes": ("fp16",), "flop_counts": (1000,), "traced_ops": 9}
    few = precision_use(run(made, **facts), fp32_run(made))
    assert "trains as its fp32 control does" not in precision_no_fault(few)
    assert precision_no_fault(few).startswith(
        "No fault found in 4 optimizer steps. That is too few"
    )
    # The control alone may be short as well.
    assert precision_use(run(steps(), **facts), fp32_run(made)).too_few
    enough = precision_use(run(steps(), **facts), fp32_run())
    assert (
        precision_no_fault(enough) == "No fault found: the script trains as its fp32 control does."
    )


def test_a_loss_that_was_not_seen_is_not_called_alike() -> None:
    facts: dict[str, Any] = {"flop_dtypes": ("fp16",), "flop_counts": (1000,), "traced_ops": 9}
    unseen = [replace(step, loss=None) for step in steps()]
    use = precision_use(run(unseen, **facts), fp32_run(unseen))
    assert "its loss was not seen" in precision_no_fault(use)


def test_a_run_that_recorded_nothing_of_it_is_not_called_fp32() -> None:
    old = precision_use(run(steps(), traced_ops=5000), fp32_run())
    assert not old.no_half
    assert precision_headline(old) == (
        "30 optimizer steps were judged; in which precision each op ran was not recorded."
    )
    assert not precision_use(run(steps(), framework="keras", uses_autocast=""), None).no_half


def test_every_surface_says_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    facts = {"flop_dtypes": ("fp32",), "flop_counts": (640,), "traced_ops": 99}
    made = [script_stores.one_step(i, x) for i, x in enumerate(script_stores.FALLING)]
    seen = script_stores.seen(made, uses_autocast="", **facts)
    head = script_stores.run(path, "as_is", seen)
    script_stores.healthy_run(path, "fp32")
    with Reader(path) as reader:
        report = load_diagnosis(reader, head)
        made_document = document(reader, [head])
        notebook = to_notebook(made_document, [reader.run(head)], path)
    said = "This run used no half precision"
    written = json.loads(to_json(report))["precision"]
    assert written["headline"].startswith(said)
    assert (written["half_share"], written["half_used"]) == (0.0, False)
    assert (written["judged_steps"], written["compared_steps"]) == (12, 12)
    assert made_document.parts[0].title.startswith(said)
    assert said in to_markdown(made_document)
    assert said in "".join(json.loads(notebook)["cells"][0]["source"])


FP8 = OpUse("fixed_precision", "_scaled_mm", "", "train.py:12", 0)
HALF: dict[str, Any] = {
    "flop_dtypes": ("fp16",), "flop_counts": (640,), "traced_ops": 99, "uses_autocast": "fp16",
}  # fmt: skip
SAME_FP8 = (
    "trains as its fp32 control does, apart from the ops that the control computes in the same "
    "fp8, int8 or tensor type (_scaled_mm at train.py:12): not judged."
)


def _shown(path: Path, *others: OpUse, **facts: object) -> tuple[str, str, str, dict[str, Any]]:
    """Page, terminal, report and JSON of a script without a fault."""
    made = [script_stores.one_step(i, x) for i, x in enumerate(script_stores.FALLING)]
    seen = script_stores.seen(made, *others, **(HALF | facts))
    head = script_stores.run(path, "as_is", seen)
    script_stores.healthy_run(path, "fp32")
    console = Console(record=True, width=600, file=io.StringIO())
    with Reader(path) as reader:
        report = load_diagnosis(reader, head)
        page = verdict(report, RunView("as_is", head, reader.observations(head)))
        written = to_markdown(document(reader, [head])).replace("\\", "")
    print_sections(summary(report), console)
    return page, console.export_text(), written, json.loads(to_json(report))


@pytest.mark.parametrize("ended", ["returned", "steps"])
def test_ops_that_the_control_cannot_change_are_no_part_of_a_clean_bill(
    ended: str, tmp_path: Path
) -> None:
    page, terminal, written, told = _shown(tmp_path / "runs.db", FP8, FP8, ended=ended)
    assert SAME_FP8 in page
    assert SAME_FP8 in terminal
    assert SAME_FP8 in written
    assert told["precision"]["not_judged"] == ["_scaled_mm at train.py:12"]
    assert (SAME_FP8 in told["scope"]["sentence"]) == (ended == "steps")


def test_many_such_ops_are_counted() -> None:
    ops = [OpUse("fixed_precision", "_int_mm", "", f"train.py:{n}", 0) for n in range(5)]
    use = precision_use(run(steps(), *ops, **HALF), fp32_run())
    assert "train.py:2 and 2 more): not judged." in precision_no_fault(use)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"flop_dtypes": ("fp32",), "uses_autocast": ""}, "what AMP does to this training was not"),
        ({}, "there it trains as its fp32 control does"),
    ],
)
def test_what_was_stopped_is_told_alike_everywhere(
    facts: dict[str, object], words: str, tmp_path: Path
) -> None:
    page, terminal, written, told = _shown(tmp_path / "runs.db", **(facts | {"ended": "steps"}))
    sentence = told["scope"]["sentence"]
    assert sentence.startswith("No fault in the first 12 of the script's steps")
    assert words in sentence
    assert "--steps 48" in sentence
    assert sentence in page
    assert sentence in terminal
    assert sentence in written


def test_a_bf16_control_repeats_a_script_in_bf16() -> None:
    """Not where anything is in fp16, nor where there is a scaler that it would switch off."""
    in_bf16 = {"uses_autocast": "bf16", "flop_dtypes": ("bf16",)}
    plain = steps(**WITHOUT_SCALER)
    assert evidence(run(plain, **in_bf16)).already_in_bf16
    site = HalfSite("cast", "train.py:3", "Tensor.half", "fp16")
    others = [
        run(steps(), **in_bf16),
        run(plain, site, **in_bf16),
        run(steps(**WITHOUT_SCALER, state_dtypes="fp16"), **in_bf16),
        run(plain, uses_autocast="fp16", flop_dtypes=("fp16",)),
        run(plain, uses_autocast=""),
    ]
    assert not any(evidence(other).already_in_bf16 for other in others)
