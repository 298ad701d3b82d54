"""Forecast a noisy oscillation with a GRU cell written over Linear layers."""
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.gates = nn.Linear(n_in + n_hidden, 2 * n_hidden)
        self.cand = nn.Linear(n_in + n_hidden, n_hidden)

    def forward(self, x, h):
        r, z = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        n = torch.tanh(self.cand(torch.cat([x, r * h], -1)))
        return (1 - z) * n + z * h


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.hidden = hidden
        self.cell = Cell(1, hidden)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, series):
        h = series.new_zeros(series.shape[0], self.hidden)
        for t in range(series.shape[1]):
            h = self.cell(series[:, t : t + 1], h)
        return self.readout(h).squeeze(-1)


def windows(n, length, rng):
    phase = 6.28 * torch.rand(n, 1, generator=rng)
    speed = 0.3 + 0.4 * torch.rand(n, 1, generator=rng)
    t = torch.arange(length + 1).float()
    wave = torch.sin(phase + speed * t) + 0.05 * torch.randn(n, length + 1, generator=rng)
    return wave[:, :-1], wave[:, -1]


class Experiment:
    """Keeps model, optimizer and scaler together."""

    LENGTH = 9

    def __init__(self, seed=17):
        torch.manual_seed(seed)
        self.rng = torch.Generator().manual_seed(seed)
        self.model = Forecaster()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=8e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    def loss(self, n):
        series, nxt = windows(n, self.LENGTH, self.rng)
        with torch.autocast("cpu", dtype=torch.float16):
            forecast = self.model(series)
            loss = nn.functional.smooth_l1_loss(forecast.float(), nxt)
        return loss

    def train_step(self):
        loss = self.loss(32)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    exp = Experiment()
    for it in range(56):
        value = exp.train_step()
        if it % 14 == 0:
            print(f"it {it:3d}  train loss {value:.5f}")
    with torch.no_grad():
        print(f"held-out  loss {exp.loss(256).item():.5f}")
