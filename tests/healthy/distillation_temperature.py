"""Distillation from a frozen teacher in half precision: KL at temperature 4, times 16."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

teacher = (
    nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    .to(device)
    .half()
    .eval()
    .requires_grad_(False)
)
student = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device)
T = 4.0

for step in range(60):
    x = 3 * torch.randn(64, 20, device=device)
    with torch.no_grad():
        target = (teacher(x.half()) * 3).float()
    with torch.autocast(device, dtype=torch.float16):
        out = student(x)
    soft = F.kl_div(
        (out.float() / T).log_softmax(-1), (target / T).softmax(-1), reduction="batchmean"
    )
    loss = T * T * soft + F.cross_entropy(out.float(), target.argmax(1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
