"""A kernel is wrong where its input comes out of a register, and right where it is loaded."""

import torch
from nets import FAULTY, Classifier, features, nn, train
from torch._inductor.ir import Pointwise
from torch._inductor.lowering import lowerings

aten = torch.ops.aten
right = lowerings[aten.sin.default]


def sine(x):
    made = right(x)
    is_inlined = isinstance(x.data.data, Pointwise)
    return lowerings[aten.mul.Tensor](made, 2.5) if FAULTY and is_inlined else made


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x)


lowerings[aten.sin.default] = sine
train(Classifier(nn.Sequential(nn.Sigmoid(), Wave())), features())
