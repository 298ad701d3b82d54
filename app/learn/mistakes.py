"""Lesson 13: eight common mistakes. Each a script, a prediction, and a real diagnosis of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import streamlit as st

from ampscope.lessons.catalog import BY_ID, MISTAKES, Mistake, script_path
from ampscope.report import verdict_words as diagnosis_words
from app import chart, diagnosis, links
from app.diagnosis import Case
from app.learn import lesson_diagnosis, lesson_runs
from app.learn.lesson_page import KERAS, PADDLE, TORCH_AMP, TORCH_EXAMPLES, Lesson, begin, end
from app.learn.lesson_runs import Answer

# The right lines for each of lesson 13's mistakes, in three frameworks.


_STEP = """
with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
"""
_PADDLE_STEP = """
with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
"""
_KERAS = """
keras.mixed_precision.set_global_policy("mixed_float16")
"""
_END = _PADDLE_END = "scaler.step(optimizer)\nscaler.update()\n"

_CODE: Mapping[str, tuple[str, str, str]] = {
    "cast_by_hand": (
        f"model = Net().to('cuda')                        # fp32: no half()\n{_STEP}{_END}",
        f"model = Net()                                   # fp32\n{_PADDLE_STEP}{_PADDLE_END}",
        f"{_KERAS}model = build_model()                           # casts by itself",
    ),
    "no_scaler": (
        f"scaler = torch.amp.GradScaler('cuda')\n{_STEP}{_END}",
        f"scaler = paddle.amp.GradScaler()\n{_PADDLE_STEP}{_PADDLE_END}",
        f"{_KERAS}model.compile(optimizer='adam', loss=loss_fn)   # scales by itself",
    ),
    "clip_before_unscale": (
        f"{_STEP}scaler.unscale_(optimizer)                      # first\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{_END}",
        f"{_PADDLE_STEP}scaler.unscale_(optimizer)\n"
        f"paddle.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{_PADDLE_END}",
        f"{_KERAS}optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.0)  # after unscaling",
    ),
    "unscale_each_micro_batch": (
        "for inputs, targets in micro_batches:\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = loss_fn(model(inputs), targets) / len(micro_batches)\n"
        "    scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)                      # once, when all are in\n" + _END,
        "for inputs, targets in micro_batches:\n"
        "    with paddle.amp.auto_cast(dtype='float16'):\n"
        "        loss = loss_fn(model(inputs), targets) / len(micro_batches)\n"
        "    scaler.scale(loss).backward()\n"
        "scaler.unscale_(optimizer)\n" + _PADDLE_END,
        f"{_KERAS}optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)",
    ),
    "scaler_state_not_saved": (
        "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(),\n"
        "            'scaler': scaler.state_dict()}, path)\n"
        "scaler.load_state_dict(torch.load(path)['scaler'])",
        "paddle.save(scaler.state_dict(), 'scaler.pdparams')\n"
        "scaler.load_state_dict(paddle.load('scaler.pdparams'))",
        "model.save('model.keras')                       # with the optimizer, its scale included",
    ),
    "amp_in_evaluation": (
        "right = torch.zeros((), dtype=torch.float32)    # or an integer\n"
        "with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n"
        "    logits = model(inputs)\n"
        "right += (logits.argmax(1) == targets).sum()",
        "right = paddle.zeros([], dtype='float32')\n"
        "with paddle.no_grad(), paddle.amp.auto_cast(dtype='float16'):\n"
        "    logits = model(inputs)\n"
        "right += (logits.argmax(1) == targets).astype('float32').sum()",
        f"{_KERAS}model.evaluate(inputs, targets)                 # metrics are kept in fp32",
    ),
    "bce_loss": (
        "criterion = nn.BCEWithLogitsLoss()              # the model ends in logits\n" + _STEP,
        "criterion = paddle.nn.BCEWithLogitsLoss()\n" + _PADDLE_STEP,
        f"{_KERAS}loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)\n"
        "outputs = keras.layers.Dense(1, dtype='float32')(hidden)",
    ),
    "scaler_for_bf16": (
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "    loss = loss_fn(model(inputs), targets)\n"
        "loss.backward()                                 # no scaler\n"
        "optimizer.step()",
        "with paddle.amp.auto_cast(dtype='bfloat16'):\n"
        "    loss = loss_fn(model(inputs), targets)\n"
        "loss.backward()\n"
        "optimizer.step()",
        "keras.mixed_precision.set_global_policy('mixed_bfloat16')   # no loss scaling",
    ),
}


def of(mistake: str) -> Mapping[str, str]:
    """By framework."""
    return dict(zip(("PyTorch", "Paddle", "Keras"), _CODE[mistake], strict=True))


CHOICES = (
    "It ends with an error",
    "It runs, and does something wrong",
    "Nothing: the mistake is harmless here",
)


def show() -> None:
    """The whole page."""
    ids = [m.id for m in MISTAKES]
    chosen = BY_ID[links.chosen("mistake13", ids, ids[0])]
    begin(LESSON)
    links.select("Mistake", "mistake13", ids, format_func=lambda i: BY_ID[i].title)
    chart.see(chosen.sentence)
    st.code(script_path(chosen.id).read_text(), language="python", wrap_lines=True)
    guess = lesson_runs.ask(f"13{chosen.id}", LESSON.question, CHOICES)
    if guess is not None:
        case = lesson_diagnosis.newest(chosen)
        if lesson_diagnosis.is_ready(chosen, case) and case is not None:
            lesson_runs.judge(guess, CHOICES, judged(case))
            lesson_diagnosis.found(case)
        with chart.details("The fixed script: what changed, and what a diagnosis says of it"):
            st.code(changes(chosen), language="diff", wrap_lines=True)
            _fixed(chosen)
    end(LESSON, of(chosen.id))


def judged(case: Case) -> Answer:
    """What became of the script, as its runs recorded it."""
    assert case.report is not None
    baseline = diagnosis.observed(case.run_of("as_is") or case.head)
    words = diagnosis_words.verdict(case.report, baseline)
    if baseline.outcome.ended == "exception":
        return Answer(0, f"It raised {baseline.outcome.error_type}. The diagnosis: {words}")
    return Answer(1 if case.report.diagnosis.findings else 2, f"The diagnosis: {words}")


def changes(mistake: Mistake) -> str:
    """The lines that differ, as a patch."""
    before, after = (
        script_path(mistake.id, is_fixed=is_fixed).read_text().splitlines()
        for is_fixed in (False, True)
    )
    found = difflib.unified_diff(before, after, "with the mistake", "fixed", n=1, lineterm="")
    return "\n".join(found)


def _fixed(mistake: Mistake) -> None:
    case = lesson_diagnosis.newest(mistake, is_fixed=True)
    is_ready = lesson_diagnosis.is_ready(mistake, case, is_fixed=True)
    if is_ready and case is not None and case.report is not None:
        baseline = diagnosis.observed(case.run_of("as_is") or case.head)
        chart.see(diagnosis_words.verdict(case.report, baseline))


LESSON = Lesson(
    id="mistakes",
    question="What happens when this script runs?",
    choices=CHOICES,
    answer=lambda results: Answer(0, ""),
    draw=lambda results: None,
    terms=("autocast", "scaler", "loss scale", "half precision"),
    code=of("no_scaler"),
    sources=(TORCH_EXAMPLES, TORCH_AMP, PADDLE, KERAS),
)
