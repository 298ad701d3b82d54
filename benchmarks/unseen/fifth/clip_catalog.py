"""Contrastive training on a product catalogue: CLIP towers, captions against image + attribute embeddings."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModel

torch.set_num_threads(1)
torch.manual_seed(21)
KINDS, PX, VOCAB, LEN = 24, 16, 64, 8


class Catalogue(Dataset):
    """Some products come without a photo; has_image is 0 for them."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(8)
        proto = torch.randn(KINDS, 3, PX, PX, generator=g)
        self.kind = torch.randint(0, KINDS, (n,), generator=g)
        self.images = proto[self.kind] + 0.3 * torch.randn(n, 3, PX, PX, generator=g)
        self.has_image = (torch.rand(n, generator=g) > 0.12).float()
        ids = torch.randint(30, VOCAB - 1, (n, LEN), generator=g)
        ids[:, 2] = 2 + self.kind
        ids[:, -1] = VOCAB - 1
        self.ids = ids

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.images[i], self.has_image[i], self.ids[i], self.kind[i]


class DualEncoder(nn.Module):
    def __init__(self, dim=32, eps=1e-8):
        super().__init__()
        vc = CLIPVisionConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                              image_size=PX, patch_size=4)
        tc = CLIPTextConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                            num_attention_heads=4, max_position_embeddings=LEN, eos_token_id=VOCAB - 1,
                            bos_token_id=0, pad_token_id=1)
        self.vision = CLIPVisionModel(vc)
        self.text = CLIPTextModel(tc)
        self.image_proj = nn.Linear(48, dim, bias=False)
        self.text_proj = nn.Linear(48, dim, bias=False)
        self.log_temp = nn.Parameter(torch.tensor(2.3))
        self.eps = eps

    def unit(self, x):
        return x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps)

    def forward(self, images, has_image, ids):
        v = self.image_proj(self.vision(pixel_values=images).pooler_output)
        v = v * has_image.to(v.dtype).unsqueeze(-1)
        t = self.text_proj(self.text(input_ids=ids).pooler_output)
        return self.unit(v), self.unit(t)


def contrastive(v, t, scale, keep, kind):
    sim = scale * v @ t.t()
    same = kind[:, None] == kind[None, :]
    target = (same / same.sum(1, keepdim=True)).to(sim.dtype)
    a = -(target * F.log_softmax(sim.float(), dim=1)).sum(1)
    b = -(target * F.log_softmax(sim.float().t(), dim=1)).sum(1)
    return ((a + b) * 0.5 * keep).sum() / keep.sum()


def main():
    model = DualEncoder()
    loader = DataLoader(Catalogue(480), batch_size=24, shuffle=True, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    epochs = 5
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    step = 0
    for epoch in range(epochs):
        for images, has_image, ids, kind in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                v, t = model(images, has_image, ids)
                loss = contrastive(v, t, model.log_temp.exp(), has_image, kind)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
            with torch.no_grad():
                model.log_temp.clamp_(0, 4.6)
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f} temp {model.log_temp.exp().item():.2f}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
