"""Train a classifier on image features; a few batches hold augmented, very bright images."""

import torch
import torch.nn as nn


class Classifier(nn.Module):
    def __init__(self, n_in=32, n_classes=5):
        super().__init__()
        self.stem = nn.Linear(n_in, 64)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.fc = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)))


def loader(steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(32, 5, generator=g)
    for step in range(steps):
        x = torch.randn(64, 32, generator=g)
        y = (x @ teacher).argmax(dim=1)
        if step % 20 == 15:
            x = x * 12.0  # brightness augmentation
        yield x, y


def train_one_epoch(model, optimizer, scaler, device, use_amp=True):
    criterion = nn.CrossEntropyLoss().to(device)
    for step, (images, target) in enumerate(loader(50)):
        images, target = images.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=use_amp):
            output = model(images)
            loss = criterion(output, target)
        if use_amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if step % 5 == 0:
            print(f"step {step:2d} loss {loss.item():.4f}")


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    train_one_epoch(model, optimizer, scaler, device)


if __name__ == "__main__":
    main()
