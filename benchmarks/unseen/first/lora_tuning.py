"""Low rank adaptation of a frozen half precision base model."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        kw = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.empty(rank, base.in_features, **kw))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **kw))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.gain = alpha / rank

    def forward(self, x):
        return self.base(x) + self.gain * F.linear(F.linear(x, self.down), self.up)


class Base(nn.Module):
    def __init__(self, vocab=64, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc1 = nn.Linear(2 * dim, 96)
        self.fc2 = nn.Linear(96, vocab)

    def forward(self, ids):
        return self.fc2(torch.relu(self.fc1(self.emb(ids).flatten(1))))


def attach(model, names):
    for p in model.parameters():
        p.requires_grad_(False)
    for name in names:
        setattr(model, name, LoraLinear(getattr(model, name)))
    return [p for p in model.parameters() if p.requires_grad]


torch.manual_seed(3)
model = Base().half()
params = attach(model, ["fc1", "fc2"])
print("trainable", sum(p.numel() for p in params), "of", sum(p.numel() for p in model.parameters()))
opt = torch.optim.AdamW(params, lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
for step in range(50):
    ids = torch.randint(64, (32, 2))
    target = ids[:, 0]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(ids).float(), target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
