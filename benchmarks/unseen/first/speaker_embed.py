"""Speaker classification: frame network, statistics pooling, softmax head."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class StatsPool(nn.Module):
    def forward(self, x):
        mean = x.mean(dim=1)
        var = x.var(dim=1, unbiased=False)
        std = torch.sqrt(var.clamp(min=1e-9))
        return torch.cat([mean, std], dim=-1)


class XVector(nn.Module):
    def __init__(self, feats=20, width=48, speakers=8):
        super().__init__()
        self.frame1 = nn.Linear(feats * 3, width)
        self.frame2 = nn.Linear(width, width)
        self.pool = StatsPool()
        self.embed = nn.Linear(2 * width, 32)
        self.classify = nn.Linear(32, speakers)

    def forward(self, x):
        x = torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], dim=-1)
        x = F.relu(self.frame1(x))
        x = F.relu(self.frame2(x))
        return self.classify(F.relu(self.embed(self.pool(x))))


class Corpus:
    def __init__(self, speakers, feats, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.mean = torch.randn(speakers, feats, generator=self.gen)
        self.spread = 0.3 + torch.rand(speakers, feats, generator=self.gen)

    def draw(self, n, frames=30):
        y = torch.randint(len(self.mean), (n,), generator=self.gen)
        noise = torch.randn(n, frames, self.mean.shape[1], generator=self.gen)
        return self.mean[y][:, None] + 0.5 * self.spread[y][:, None] * noise, y


class Trainer:
    def __init__(self, model, corpus, lr=2e-3):
        self.model, self.corpus = model, corpus
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self):
        x, y = self.corpus.draw(24)
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    def fit(self, steps):
        for i in range(steps):
            loss = self.step()
            if i % 10 == 0:
                print(f"iter {i} loss {loss:.4f} scale {self.scaler.get_scale():g}")


if __name__ == "__main__":
    torch.manual_seed(13)
    Trainer(XVector(), Corpus(8, 20, seed=31)).fit(60)
