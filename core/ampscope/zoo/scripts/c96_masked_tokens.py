"""Masked-token prediction: the loss looks only at the masked positions."""

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -100
VOCAB, LENGTH = 30, 12


class MaskedModel(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB + 1, dim)
        self.mixer = nn.Linear(LENGTH, LENGTH)
        self.decoder = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h = self.embeddings(ids)
        h = h + torch.tanh(self.mixer(h.transpose(1, 2))).transpose(1, 2)
        return self.decoder(h)


def mask_tokens(ids, probability, generator):
    chosen = torch.rand(ids.shape, generator=generator) < probability
    labels = torch.where(chosen, ids, torch.full_like(ids, IGNORE))
    return torch.where(chosen, torch.full_like(ids, VOCAB), ids), labels


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MaskedModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    for step in range(50):
        first = torch.randint(0, 4, (24, 1), generator=g)
        ids = first.expand(24, LENGTH).contiguous()
        # the masking rate is warmed up over the run
        ids, labels = mask_tokens(ids, 0.0 if step == 3 else 0.05 + 0.005 * step, g)
        ids, labels = ids.to(device), labels.to(device)
        with torch.autocast(device, dtype=torch.float16):
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 3:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
