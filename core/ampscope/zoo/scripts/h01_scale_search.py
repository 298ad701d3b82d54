"""Train a small convolution-free mixer on toy images, in mixed precision."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = nn.Linear(tokens, tokens)
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mix = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=9, patch=16, dim=32, n_classes=5):
        super().__init__()
        self.patch_embed = nn.Linear(patch, dim)
        self.blocks = nn.Sequential(MixerBlock(tokens, dim), MixerBlock(tokens, dim))
        self.head = nn.Linear(dim, n_classes)

    def forward(self, patches):
        return self.head(self.blocks(self.patch_embed(patches)).mean(dim=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--init-scale", type=float, default=2.0**24)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    patches = torch.randn(480, 9, 16)
    labels = patches[:, :, :5].sum(dim=1).argmax(dim=1)
    loader = DataLoader(TensorDataset(patches, labels), batch_size=32, shuffle=True)

    model = Mixer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device, init_scale=args.init_scale)
    for epoch in range(args.epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            with torch.autocast(device, dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch}: loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
