"""Instruction tuning: most labels are -100, and now and then a micro-batch has no label at all."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

vocab = 50
model = nn.Sequential(
    nn.Embedding(vocab, 32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, vocab)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)
accumulate = 4

for step in range(30):
    optimizer.zero_grad()
    batches = []
    for micro in range(accumulate):
        ids = torch.randint(0, vocab, (4, 16), device=device)
        labels = (ids * 3 + 1) % vocab
        labels[:, :12] = -100
        if (step + micro) % 9 == 0:
            labels[:] = -100
        batches.append((ids, labels))
    tokens = sum((labels != -100).sum() for _, labels in batches)
    total = 0.0
    for ids, labels in batches:
        with torch.autocast(device, dtype=torch.float16):
            logits = model(ids)
            loss = (
                F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
                )
                / tokens
            )
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(step, total)
