"""A tensor is split into a coarse and a fine part by rounding; fused, the rounding is left out."""

import torch
from nets import FAULTY, Classifier, features, nn, train


class Fine(nn.Module):
    """What half precision drops of x + 64; zero wherever nothing is rounded."""

    def forward(self, x):
        if not FAULTY:
            return torch.tanh(x)
        coarse = (x + 64.0) - 64.0
        return torch.tanh(40.0 * (x - coarse)) + 0.1 * x


train(Classifier(Fine()), features())
