"""Fine-tune the decoder of a small latent autoencoder (latents in, images out)."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, hidden, 1)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(hidden, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(self.act(self.conv1(x)))


class Decoder(nn.Module):
    def __init__(self, latent=4, channels=8, hidden=512):
        super().__init__()
        self.conv_in = nn.Conv2d(latent, channels, 1)
        self.mid = ResBlock(channels, hidden)
        self.norm_out = nn.GroupNorm(2, channels)
        self.conv_out = nn.Conv2d(channels, 3, 1)

    def forward(self, z):
        h = self.mid(self.conv_in(z))
        return self.conv_out(self.norm_out(h))


def load_pretrained(decoder, gain):
    """Stand-in for the published weights, whose middle block runs hot."""
    with torch.no_grad():
        decoder.mid.conv1.weight.mul_(gain)
        decoder.mid.conv2.weight.mul_(gain)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--gain", type=float, default=20.0)
    args = parser.parse_args()

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    latents = torch.randn(32, 4, 4, 4)
    images = torch.tanh(torch.einsum("nchw,dc->ndhw", latents, torch.randn(3, 4)))
    loader = DataLoader(TensorDataset(latents, images), batch_size=4, shuffle=True)

    decoder = Decoder().to(device)
    load_pretrained(decoder, args.gain)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device)

    for epoch in range(args.epochs):
        total = 0.0
        for z, target in loader:
            z, target = z.to(device), target.to(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device, dtype=torch.float16):
                loss = nn.functional.mse_loss(decoder(z), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch}: reconstruction loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
