"""Distil a frozen cross scorer into a dual encoder ranker."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CANDIDATES = 6


class Queries(Dataset):
    def __init__(self, n=900, docs=300, seed=14):
        g = torch.Generator().manual_seed(seed)
        self.doc = torch.randn(docs, 24, generator=g)
        self.doc[0] = 0.0
        self.query = torch.randn(n, 24, generator=g)
        hits = torch.randint(0, CANDIDATES + 1, (n,), generator=g)
        hits[torch.rand(n, generator=g) < 0.6] = CANDIDATES
        self.cand = torch.zeros(n, CANDIDATES, dtype=torch.long)
        for i, k in enumerate(hits.tolist()):
            self.cand[i, :k] = torch.randint(1, docs, (k,), generator=g)

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return self.query[i], self.doc[self.cand[i]]


class CrossScorer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * dim, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, q, d):
        return self.net(torch.cat([q[:, None].expand_as(d), d], dim=-1)).squeeze(-1)


class DualEncoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 32))
        self.d = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, q, d):
        return torch.einsum("bh,bkh->bk", self.q(q), self.d(d))


class MinMax(nn.Module):
    def __init__(self, epsilon=1e-8):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, scores):
        low = scores.min(dim=-1, keepdim=True).values
        high = scores.max(dim=-1, keepdim=True).values
        return (scores - low) / (high - low + self.epsilon)


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = CrossScorer().requires_grad_(False)
        self.student = DualEncoder()
        self.normalise = MinMax()

    def forward(self, q, d):
        with torch.no_grad():
            target = self.normalise(self.teacher(q, d))
        logp = F.log_softmax(self.student(q, d).float(), dim=-1)
        return F.kl_div(logp, F.softmax(4 * target.float(), dim=-1), reduction="batchmean")


def main():
    torch.manual_seed(1)
    model = Distiller()
    loader = DataLoader(Queries(), batch_size=30, shuffle=True)
    opt = torch.optim.AdamW(model.student.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        losses = []
        for q, d in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(q, d)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
        print(f"epoch {epoch} mean loss {sum(losses) / len(losses):.4f} scale {scaler.get_scale():g}")


main()
