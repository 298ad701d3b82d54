import torch
import torch.nn as nn
import torch.nn.functional as F


class HistoryAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, item, history, valid):
        q = self.query(item).unsqueeze(1)
        k = self.key(history)
        score = (q * k).sum(-1) * q.shape[-1] ** -0.5
        score = score + (1.0 - valid.to(score.dtype)) * -1e9
        w = torch.softmax(score, dim=-1)
        return (w.unsqueeze(-1) * history).sum(1)


class Ranker(nn.Module):
    def __init__(self, n_items=60, dim=32):
        super().__init__()
        self.items = nn.Embedding(n_items + 1, dim, padding_idx=0)
        self.pool = HistoryAttention(dim)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, item, history):
        e, h = self.items(item), self.items(history)
        user = self.pool(e, h, history > 0)
        return self.mlp(torch.cat([e, user, e * user], -1)).squeeze(-1)


def log_batches(n_batches, size=128, n_items=60, length=12, seed=3):
    g = torch.Generator().manual_seed(seed)
    group = torch.randint(5, (n_items + 1,), generator=g)
    for b in range(n_batches):
        fav = torch.randint(5, (size,), generator=g)
        pool = torch.randint(1, n_items + 1, (size, 120), generator=g)
        rank = (group[pool] != fav.unsqueeze(1)).int().sort(dim=1, stable=True).indices
        hist = pool.gather(1, rank)[:, :length]
        seen = torch.randint(1, length + 1, (size, 1), generator=g)
        if b >= 22:
            seen[torch.rand(size, 1, generator=g) < 0.06] = 0
        hist = hist * (torch.arange(length) < seen)
        item = torch.randint(1, n_items + 1, (size,), generator=g)
        like = (group[item] == fav) | (torch.rand(size, generator=g) < 0.05)
        yield item, hist, like.float()


def train(epochs=1, lr=1e-2):
    torch.manual_seed(0)
    model = Ranker()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for i, (item, hist, y) in enumerate(log_batches(90)):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logit = model(item, hist)
        loss = F.binary_cross_entropy_with_logits(logit.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        if i % 10 == 9:
            print(f"batch {i + 1} logloss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    train()
