"""Sequence tagging with hand-written attention over padded, bucketed sentences."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB, DIM, BUCKET = 20, 32, 10


class Sentences(Dataset):
    """Sentences of 5 to 9 tokens, padded to the bucket length with token 0."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(5, BUCKET, (n,), generator=g)
        self.tokens = torch.randint(1, VOCAB, (n, BUCKET), generator=g)
        self.tokens[torch.arange(BUCKET) >= self.lengths[:, None]] = 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], (self.tokens[i] + 1) % 4


class MaskedAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)

    def forward(self, x, real):
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        scores = q @ k.transpose(1, 2) / x.size(-1) ** 0.5
        scores = scores.masked_fill(~real[:, None, :], float("-inf"))
        return scores.softmax(dim=-1) @ v


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.attention = MaskedAttention(DIM)
        self.classifier = nn.Linear(DIM, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, tokens != 0)
        return self.classifier(x)


def train():
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Sentences(256, seed=0), batch_size=32, shuffle=True)
    model = Tagger().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(5):
        for tokens, tags in loader:
            tokens, tags = tokens.to(device), tags.to(device)
            opt.zero_grad()
            with torch.autocast(device, torch.float16):
                logits = model(tokens)
                keep = tokens != 0  # the loss looks at real tokens only
                loss = F.cross_entropy(logits[keep], tags[keep])
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print("epoch", epoch, "loss", round(loss.item(), 4))


if __name__ == "__main__":
    train()
