"""Add a class to a trained classifier and go on training."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Classifier(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU())
        self.classifier = nn.Linear(48, n_classes)

    def forward(self, x):
        return self.classifier(self.encoder(x))


def add_class(layer, siblings):
    """Return a layer with one more output row, drawn like the rows of its sibling classes."""
    rows = layer.weight.data[siblings]
    new_row = rows.mean(dim=0) + rows.std(dim=0) * torch.randn(layer.in_features)
    bigger = nn.Linear(layer.in_features, layer.out_features + 1)
    bigger.weight.data = torch.cat([layer.weight.data, new_row[None]])
    bigger.bias.data = torch.cat([layer.bias.data, torch.zeros(1)])
    return bigger


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier(n_classes=3)
    model.classifier = add_class(model.classifier, siblings=[2])
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device)
    for step in range(50):
        x = torch.randn(64, 16)
        y = x[:, :4].argmax(dim=1)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
