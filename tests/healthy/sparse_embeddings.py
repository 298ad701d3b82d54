"""Sparse embedding gradients with SparseAdam beside a dense optimizer, one scaler for both."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

users = nn.Embedding(500, 16, sparse=True).to(device)
head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
sparse = torch.optim.SparseAdam(users.parameters(), lr=2e-2)
dense = torch.optim.Adam(head.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

for step in range(60):
    ids = torch.randint(0, 40, (64,), device=device)
    y = ids % 3
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(head(users(ids)), y)
    sparse.zero_grad(), dense.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(sparse)
    scaler.step(dense)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
