"""Convolutions in channels_last, bf16."""

from parts import Convolutions, pictures, torch, train


def batch():
    x, y = pictures()
    return x.to(memory_format=torch.channels_last), y


net = Convolutions().to(memory_format=torch.channels_last)
train(torch.compile(net), batch, net.parameters())
