"""Signal along a chromosome: a value for each position, learnt from noisy reads of windows, bf16."""
import torch
import torch.nn as nn

torch.set_num_threads(1)
LENGTH, TABLE, WINDOW = 4000, 4096, 16


class Track(nn.Module):
    """An embedding for each position, and one for the place within a window."""

    def __init__(self, dim=8):
        super().__init__()
        self.site = nn.Embedding(TABLE, dim)
        self.within = nn.Embedding(WINDOW, dim)
        self.read = nn.Linear(dim, 1)

    def forward(self, first, strand):
        offsets = torch.arange(WINDOW)
        positions = first[:, None] + offsets
        h = self.site(positions) + 0.1 * self.within(offsets)
        return self.read(h).squeeze(-1) * (1 - 2 * strand[:, None])


def batch(signal, n, gen):
    """Where reads start, their strand, and what was read."""
    first = torch.randint(LENGTH - WINDOW + 1, (n,), generator=gen)
    strand = torch.randint(2, (n,), generator=gen)
    read = signal[first[:, None] + torch.arange(WINDOW)] * (1 - 2 * strand[:, None])
    return first, strand, read + 0.1 * torch.randn(n, WINDOW, generator=gen)


def main(steps=220, lr=0.05):
    gen = torch.Generator().manual_seed(77)
    torch.manual_seed(77)
    signal = torch.randn(LENGTH, generator=gen)
    track = Track()
    adam = torch.optim.Adam(track.parameters(), lr=lr)
    for step in range(steps):
        start_sites, strand, reads = batch(signal, 256, gen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = track(start_sites, strand)
            loss = (guess.float() - reads).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 55 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        first = torch.arange(0, LENGTH, WINDOW)
        plus = torch.zeros(len(first), dtype=torch.long)
        error = (track(first, plus).flatten() - signal).square().mean()
    print(f"final loss {error.item():.4f}")
    print(f"final rmse {error.sqrt().item():.4f}")


if __name__ == "__main__":
    main()
