"""Lesson 5: what autocast did, op by op, in one real training step; and why three kinds of op stay
in fp32.

    the trace    every op below autocast of the second step, by phase and dtypes
    why          exp, a sum of squares and a softmax's loss, in fp16 and in fp32
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.records import Call, Reading, Result, RunSpec
from ampscope.runner.probe import prepare
from ampscope.runner.training import default_step
from ampscope.workloads.protocol import iterate

INFO = LessonInfo(
    id="ops",
    number=5,
    title="Which op in which precision",
    icon="rule",
    sentence="Autocast decides op by op: matmuls in half, and what adds up or exponentiates in "
    "fp32.",
    settings={"model": ("gpt", "resnet")},
)
EXPONENT = 12.0  # e^12 is 162,755: an ordinary attention score
WIDTH, ACTIVATION = 4096, 8.0  # a row whose squares a norm adds up: 4,096 × 64
LOGITS = (20.0, 0.0)  # a sure answer; the other class has e^-20 = 2e-9


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Calls, then the readings."""
    training = prepare(RunSpec(workload=asked["model"], precision="fp16"), device)
    batches = iterate(training.workload)
    default_step(training, training.real_batch(next(batches)))
    trace = OpTrace(ModelMap(training.model))

    def steps(*_: object) -> None:
        trace.place.outside = "step"

    training.optimizer.register_step_pre_hook(steps)
    with trace:
        default_step(training, training.real_batch(next(batches)))
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for op in trace.take()[1]:
        name = op.op.removeprefix("aten.")
        counts[name, op.phase, op.inputs, op.outputs] += op.count
    for key, count in counts.most_common():
        yield Call(*key, count=count)
    yield from _reasons(device)


def _reasons(device: torch.device) -> Iterator[Reading]:
    for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        score = torch.tensor(EXPONENT, dtype=dtype, device=device)
        yield Reading("exp(12)", name, float(torch.exp(score)))
        row = torch.full((WIDTH,), ACTIVATION, dtype=dtype, device=device)
        yield Reading("4,096 × 8²", name, float((row * row).sum()))
        logits = torch.tensor([LOGITS], dtype=dtype, device=device)
        # The loss written as log(softmax), of the class that the model thinks impossible.
        yield Reading("-log(softmax)", name, float(-torch.log(F.softmax(logits, 1))[0, 1]))
