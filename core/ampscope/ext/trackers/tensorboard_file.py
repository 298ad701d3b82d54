"""A run as a TensorBoard event file, by tensorboard's own writer.

Histograms are HistogramProto (tensorboard/compat/proto/histogram.proto): ``bucket[i]`` counts
[bucket_limit[i-1], bucket_limit[i]). Its ``sum`` and ``sum_squares`` cannot be known from counts by
power of two and are left out; TensorBoard shows neither.
"""

from __future__ import annotations

from pathlib import Path

from ampscope.errors import BadInput
from ampscope.ext.trackers.steps import Axis, ExportSummary, exported_steps, require
from ampscope.records import RunInfo
from ampscope.store.reader import Reader


def write_tensorboard(reader: Reader, info: RunInfo, out: Path, axis: Axis) -> ExportSummary:
    """Write ``out/<run id>/events.out.tfevents.…``. Raises BadInput without tensorboard, and when
    that folder holds an export already: TensorBoard would show every point twice."""
    require("tensorboard", "tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = out / info.id
    if any(folder.glob("events.out.tfevents.*")):
        raise BadInput(f"{folder} holds an export already. Remove it, or choose another --out.")
    writer = EventFileWriter(str(folder))
    summary = ExportSummary(folder)
    try:
        for step in exported_steps(reader, info, axis):
            values = [Summary.Value(tag=k, simple_value=v) for k, v in step.scalars.items()]
            for tag, found in step.histograms.items():
                if not found.counts.size:
                    continue
                edges = found.edges.tolist()
                proto = HistogramProto(
                    min=edges[0],
                    max=edges[-1],
                    num=found.finite,
                    bucket_limit=edges,  # the first limit closes an empty bucket below it
                    bucket=[0.0, *found.counts.tolist()],
                )
                values.append(Summary.Value(tag=tag, histo=proto))
            event = Event(wall_time=step.time, step=step.step, summary=Summary(value=values))
            writer.add_event(event)
            summary.count(step)
    finally:
        writer.close()
    return summary
