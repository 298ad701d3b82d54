"""ViT classifier trained with SGD + momentum, gradient accumulation and clipping."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

torch.set_num_threads(1)
torch.manual_seed(0)
PX, CLASSES, ACCUM = 16, 8, 2


def dataset(n, seed):
    g = torch.Generator().manual_seed(99)
    proto = torch.randn(CLASSES, 3, PX, PX, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    return TensorDataset(proto[y] + 0.8 * torch.randn(n, 3, PX, PX, generator=g), y)


def evaluate(model, loader):
    model.eval()
    hits = n = 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        for x, y in loader:
            hits += (model(pixel_values=x).logits.argmax(-1) == y).sum().item()
            n += len(y)
    model.train()
    return hits / n


def main():
    cfg = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                    image_size=PX, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0)
    model = ViTForImageClassification(cfg)
    train = DataLoader(dataset(512, 1), batch_size=16, shuffle=True)
    val = DataLoader(dataset(96, 2), batch_size=32)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    epochs = 6
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(train) // ACCUM)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(epochs):
        running = 0.0
        for i, (x, y) in enumerate(train):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(pixel_values=x, labels=y).loss / ACCUM
            scaler.scale(loss).backward()
            running += loss.item() * ACCUM
            if (i + 1) % ACCUM == 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)
                sched.step()
        print(f"epoch {epoch} loss {running / len(train):.4f} val acc {evaluate(model, val):.3f}", flush=True)


if __name__ == "__main__":
    main()
