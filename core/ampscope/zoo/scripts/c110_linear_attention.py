"""Name the value that belongs to a key: one linear-attention layer over a few pairs."""

import torch
import torch.nn as nn
import torch.nn.functional as F

KEYS, VALUES, PAIRS, WIDTH = 8, 4, 4, 32


class LinearAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        # features start almost closed, so that keys do not mix
        nn.init.constant_(self.q.bias, -9.0)
        nn.init.constant_(self.k.bias, -9.0)

    @staticmethod
    def features(x):
        return F.elu(x) + 1

    def forward(self, query, keys, values):
        q, k, v = self.features(self.q(query)), self.features(self.k(keys)), self.v(values)
        mixed = q @ (k.transpose(1, 2) @ v)
        norm = (q * k.sum(dim=1, keepdim=True)).sum(dim=-1, keepdim=True)
        return mixed / (norm + 1e-9)


class Recall(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Embedding(KEYS, WIDTH)
        self.value = nn.Embedding(VALUES, WIDTH)
        self.attn = LinearAttention(WIDTH)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, query, keys, values):
        found = self.attn(self.key(query)[:, None], self.key(keys), self.value(values))
        return self.head(found[:, 0])


def sample(generator, count=64):
    keys = torch.rand(count, KEYS, generator=generator).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(0, VALUES, (count, PAIRS), generator=generator)
    at = torch.randint(0, PAIRS, (count, 1), generator=generator)
    return keys.gather(1, at)[:, 0], keys, values, values.gather(1, at)[:, 0]


def main(steps=80):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(3)
    model = Recall().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        query, keys, values, wanted = (t.to(device) for t in sample(generator))
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(query, keys, values).float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
