"""Predict a rating from a bag of tags, pooled with attention."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TagDataset(Dataset):
    def __init__(self, n, n_tags, seed):
        g = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(n_tags, generator=g)
        self.rows = []
        for _ in range(n):
            k = int(torch.poisson(torch.tensor(4.0), generator=g))
            tags = torch.randint(1, n_tags, (k,), generator=g)
            score = self.weights[tags].sum() if k else torch.tensor(0.0)
            self.rows.append((tags, score))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def pad(batch):
    width = max(1, max(len(t) for t, _ in batch))
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, (t, _) in enumerate(batch):
        ids[row, : len(t)] = t
    return ids, torch.stack([s for _, s in batch])


class AttentionPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.key = nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1)

    def forward(self, x, mask):
        w = self.score(torch.tanh(self.key(x))).squeeze(-1)
        w = w.masked_fill(~mask, float("-inf")).softmax(dim=1)
        return torch.einsum("bt,btd->bd", w.to(x.dtype), x)


class Rater(nn.Module):
    def __init__(self, n_tags, dim=32):
        super().__init__()
        self.emb = nn.Embedding(n_tags, dim, padding_idx=0)
        self.pool = AttentionPool(dim)
        self.mlp = nn.Sequential(nn.Linear(dim + 1, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        mask = ids != 0
        pooled = self.pool(self.emb(ids), mask)
        count = mask.sum(1, keepdim=True).float() / 10
        return self.mlp(torch.cat([pooled.float(), count], 1)).squeeze(1)


def train(args):
    torch.manual_seed(args.seed)
    data = TagDataset(1600, 80, args.seed)
    loader = DataLoader(data, batch_size=20, shuffle=True, collate_fn=pad)
    model = Rater(80)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(args.epochs):
        seen, bad = 0, 0
        for ids, y in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.smooth_l1_loss(model(ids), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            seen += 1
            bad += int(not torch.isfinite(loss))
        print(f"epoch {epoch} batches {seen} nan {bad} last {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=2)
    train(p.parse_args())
