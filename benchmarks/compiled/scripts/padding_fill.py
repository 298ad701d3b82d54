"""Padding is filled with something else than zero."""

import torch
from nets import FAULTY, Classifier, F, features, nn, passes, train

aten = torch.ops.aten


class Neighbours(nn.Module):
    """Each feature with those eight places before and behind."""

    def forward(self, x):
        wide = F.pad(x, (8, 8))
        return torch.tanh(x + wide[..., :-16] - wide[..., 16:])


def fill(graph):
    for node in graph.nodes:
        if node.target is aten.constant_pad_nd.default and FAULTY:
            node.args = (*node.args[:2], 3.0)


passes(post_grad_custom_pre_pass=fill)
train(Classifier(Neighbours()), features())
