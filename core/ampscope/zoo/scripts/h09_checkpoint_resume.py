"""Train, evaluate after each epoch, checkpoint everything, resume, and train on."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def build(device):
    model = nn.Sequential(
        nn.Linear(14, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    return model, optimizer, scaler


def train_epoch(model, optimizer, scaler, loader, device):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            # the sum over the batch keeps the step size of the original recipe
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item() / len(x)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = total = 0
    for x, y in loader:
        with torch.autocast(device, dtype=torch.float16):
            prediction = model(x.to(device)).argmax(dim=1).cpu()
        hits += (prediction == y).sum().item()
        total += len(y)
    return hits / total


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(800, 14)
    y = x[:, :3].argmax(dim=1)
    train_set, test_set = random_split(TensorDataset(x, y), [640, 160])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        model, optimizer, scaler = build(device)
        for epoch in range(6):
            if epoch == 3:  # the job was moved to another machine here
                model, optimizer, scaler = build(device)
                state = torch.load(path, map_location=device)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                scaler.load_state_dict(state["scaler"])
            loss = train_epoch(model, optimizer, scaler, train_loader, device)
            accuracy = evaluate(model, test_loader, device)
            print(f"epoch {epoch}: loss {loss:.4f} test accuracy {accuracy:.3f}")
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                },
                path,
            )


if __name__ == "__main__":
    main()
