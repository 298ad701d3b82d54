"""Lesson 13: eight common mistakes. Each a script, a prediction, and a real diagnosis of it."""

from __future__ import annotations

import difflib

import streamlit as st

from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.ext.lessons.mistakes import BY_ID, MISTAKES, Mistake, script_path
from ampscope.story import verdict_words as diagnosis_words
from app import chart, links
from app.ext.lessons import lesson_diagnosis, prediction
from app.ext.lessons.lesson_page import Lesson
from app.ext.lessons.prediction import Answer
from app.ext.lessons.references import Source
from app.runs import diagnoses
from app.runs.diagnoses import DiagnosisCase


class MistakesLesson(Lesson):
    """The eight scripts, one at a time: each is predicted, and diagnosed instead of measured."""

    def show(self) -> None:
        """Draw the whole page."""
        ids = [m.id for m in MISTAKES]
        chosen = BY_ID[links.chosen("mistake13", ids, ids[0])]
        self.begin()
        links.select("Mistake", "mistake13", ids, format_func=lambda i: BY_ID[i].title)
        chart.see(chosen.sentence)
        st.code(script_path(chosen.id).read_text(), language="python", wrap_lines=True)
        guess = prediction.ask(f"13{chosen.id}", self.question, self.choices)
        if guess is not None:
            if case := lesson_diagnosis.diagnosed(chosen):
                prediction.judge(guess, self.choices, judged(case))
                lesson_diagnosis.found(case)
            with chart.details("The fixed script: what changed, and what a diagnosis says of it"):
                st.code(changes(chosen), language="diff", wrap_lines=True)
                if fixed := lesson_diagnosis.diagnosed(chosen, is_fixed=True):
                    chart.see(_verdict(fixed))
        self.end(CODE[chosen.id])


def judged(case: DiagnosisCase) -> Answer:
    """What became of the script, as its runs recorded it."""
    assert case.report is not None
    baseline, words = _baseline(case), _verdict(case)
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


def _verdict(case: DiagnosisCase) -> str:
    assert case.report is not None
    return diagnosis_words.verdict(case.report, _baseline(case))


def _baseline(case: DiagnosisCase) -> RunView:
    return diagnoses.observed(case.run_of(BASELINE) or case.head)


CODE = {  # by mistake
    "cast_by_hand": {
        "PyTorch": """
model = Net().to('cuda')                        # fp32: no half()

with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        "Paddle": """
model = Net()                                   # fp32

with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
model = build_model()                           # casts by itself
""",
    },
    "no_scaler": {
        "PyTorch": """
scaler = torch.amp.GradScaler('cuda')

with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        "Paddle": """
scaler = paddle.amp.GradScaler()

with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
model.compile(optimizer='adam', loss=loss_fn)   # scales by itself
""",
    },
    "clip_before_unscale": {
        "PyTorch": """
with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)                      # first
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
        "Paddle": """
with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
paddle.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
        "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.0)  # after unscaling
""",
    },
    "unscale_each_micro_batch": {
        "PyTorch": """
for inputs, targets in micro_batches:
    with torch.autocast('cuda', dtype=torch.float16):
        loss = loss_fn(model(inputs), targets) / len(micro_batches)
    scaler.scale(loss).backward()
scaler.unscale_(optimizer)                      # once, when all are in
scaler.step(optimizer)
scaler.update()
""",
        "Paddle": """
for inputs, targets in micro_batches:
    with paddle.amp.auto_cast(dtype='float16'):
        loss = loss_fn(model(inputs), targets) / len(micro_batches)
    scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
        "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
""",
    },
    "scaler_state_not_saved": {
        "PyTorch": """
torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(),
            'scaler': scaler.state_dict()}, path)
scaler.load_state_dict(torch.load(path)['scaler'])
""",
        "Paddle": """
paddle.save(scaler.state_dict(), 'scaler.pdparams')
scaler.load_state_dict(paddle.load('scaler.pdparams'))
""",
        "Keras": """
model.save('model.keras')                       # with the optimizer, its scale included
""",
    },
    "amp_in_evaluation": {
        "PyTorch": """
right = torch.zeros((), dtype=torch.float32)    # or an integer
with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):
    logits = model(inputs)
right += (logits.argmax(1) == targets).sum()
""",
        "Paddle": """
right = paddle.zeros([], dtype='float32')
with paddle.no_grad(), paddle.amp.auto_cast(dtype='float16'):
    logits = model(inputs)
right += (logits.argmax(1) == targets).astype('float32').sum()
""",
        "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
model.evaluate(inputs, targets)                 # metrics are kept in fp32
""",
    },
    "bce_loss": {
        "PyTorch": """
criterion = nn.BCEWithLogitsLoss()              # the model ends in logits

with torch.autocast("cuda", dtype=torch.float16):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
""",
        "Paddle": """
criterion = paddle.nn.BCEWithLogitsLoss()

with paddle.amp.auto_cast(dtype="float16"):
    loss = loss_fn(model(inputs), targets)
scaler.scale(loss).backward()
""",
        "Keras": """
keras.mixed_precision.set_global_policy("mixed_float16")
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
outputs = keras.layers.Dense(1, dtype='float32')(hidden)
""",
    },
    "scaler_for_bf16": {
        "PyTorch": """
with torch.autocast('cuda', dtype=torch.bfloat16):
    loss = loss_fn(model(inputs), targets)
loss.backward()                                 # no scaler
optimizer.step()
""",
        "Paddle": """
with paddle.amp.auto_cast(dtype='bfloat16'):
    loss = loss_fn(model(inputs), targets)
loss.backward()
optimizer.step()
""",
        "Keras": """
keras.mixed_precision.set_global_policy('mixed_bfloat16')   # no loss scaling
""",
    },
}
LESSON = MistakesLesson(
    id="mistakes",
    question="What happens when this script runs?",
    choices=(
        "It ends with an error",
        "It runs, and does something wrong",
        "Nothing: the mistake is harmless here",
    ),
    terms=("autocast", "scaler", "loss scale", "half precision"),
    sources=(Source.TORCH_EXAMPLES, Source.TORCH_AMP, Source.PADDLE, Source.KERAS),
)
