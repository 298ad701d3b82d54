"""Tabular classifier with a scaler that probes for a larger scale now and then."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def make_model():
    return nn.Sequential(
        nn.Linear(24, 96), nn.BatchNorm1d(96), nn.SiLU(), nn.Linear(96, 96), nn.BatchNorm1d(96), nn.SiLU(), nn.Linear(96, 7)
    )


def main():
    torch.manual_seed(101)
    model = make_model()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 34, growth_interval=40)
    centres = torch.randn(7, 24)
    skipped = []
    for step in range(150):
        y = torch.randint(7, (64,))
        x = centres[y] + 1.3 * torch.randn(64, 24)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
        if step % 25 == 24:
            print(f"step {step + 1} loss {loss.item():.4f} scale 2^{torch.tensor(scaler.get_scale()).log2().item():.0f}")
    print("skipped", skipped)


if __name__ == "__main__":
    main()
