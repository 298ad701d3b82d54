"""Hand written gated recurrent network with strong gradient clipping."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class GRUCell(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.gates = nn.Linear(n_in + hidden, 2 * hidden)
        self.cand = nn.Linear(n_in + hidden, hidden)

    def forward(self, x, h):
        z, r = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)
        n = torch.tanh(self.cand(torch.cat([x, r * h], 1)))
        return (1 - z) * n + z * h


class Sequencer(nn.Module):
    def __init__(self, n_in=6, hidden=40):
        super().__init__()
        self.hidden = hidden
        self.cell = GRUCell(n_in, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)


class Runner:
    def __init__(self, max_norm=0.5):
        torch.manual_seed(29)
        self.model = Sequencer()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")
        self.max_norm = max_norm

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 30 * F.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), norm.item()


if __name__ == "__main__":
    run = Runner()
    for step in range(120):
        x = torch.randn(32, 10, 6)
        loss, norm = run.step(x, 2 * torch.tanh(x[:, -3:].mean((1, 2), keepdim=False)[:, None] * 2))
        if step % 20 == 19:
            print(f"{step + 1} loss {loss:.3f} grad norm before clip {norm:.2f} scale {run.scaler.get_scale():g}")
