"""The kinds of measurement: what a run does that records no training, and who tells of it."""

from __future__ import annotations

from ampscope import extensions
from ampscope.extensions import Kind

_OWN = (
    Kind(
        name="bench",
        title="What this machine reaches",
        page="hardware",
        measure="ampscope.measure.rates:measure",
        told="ampscope.story.measurement:bench_told",
    ),
    Kind(
        name="cores",
        title="Tensor Cores in {what} {precision}",
        page="tensor_cores",
        measure="ampscope.measure.tensor_cores:measure",
        told="ampscope.story.measurement:cores_told",
        gaps="ampscope.story.measurement:cores_gaps",
    ),
)
# By RunSpec.kind; those of extensions that are there.
KINDS = {each.name: each for each in _OWN} | extensions.kinds()
