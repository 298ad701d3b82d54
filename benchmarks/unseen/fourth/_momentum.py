import torch
import torch.nn.functional as F


class KeyQueue:
    """Ring buffer of past keys, two bytes per entry."""

    def __init__(self, size, dim, dtype=torch.float16):
        self.keys = F.normalize(torch.randn(size, dim), dim=-1).to(dtype)
        self.at = 0

    @torch.no_grad()
    def push(self, k):
        n = len(k)
        idx = (torch.arange(n) + self.at) % len(self.keys)
        self.keys[idx] = k.to(self.keys.dtype)
        self.at = (self.at + n) % len(self.keys)


class Shadow:
    """Moving average of a network; the network that is called holds a compact copy."""

    def __init__(self, net, copy_net, momentum, dtype):
        self.average = {k: v.detach().clone().float() for k, v in net.state_dict().items()}
        self.net = copy_net.requires_grad_(False).to(dtype)
        self.momentum, self.dtype = momentum, dtype
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        for k, v in self.net.state_dict().items():
            v.copy_(self.average[k])

    @torch.no_grad()
    def update(self, net):
        for k, v in net.state_dict().items():
            self.average[k].lerp_(v.float(), 1 - self.momentum)
        self.refresh()

    @torch.no_grad()
    def __call__(self, x):
        return F.normalize(self.net(x.to(self.dtype)).float(), dim=-1)
