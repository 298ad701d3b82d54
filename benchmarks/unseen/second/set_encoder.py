import torch
import torch.nn as nn
import torch.nn.functional as F


class SetAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, pad):
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        bias = torch.zeros(pad.shape, dtype=s.dtype).masked_fill(pad, float("-inf"))
        a = torch.softmax(s + bias.unsqueeze(1), -1)
        return x + a @ self.v(x)


class SetNet(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.inp = nn.Linear(3, dim)
        self.a1, self.a2 = SetAttention(dim), SetAttention(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x, pad):
        h = F.gelu(self.inp(x))
        h = self.a2(F.gelu(self.a1(h, pad)), pad)
        h = h.masked_fill(pad.unsqueeze(-1), torch.finfo(h.dtype).min)
        return self.out(h.amax(1)).squeeze(-1)


def sets(n, g, most=12):
    size = torch.randint(1, most + 1, (n,), generator=g)
    x = torch.randn(n, most, 3, generator=g)
    pad = torch.arange(most) >= size.unsqueeze(1)
    y = x[..., 0].masked_fill(pad, -1e4).amax(1)
    return x * ~pad.unsqueeze(-1), pad, y


def main(steps=150):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    net = SetNet()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=40)
    for s in range(steps):
        x, pad, y = sets(64, g)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.smooth_l1_loss(net(x, pad), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if s % 15 == 14:
            print(f"step {s + 1} loss {loss.item():.4f} scale {scaler.get_scale():g}")


main()
