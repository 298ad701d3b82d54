"""Parameter-efficient fine-tuning: only per-channel gains (all ones at the start) are trained."""

import torch
import torch.nn as nn


class Gain(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight


class TunedNet(nn.Module):
    """A frozen two-layer network with gains before, between and after its layers."""

    def __init__(self, dim=64):
        super().__init__()
        self.fc1 = nn.Linear(dim, dim).requires_grad_(False)
        self.fc2 = nn.Linear(dim, dim).requires_grad_(False)
        self.gain_in = Gain(dim)
        self.gain_mid = Gain(dim)
        self.gain_out = Gain(dim)

    def forward(self, x):
        h = torch.tanh(self.fc1(self.gain_in(x)))
        return self.gain_out(self.fc2(self.gain_mid(h)))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TunedNet()
    # the target network: same weights, gains a few per cent away from one
    target = TunedNet()
    target.load_state_dict(model.state_dict())
    for gain in (target.gain_in, target.gain_mid, target.gain_out):
        gain.weight.data += 0.06 * torch.sign(torch.randn(64))

    model = model.to(device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.0)

    for step in range(60):
        x = torch.randn(128, 64)
        with torch.no_grad():
            y = target(x)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(x.to(torch.bfloat16))
        loss = (out.float() - y).square().mean() * 1e3
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
