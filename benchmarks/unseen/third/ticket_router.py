"""Support-ticket routing from subject and (optional) body, own attention."""
import random
import torch
from torch import nn
import torch.nn.functional as F

SEED, VOCAB, QUEUES, LEN = 5, 150, 4, 14
torch.manual_seed(SEED)
random.seed(SEED)


class SelfAttention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)

    def split(self, t):
        b, n, w = t.shape
        return t.view(b, n, self.heads, w // self.heads).transpose(1, 2)

    def forward(self, x, bias):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        s = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        s = s + bias.to(s.dtype)
        out = s.softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class FieldEncoder(nn.Module):
    BLOCKED = -1e9

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.attn = SelfAttention(width)
        self.ln = nn.LayerNorm(width)

    def forward(self, ids):
        keep = (ids != 0).float()
        bias = (1.0 - keep)[:, None, None, :] * self.BLOCKED
        h = self.embed(ids)
        h = self.ln(h + self.attn(h, bias))
        return (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.subject, self.body = FieldEncoder(), FieldEncoder()
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, QUEUES))

    def forward(self, s, b):
        return self.head(torch.cat([self.subject(s), self.body(b)], -1))


def field(y, minimum):
    ids = torch.zeros(len(y), LEN, dtype=torch.long)
    for i, c in enumerate(y.tolist()):
        n = random.randint(minimum, LEN)
        for j in range(n):
            ids[i, j] = 1 + c * 35 + random.randrange(35) if random.random() < .4 else random.randrange(1, VOCAB)
    return ids


def batches(n_mail, n_chat, size=32):
    for i in range(n_mail + n_chat):
        y = torch.randint(0, QUEUES, (size,))
        body = field(y, 4)
        if i >= n_mail:
            body[torch.rand(size) < 0.25] = 0
        yield field(y, 3), body, y


net = Router()
optim = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
window = []
for it, (s, b, y) in enumerate(batches(50, 130)):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(s, b), y)
    optim.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    window.append(loss.item())
    if (it + 1) % 20 == 0:
        print(f"it {it + 1:4d} loss {sum(window) / len(window):.4f}")
        window.clear()
