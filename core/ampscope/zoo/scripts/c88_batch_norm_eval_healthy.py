"""Train a tabular classifier with batch normalisation, then evaluate it."""

import torch
import torch.nn as nn


class TabularNet(nn.Module):
    def __init__(self, n_in=16, n_classes=3):
        super().__init__()
        self.fc1 = nn.Linear(n_in, 64)
        nn.init.kaiming_normal_(self.fc1.weight)
        self.bn = nn.BatchNorm1d(64)
        self.fc2 = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.fc2(torch.relu(self.bn(self.fc1(x))))


def batches(n, seed):
    g = torch.Generator().manual_seed(seed)
    for i in range(n):
        x = 300.0 * torch.randn(64, 16, generator=g)
        y = x[:, :3].argmax(dim=1)
        if i == 5:
            x = x * 1.5  # one export of the table came in other units
        yield x, y


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TabularNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)

    model.train()
    for step, (x, y) in enumerate(batches(90, seed=1)):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"train step {step}: loss {loss.item():.4f}")

    model.eval()
    total, correct, count = 0.0, 0, 0
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        for x, y in batches(5, seed=2):
            x, y = x.to(device), y.to(device)
            out = model(x)
            total += criterion(out, y).item()
            correct += (out.argmax(1) == y).sum().item()
            count += len(y)
    print(f"eval loss {total / 5:.4f} accuracy {correct / count:.3f}")


if __name__ == "__main__":
    main()
