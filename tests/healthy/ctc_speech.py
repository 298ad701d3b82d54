"""CTC in fp32 on logits of half precision; alignments that are too long count as zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 6)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)
means = torch.randn(6, 12, device=device) * 2

for step in range(50):
    labels = torch.randint(1, 6, (8, 4), device=device)
    frames = means[labels].repeat_interleave(4, 1) + 0.3 * torch.randn(8, 16, 12, device=device)
    input_lengths = torch.full((8,), 16, dtype=torch.long)
    input_lengths[0] = 3 if step % 5 == 0 else 16  # cut too short for its four labels
    with torch.autocast(device, dtype=torch.float16):
        logits = net(frames)
    logp = logits.float().log_softmax(-1).transpose(0, 1)
    loss = F.ctc_loss(logp, labels, input_lengths, torch.full((8,), 4), zero_infinity=True)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
