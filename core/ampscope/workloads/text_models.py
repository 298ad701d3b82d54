"""Two models that read character text: a GPT with attention written out and a recurrent network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampscope.workloads.training_data import VOCABULARY


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Blocks, width, attention heads; characters per window, windows per step."""

    blocks: int
    width: int
    heads: int
    context: int
    batch_size: int
    lr: float


GPT_SIZES: Mapping[str, GPTSize] = {
    "tiny": GPTSize(6, 64, 4, context=32, batch_size=8, lr=1e-3),
    "small": GPTSize(6, 256, 8, context=128, batch_size=8, lr=3e-4),
    "medium": GPTSize(9, 512, 8, context=128, batch_size=8, lr=1e-4),
}
_INIT_STD = 0.02  # PyTorch's own N(0, 1) for embeddings starts far above ln(vocabulary)


class Scores(nn.Module):
    """q·k / sqrt(d) of every query and key; q is scaled first, so the product stays small."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)


class Mix(nn.Module):
    """The values, weighted by attention."""

    def forward(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class Attention(nn.Module):
    """Causal multi-head self-attention, (batch, context, width) -> the same."""

    causal: Tensor

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.q = nn.Linear(size.width, size.width)
        self.k = nn.Linear(size.width, size.width)
        self.v = nn.Linear(size.width, size.width)
        self.scores = Scores()
        self.softmax = nn.Softmax(dim=-1)
        self.mix = Mix()
        self.projection = nn.Linear(size.width, size.width)
        future = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("causal", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(linear(x)) for linear in (self.q, self.k, self.v))
        scores: Tensor = self.scores(q, k)
        length = x.shape[1]
        # The lowest finite number of the scores' dtype and not -inf: fits each format, and a
        # healthy run then holds no infinity at all.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(self.causal[:length, :length], lowest)
        mixed: Tensor = self.mix(self.softmax(scores), v)
        out: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """(batch, context, width) -> (batch, heads, context, width / heads)."""
        batch, context, width = x.shape
        return x.view(batch, context, self.heads, width // self.heads).transpose(1, 2)


class FeedForward(nn.Module):
    """Linear to four times the width, GELU, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class GPT(nn.Module):
    """(batch, context) characters -> (batch, context, 96) logits of the next character.

    Pre-norm blocks of attention and a four times wider feed-forward part with GELU, learned
    positions, no dropout (Radford et al., 2019, without weight tying, so that each parameter has
    one place and one gradient). Attention is not fused: every matmul is the output of a module, so
    its magnitude can be seen, and q·k and softmax are where half precision bites.
    """

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, len(VOCABULARY))
        self._initialise()

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x: Tensor = self.embedding(characters) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        """GPT-2's: N(0, 0.02), less by sqrt(number of residual branches) where a branch ends."""
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "down.weight")):
                nn.init.normal_(parameter, std=_INIT_STD / math.sqrt(2 * len(self.blocks)))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=_INIT_STD)


@dataclass(frozen=True, slots=True)
class RNNSize:
    """Width of embedding and state; characters per window (= time steps), windows per step."""

    embedding: int
    state: int
    context: int
    batch_size: int
    lr: float


RNN_SIZES: Mapping[str, RNNSize] = {
    "tiny": RNNSize(32, 64, context=32, batch_size=16, lr=0.5),
    "small": RNNSize(128, 512, context=64, batch_size=16, lr=0.2),
    "medium": RNNSize(512, 2880, context=32, batch_size=16, lr=0.2),
}


class GatedCell(nn.Module):
    """One time step: (batch, inputs), (batch, state) -> the new (batch, state).

    The GRU of Cho et al. (2014), written out because nn.GRU and nn.LSTM are one fused op to a hook
    and follow other autocast rules on a CPU than on CUDA. Each linear layer is called once per time
    step, so its histogram holds all time steps of an optimizer step.
    """

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
