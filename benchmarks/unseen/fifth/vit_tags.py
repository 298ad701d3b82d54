"""Multi-label tagging with ViT and a class-weighted loss."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTModel, get_cosine_schedule_with_warmup

torch.set_num_threads(1)
torch.manual_seed(4)
PX, TAGS = 16, 12


def make_data(n, seed):
    g = torch.Generator().manual_seed(77)
    proto = 1.2 * torch.randn(TAGS, 3, PX, PX, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, TAGS, generator=g) < 0.2).float()
    x = torch.einsum("nt,tchw->nchw", y, proto) + 0.3 * torch.randn(n, 3, PX, PX, generator=g)
    return TensorDataset(x, y)


class WeightedBCE(nn.Module):
    """Rare tags count more."""

    def __init__(self, pos_weight):
        super().__init__()
        self.pos_weight = pos_weight

    def forward(self, logits, targets):
        p = torch.sigmoid(logits)
        ll = self.pos_weight * targets * torch.log(p) + (1 - targets) * torch.log(1 - p)
        return -ll.mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                        image_size=PX, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.backbone = ViTModel(cfg, add_pooling_layer=False)
        self.head = nn.Linear(48, TAGS)
        nn.init.constant_(self.head.bias, -1.4)

    def forward(self, x):
        return self.head(self.backbone(pixel_values=x).last_hidden_state[:, 0])


def main():
    model = Tagger()
    criterion = WeightedBCE(pos_weight=4.0)
    loader = DataLoader(make_data(512, 1), batch_size=32, shuffle=True)
    opt = torch.optim.AdamW([
        {"params": model.backbone.parameters(), "lr": 2e-3},
        {"params": model.head.parameters(), "lr": 2e-2},
    ], weight_decay=0.0)
    epochs = 9
    sched = get_cosine_schedule_with_warmup(opt, 16, epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f} scale {scaler.get_scale():g}", flush=True)


if __name__ == "__main__":
    main()
