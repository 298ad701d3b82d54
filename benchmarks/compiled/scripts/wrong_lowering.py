"""The code that the compiler generates for tanh is a little too large."""

import torch
from nets import FAULTY, Classifier, features, nn, train
from torch._inductor.lowering import lowerings

aten = torch.ops.aten
right = lowerings[aten.tanh.default]


def tanh(x):
    made = right(x)
    return lowerings[aten.mul.Tensor](made, 1.2) if FAULTY else made


lowerings[aten.tanh.default] = tanh
train(Classifier(nn.Tanh()), features())
