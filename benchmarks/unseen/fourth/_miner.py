import torch


class ClipLibrary:
    """Fingerprint clips: each track has several takes, some of them mirrored from another archive."""

    def __init__(self, n_tracks=220, takes=4, dim=48, mirrored=0.006, seed=0):
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(n_tracks, 1, dim, generator=g)
        self.takes = base + 0.7 * torch.randn(n_tracks, takes, dim, generator=g)
        self.n_tracks, self.n_takes = n_tracks, takes
        for _ in range(int(mirrored * n_tracks)):
            t = int(torch.randint(n_tracks, (1,), generator=g))
            self.takes[t, 1] = self.takes[t, 0]

    def triplets(self, batch, g):
        a = torch.randint(self.n_tracks, (batch,), generator=g)
        shift = torch.randint(1, self.n_tracks, (batch,), generator=g)
        n = (a + shift) % self.n_tracks
        i = torch.randint(self.n_takes, (batch,), generator=g)
        j = (i + torch.randint(1, self.n_takes, (batch,), generator=g)) % self.n_takes
        k = torch.randint(self.n_takes, (batch,), generator=g)
        return self.takes[a, i], self.takes[a, j], self.takes[n, k]


class Miner:
    """Keeps the hardest negatives of the last batches and swaps them in now and then."""

    def __init__(self, keep=64):
        self.keep = keep
        self.bank = None

    @torch.no_grad()
    def push(self, negatives, distance):
        order = distance.argsort()[: self.keep // 4]
        fresh = negatives[order].detach().clone()
        self.bank = fresh if self.bank is None else torch.cat([fresh, self.bank])[: self.keep]

    def refill(self, negatives, share, g):
        if self.bank is None:
            return negatives
        take = int(share * len(negatives))
        pick = torch.randint(len(self.bank), (take,), generator=g)
        out = negatives.clone()
        out[:take] = self.bank[pick]
        return out
