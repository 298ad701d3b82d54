"""Language-model style training with gradient accumulation and clipping."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class CountingText(Dataset):
    """Sequences that count upwards by a fixed stride, modulo the vocabulary."""

    def __init__(self, n=512, length=10, vocab=24):
        g = torch.Generator().manual_seed(0)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        stride = torch.randint(1, 4, (n, 1), generator=g)
        self.ids = (start + stride * torch.arange(length)) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


class RecurrentLM(nn.Module):
    """A hand-written gated cell, unrolled over the sequence."""

    def __init__(self, vocab=24, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gate = nn.Linear(2 * dim, dim)
        self.candidate = nn.Linear(2 * dim, dim)
        self.decode = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = torch.zeros(ids.size(0), self.embed.embedding_dim, device=ids.device)
        outputs = []
        for x in self.embed(ids).unbind(dim=1):
            both = torch.cat([x, h], dim=-1)
            z = torch.sigmoid(self.gate(both))
            h = (1 - z) * h + z * torch.tanh(self.candidate(both))
            outputs.append(self.decode(h))
        return torch.stack(outputs, dim=1)


def main(accumulate=4, epochs=3):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(CountingText(), batch_size=8, shuffle=True, drop_last=True)
    model = RecurrentLM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    optimizer.zero_grad(set_to_none=True)
    for epoch in range(epochs):
        running = 0.0
        for i, ids in enumerate(loader, start=1):
            ids = ids.to(device)
            with torch.autocast(device_type=device, dtype=torch.float16):
                logits = model(ids[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            scaler.scale(loss / accumulate).backward()
            running += loss.item()
            if i % accumulate == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
        print(f"epoch {epoch}: loss {running / len(loader):.4f}")


if __name__ == "__main__":
    main()
