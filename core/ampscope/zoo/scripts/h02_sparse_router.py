"""Bag-of-words classifier with padding, rare words, silent units and an unused branch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, VOCAB = 0, 400


class BagClassifier(nn.Module):
    def __init__(self, dim=32, hidden=64):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.hidden = nn.Linear(dim, hidden)
        self.auxiliary = nn.Linear(dim, 3)  # used in pretraining only
        self.out = nn.Linear(hidden, 3)
        with torch.no_grad():
            self.hidden.bias[: hidden // 2] = -40.0

    def forward(self, ids, with_auxiliary=False):
        present = (ids != PAD).unsqueeze(-1)
        pooled = (self.words(ids) * present).sum(1) / present.sum(1).clamp(min=1)
        if with_auxiliary:
            return self.auxiliary(pooled)
        return self.out(F.relu(self.hidden(pooled)))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = BagClassifier().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler(device)

for step in range(60):
    lengths = torch.randint(3, 12, (32,))
    ids = torch.randint(1, 30, (32, 12))  # only the frequent words occur here
    ids[torch.arange(12) >= lengths[:, None]] = PAD
    # words come in three topics; the label is the topic seen most often
    topics = F.one_hot(ids % 3, 3) * (ids != PAD)[..., None]
    labels = topics.sum(dim=1).argmax(dim=1)
    ids, labels = ids.to(device), labels.to(device)
    with torch.autocast(device, torch.float16):
        loss = F.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"{step:3d} {loss.item():.4f}")
