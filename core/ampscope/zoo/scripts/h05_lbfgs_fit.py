"""Fit a damped oscillation with L-BFGS, all in single precision."""

import torch
import torch.nn as nn


class Oscillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(1, 40)
        self.readout = nn.Linear(40, 1)
        nn.init.normal_(self.features.weight, std=3.0)

    def forward(self, t):
        return self.readout(torch.tanh(self.features(t)))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    t = torch.linspace(0, 4, 200, device=device)[:, None]
    y = torch.exp(-0.5 * t) * torch.sin(4 * t)
    model = Oscillation().to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(t), y)
        loss.backward()
        return loss

    for outer in range(15):
        loss = optimizer.step(closure)
        if outer % 3 == 0:
            print(f"outer iteration {outer}: {loss.item():.6f}")

    with torch.no_grad():
        print(f"largest error {(model(t) - y).abs().max().item():.4f}")


if __name__ == "__main__":
    main()
