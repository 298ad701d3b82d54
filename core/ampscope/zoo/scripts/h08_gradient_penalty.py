"""Classifier with an input-gradient penalty for robustness, in mixed precision."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SmoothNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 64)
        self.b = nn.Linear(64, 64)
        self.c = nn.Linear(64, 2)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def input_gradient_norm(loss, x, scaler):
    scaled = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)[0]
    grad = scaled / scaler.get_scale()
    return (grad.square().sum(dim=1) + 1e-12).sqrt().mean()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SmoothNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)

    for step in range(50):
        x = torch.randn(64, 6, device=device)
        y = (x[:, 0] + x[:, 1] ** 2 > 1).long()
        x.requires_grad_()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        penalty = 0.02 * 64 * input_gradient_norm(loss, x, scaler)
        scaler.scale(loss + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f} penalty {penalty.item():.4f}")


if __name__ == "__main__":
    main()
