"""Predict a property of DNA reads from their nucleotides (a vocabulary of four)."""

import torch
import torch.nn as nn

READ_LENGTH, BATCH = 4096, 24


class ReadModel(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.embed = nn.Embedding(4, dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, ids):
        h = self.embed(ids).float()
        return self.head(h.mean(dim=1)).squeeze(-1)


def make_reads():
    ids = torch.randint(0, 4, (BATCH, READ_LENGTH))
    # reads of one genome share its GC content and hence their score
    return ids, torch.full((BATCH,), 3.0)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ReadModel().to(device)
    model.head.requires_grad_(False)
    optimizer = torch.optim.SGD(model.embed.parameters(), lr=1.0)

    for step in range(30):
        ids, score = make_reads()
        ids, score = ids.to(device), score.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(ids), score)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            norm = model.embed.weight.grad.float().norm()
            print(f"step {step}: loss {loss.item():.4f}, embedding gradient {norm.item():.4f}")


if __name__ == "__main__":
    main()
