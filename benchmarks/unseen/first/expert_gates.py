"""Soft mixture of experts with independent cosine gates and an entropy regulariser."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR


class CosineGate(nn.Module):
    def __init__(self, dim, experts, proj=6, temperature=0.08):
        super().__init__()
        self.proj = nn.Linear(dim, proj, bias=False)
        self.keys = nn.Parameter(torch.randn(experts, proj))
        self.temperature = temperature
        self.entropy = None

    def forward(self, x):
        sim = F.normalize(self.proj(x).float(), dim=-1) @ F.normalize(self.keys, dim=-1).t()
        g = torch.sigmoid(sim / self.temperature)
        self.entropy = -(g * torch.log(g) + (1 - g) * torch.log(1 - g)).mean()
        return g


class SoftMoE(nn.Module):
    def __init__(self, dim, experts, hidden):
        super().__init__()
        self.gate = CosineGate(dim, experts)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) / dim ** 0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) / hidden ** 0.5)

    def forward(self, x):
        g = self.gate(x)
        h = torch.relu(torch.einsum("bd,edh->beh", x, self.w1))
        y = torch.einsum("beh,ehd->bed", h, self.w2)
        return torch.einsum("be,bed->bd", g.to(y.dtype), y) / g.shape[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(20, 48)
        self.moe = SoftMoE(48, 6, 32)
        self.out = nn.Linear(48, 5)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(h + self.moe(h))


def make_batch(n, gen, teacher):
    x = torch.randn(n, 20, generator=gen)
    return x, (x @ teacher).argmax(1)


if __name__ == "__main__":
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(60)
    teacher = torch.randn(20, 5, generator=gen)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    sched = LambdaLR(opt, lambda i: min(1.0, (i + 1) / 20))
    scaler = torch.amp.GradScaler("cpu")
    for i in range(100):
        x, y = make_batch(64, gen, teacher)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
            loss = F.cross_entropy(logits, y) + 0.01 * net.moe.gate.entropy
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        if i % 20 == 0:
            print(f"{i:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")
