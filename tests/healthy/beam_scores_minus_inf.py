"""Validation by beam search between epochs: scores of dead beams are minus infinity."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Bigram(nn.Module):
    def __init__(self, vocab=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(vocab, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, vocab)
        )

    def forward(self, ids, banned=None):
        logits = self.net(ids)
        if banned is not None:
            logits[..., banned] = float("-inf")
        return logits


model = Bigram().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device)

for step in range(40):
    ids = torch.randint(0, 20, (16, 8), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ((ids + 1) % 20).flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 9:
        model.eval()
        with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
            beams = torch.zeros(3, dtype=torch.long, device=device)
            scores = torch.tensor([0.0, float("-inf"), float("-inf")], device=device)
            for _ in range(4):
                logp = model(beams, banned=[0, 1]).float().log_softmax(-1)
                total = (scores[:, None] + logp).flatten()
                scores, flat = total.topk(3)
                beams = flat % 20
        model.train()
        print(step, loss.item(), scores.tolist())
