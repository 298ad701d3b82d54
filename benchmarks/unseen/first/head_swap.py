"""Fine-tune only a new classification head on a pretrained body."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Classifier(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.fc = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.fc(self.body(x))


def prepare(pretrained, lr):
    model = copy.deepcopy(pretrained)
    for p in model.body.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(model.fc.parameters(), lr=lr)
    model.fc = nn.Linear(model.fc.in_features, 3)
    return model, optimizer


def train(model, optimizer, steps=60):
    scaler = torch.amp.GradScaler("cpu")
    w = torch.randn(20, 3)
    for step in range(steps):
        x = torch.randn(32, 20)
        y = (x @ w).argmax(1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(55)
    train(*prepare(Classifier(10), lr=1e-2))
