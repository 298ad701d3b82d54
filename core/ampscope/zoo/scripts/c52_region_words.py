"""Match image regions to words: cross entropy over all pairs of a batch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Matcher(nn.Module):
    def __init__(self, d_region=16, d_model=64, n_words=50):
        super().__init__()
        self.region = nn.Linear(d_region, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.words = nn.Linear(d_model, n_words)

    def forward(self, regions):
        return self.words(self.norm(F.relu(self.region(regions))))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loss-weight", type=float, default=1000.0)
    return parser.parse_args()


def main():
    args = get_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = torch.randn(16, 50)
    model = Matcher().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device)
    for step in range(args.steps):
        regions = torch.randn(32, 36, 16)
        words = (regions @ teacher).argmax(dim=-1)
        regions, words = regions.to(device), words.to(device)
        with torch.autocast(device, dtype=torch.float16):
            logits = model(regions)
            loss = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")
            loss = args.loss_weight * loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.2f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
