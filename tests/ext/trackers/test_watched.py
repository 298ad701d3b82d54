"""From a real fp16 training to TensorBoard: the exported gradients are the true ones.

Oracle: the gradients themselves, taken from the model, divided by the scale in fp64 and counted by
numpy between the edges that were exported.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.ext.trackers.tensorboard_file import write_tensorboard
from ampscope.store.reader import Reader

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
SCALE = 1536.0  # no power of two


def test_exported_gradients_are_those_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    true = []
    with ampscope.watch(model, optimizer, scaler, every=1, store=tmp_path / "runs.db") as run:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4)
            scaler.scale(loss).backward()
            scaled = torch.cat([p.grad.flatten() for p in model[2].parameters()])
            true.append(np.abs(scaled.double().numpy()) / SCALE)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with Reader(run.store) as reader:
        write_tensorboard(reader, reader.run(run.id), tmp_path / "tb", "magnitude")
    events = accumulators.EventAccumulator(
        str(tmp_path / "tb" / run.id), size_guidance={accumulators.HISTOGRAMS: 0}
    )
    steps = events.Reload().Histograms("weight_grad/2")
    zeros = events.Scalars("zeros/weight_grad/2")
    assert [event.step for event in steps] == [0, 1, 2]
    for event, zero, values in zip(steps, zeros, true, strict=True):
        counts, _ = np.histogram(values[values > 0], event.histogram_value.bucket_limit)
        assert event.histogram_value.bucket[1:] == counts.tolist()
        assert zero.value == (values == 0).sum()
