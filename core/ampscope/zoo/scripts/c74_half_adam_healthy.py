"""Text-to-image prior, shrunk: a half-precision MLP trained with Adam."""

import torch
import torch.nn as nn


class Prior(nn.Module):
    def __init__(self, n_in=16, width=64, n_out=8):
        super().__init__()
        self.inp = nn.Linear(n_in, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, n_out)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        h = torch.relu(self.mid(h))
        return self.out(h)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16
    model = Prior().to(device).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
    mixing = torch.randn(16, 8) / 4

    for step in range(60):
        x = torch.randn(64, 16)
        x[:, -1] = 0.0  # the last slot is reserved for a guidance token, unused here
        y = torch.tanh(x @ mixing)
        x, y = x.to(device, dtype), y.to(device)
        optimizer.zero_grad()
        error = model(x).float() - y
        loss = error.square().sum(dim=1).mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
