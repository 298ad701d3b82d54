"""A temperature that changes from step to step is a constant inside compiled code."""

import torch
from nets import FAULTY, Classifier, features, nn, train

now = {"temperature": 1.0}


@torch.compiler.assume_constant_result
def temperature():
    return now["temperature"]


class Cooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x):
        return torch.tanh(x / (temperature() if FAULTY else self.temperature))


act = Cooled()


def anneal(step):
    now["temperature"] = 1.0 + step
    act.temperature.fill_(1.0 + step)


train(Classifier(act), features(), call=anneal)
