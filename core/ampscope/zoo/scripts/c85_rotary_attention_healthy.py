"""Attention with rotary positions copies the token a few places back."""

import torch
import torch.nn as nn
import torch.nn.functional as F

SEQ, DIM, VOCAB, LOOK_BACK = 1024, 32, 16, 3


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, length):
        t = torch.arange(length, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        angle = torch.outer(t, self.inv_freq)
        return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class RotaryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rotary = Rotary(DIM)
        self.q = nn.Parameter(torch.ones(DIM))
        self.k = nn.Parameter(torch.ones(DIM))
        self.v = nn.Linear(DIM, DIM)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x, n = self.embed(ids), ids.size(1)
        cos, sin = self.rotary(n + LOOK_BACK)
        q = rotate(self.q.expand(n, DIM), cos[:n], sin[:n])
        # a key carries the position from which it is to be read
        k = rotate(self.k.expand(n, DIM), cos[LOOK_BACK:], sin[LOOK_BACK:])
        weights = F.softmax(q @ k.t(), dim=-1)
        return self.lm_head(weights @ self.v(x))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RotaryAttention().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(40):
        ids = torch.randint(0, VOCAB, (4, SEQ), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(ids)[:, LOOK_BACK:]
        target = ids[:, :-LOOK_BACK]
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
