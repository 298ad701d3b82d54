import torch
from torch import nn


def conv_bn(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class PlaneNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleDict({
            "stem": conv_bn(1, width, 2),
            "down": conv_bn(width, width * 2, 2),
            "ctx": conv_bn(width * 2, width * 2, 2),
        })
        self.head = nn.Linear(width * 2 * 16, 2)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, x):
        for b in self.blocks.values():
            x = b(x)
        return self.head(x.flatten(1))
