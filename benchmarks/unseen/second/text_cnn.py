import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM = 300, 32


def pretrained_vectors():
    g = torch.Generator().manual_seed(42)
    v = torch.randn(VOCAB, DIM, generator=g)
    v[0] = 0.0
    return v / v.norm(dim=1, keepdim=True)


class TextCNN(nn.Module):
    def __init__(self, classes=4, ch=24):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(pretrained_vectors(), freeze=False)
        self.convs = nn.ModuleList(nn.Conv1d(DIM, ch, k) for k in (2, 3))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(2 * ch, classes)

    def forward(self, ids):
        e = self.embed(ids).transpose(1, 2)
        h = torch.cat([F.relu(c(e)).amax(-1) for c in self.convs], 1)
        return self.head(self.drop(h))


def reviews(n, short, topic):
    y = torch.randint(4, (n,))
    ids = 1 + torch.multinomial(topic[y], 24, replacement=True)
    if short:
        length = torch.randint(10, 25, (n, 1))
        ids = ids * (torch.arange(24) < length)
    return ids, y


def main():
    torch.manual_seed(0)
    topic = torch.softmax(1.5 * torch.randn(4, VOCAB - 1), -1)
    model = TextCNN()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(100):
        ids, y = reviews(64, step >= 40, topic)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
