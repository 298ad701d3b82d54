"""bfloat16 training without a loss scaler, with an EMA copy for evaluation."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResidualMLP(nn.Module):
    def __init__(self, n_in=10, width=48, depth=3):
        super().__init__()
        self.inp = nn.Linear(n_in, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = h + F.silu(layer(h))
        return self.out(self.norm(h)).squeeze(-1)


@torch.no_grad()
def update_average(average, model, decay):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ResidualMLP().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x_test = torch.randn(256, 10, device=device)
    y_test = torch.sin(x_test.sum(1) / 2)

    for step in range(80):
        x = torch.randn(64, 10, device=device)
        y = torch.sin(x.sum(1) / 2)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_average(average, model, decay=0.9)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        for name, net in (("model", model), ("average", average)):
            print(f"{name}: test error {F.mse_loss(net(x_test), y_test).item():.4f}")


if __name__ == "__main__":
    main()
