"""An embedding and the rest have an optimizer each; one clip over both, and a search from 2^32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

table = nn.Embedding(400, 24).to(device)
head = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizers = [
    torch.optim.Adagrad(table.parameters(), lr=0.1),
    torch.optim.AdamW(head.parameters(), lr=3e-3),
]
scaler = torch.amp.GradScaler(device, init_scale=2.0**32)
words = torch.randint(0, 60, (600, 5), device=device)  # most rows of the table are never used
target = (words.sum(1) % 4).to(device)
parameters = [*table.parameters(), *head.parameters()]

for step in range(80):
    chosen = torch.randint(0, 600, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(head(table(words[chosen]).mean(1)), target[chosen])
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, 5.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
