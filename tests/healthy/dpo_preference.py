"""DPO against a frozen reference model: log-probabilities are summed over the answer."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

vocab = 30
policy = nn.Sequential(
    nn.Embedding(vocab, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, vocab)
).to(device)
reference = copy.deepcopy(policy).requires_grad_(False).eval()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)


def logps(model, ids):
    logits = model(ids[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


for step in range(40):
    start = torch.randint(0, vocab, (16, 1), device=device)
    chosen = (start + torch.arange(12, device=device)) % vocab
    rejected = torch.randint(0, vocab, (16, 12), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.no_grad():
            ref = logps(reference, chosen) - logps(reference, rejected)
        own = logps(policy, chosen) - logps(policy, rejected)
    loss = -F.logsigmoid(0.1 * (own - ref)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
