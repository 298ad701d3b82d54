"""A gated recurrent network on character text, its cell built on nn.Linear.

The cell is the GRU of Cho et al. (2014). It is written out because nn.GRU and nn.LSTM are one fused
op to a hook and follow other autocast rules on a CPU than on CUDA. Each linear layer is called once
a time step, so its histogram holds all time steps of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampscope.workloads.protocol import Workload
from ampscope.workloads.training_data import VOCABULARY, next_character_loss, text_batches


@dataclass(frozen=True, slots=True)
class RNNSize:
    """Width of embedding and state; characters per window (= time steps), windows per step."""

    embedding: int
    state: int
    context: int
    batch_size: int
    lr: float


SIZES: Mapping[str, RNNSize] = {
    "tiny": RNNSize(32, 64, context=32, batch_size=16, lr=0.5),
    "small": RNNSize(128, 512, context=64, batch_size=16, lr=0.2),
    "medium": RNNSize(512, 2880, context=32, batch_size=16, lr=0.2),
}


class GatedCell(nn.Module):
    """One time step: (batch, inputs), (batch, state) -> the new (batch, state)."""

    def __init__(self, inputs: int, state: int) -> None:
        super().__init__()
        self.update = nn.Linear(inputs + state, state)
        self.reset = nn.Linear(inputs + state, state)
        self.candidate = nn.Linear(inputs + state, state)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        both = torch.cat((x, state), dim=-1)
        keep = torch.sigmoid(self.update(both))
        reset = torch.sigmoid(self.reset(both))
        candidate = torch.tanh(self.candidate(torch.cat((x, reset * state), dim=-1)))
        new: Tensor = keep * state + (1 - keep) * candidate
        return new


class RNN(nn.Module):
    """(batch, context) characters -> (batch, context, 96) logits of the next character."""

    def __init__(self, size: RNNSize) -> None:
        super().__init__()
        self.state = size.state
        self.embedding = nn.Embedding(len(VOCABULARY), size.embedding)
        self.cell = GatedCell(size.embedding, size.state)
        self.head = nn.Linear(size.state, len(VOCABULARY))

    def forward(self, characters: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(characters)
        state = embedded.new_zeros(len(characters), self.state)
        states = []
        for x in embedded.unbind(dim=1):
            state = self.cell(x, state)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, dim=1))
        return logits


def build(size: str, seed: int) -> Workload:
    """The workload of one size; weights come from torch's global generator."""
    chosen = SIZES[size]
    return Workload(
        model=RNN(chosen),
        batches=text_batches(seed, chosen.batch_size, chosen.context),
        loss=next_character_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=chosen.lr),
    )
