import json
import pathlib
import torch
import torch.nn.functional as F
from model import Tagger

cfg = json.loads((pathlib.Path(__file__).parent / "conf.json").read_text())
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(11)


def get_batch():
    B, T = cfg["batch"], cfg["max_len"]
    ids = torch.randint(1, cfg["vocab"], (B, T))
    tags = (ids + ids.roll(1, 1) * (torch.arange(T) > 0)) % cfg["n_tags"]
    n = torch.randint(6, T + 1, (B,))
    pad = torch.arange(T)[None] >= n[:, None]
    ids[pad] = 0
    tags[pad] = -100
    return ids.to(device), tags.to(device)


model = Tagger(cfg["vocab"], cfg["dim"], cfg["hid"], cfg["depth"], cfg["n_tags"], cfg["norm_eps"]).to(device)
opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
use = cfg["precision"] == "fp16"
scaler = torch.amp.GradScaler(device, enabled=use)
for it in range(cfg["steps"]):
    ids, tags = get_batch()
    with torch.autocast(device, dtype=torch.float16, enabled=use):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tags.flatten(), ignore_index=-100)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if (it + 1) % 25 == 0:
        ok = tags >= 0
        acc = (logits.argmax(-1)[ok] == tags[ok]).float().mean()
        print(f"it {it + 1} loss {loss.item():.4f} acc {acc:.3f}")
