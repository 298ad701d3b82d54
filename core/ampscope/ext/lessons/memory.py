"""Lesson 11: bytes that live when a training step needs most, by what they are for.

The same model and batch in fp32, under fp16 autocast, and with everything in fp16, each after two
steps, so that the optimizer has its state. Every storage that an op allocates is followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.measure.training_steps import batch_of, memory_split
from ampscope.records import Result, RunSpec
from ampscope.runner.probe import prepare
from ampscope.runner.training import training_step

INFO = LessonInfo(
    id="memory",
    number=11,
    title="Memory",
    icon="memory_alt",
    sentence="Where the memory of a training step goes, and which part of it half precision "
    "halves.",
    settings={"model": ("gpt", "lenet"), "batch": ("8", "32", "64")},
)
PRECISIONS = ("fp32", "fp16", "fp16-pure")
WARM_UP = 2


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """One MemorySplit a precision."""
    samples = int(asked["batch"])
    for name in PRECISIONS:
        spec = RunSpec(workload=asked["model"], precision=name)
        training = prepare(spec, device)
        batch = batch_of(training, spec, samples)
        for _ in range(WARM_UP):
            training_step(training, batch)
        yield memory_split(training, batch, name, samples)
