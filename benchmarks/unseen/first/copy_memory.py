"""Sequence memory task with a plain recurrent cell."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Cell(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.inp = nn.Linear(n_in, hidden)
        self.rec = nn.Linear(hidden, hidden)
        nn.init.orthogonal_(self.rec.weight, gain=3.2)

    def forward(self, x, h):
        return F.relu(self.inp(x) + self.rec(h))


class Recurrent(nn.Module):
    def __init__(self, n_in=4, hidden=48, n_out=4):
        super().__init__()
        self.hidden = hidden
        self.cell = Cell(n_in, hidden)
        self.readout = nn.Linear(hidden, n_out)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.hidden)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.readout(h)


def task(n, length, gen):
    x = torch.randn(n, length, 4, generator=gen)
    return x, x[:, 0]


if __name__ == "__main__":
    torch.manual_seed(90)
    gen = torch.Generator().manual_seed(91)
    model = Recurrent()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(30):
        x, y = task(16, 120, gen)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 5 == 0:
            print(step, loss.item(), scaler.get_scale())
