import os
import sys
import yaml
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from data import DepthCounts
from model import PlaneNet

here = os.path.dirname(os.path.abspath(__file__))
device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    cfg = yaml.safe_load(open(os.path.join(here, "config.yaml")))
    torch.manual_seed(0)
    dl = DataLoader(DepthCounts(cfg["data"]["n"], cfg["data"]["size"]), cfg["data"]["batch_size"], shuffle=True)
    net = PlaneNet(cfg["model"]["width"]).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg["optim"]["lr"])
    amp = cfg["amp"]["enabled"]
    dtype = getattr(torch, cfg["amp"]["dtype"])
    scaler = torch.amp.GradScaler(device, enabled=amp and dtype == torch.float16)
    bad = 0
    for ep in range(cfg["optim"]["epochs"]):
        tot, cnt = 0.0, 0
        for x, y in dl:
            x, y = x.to(device), y.to(device)
            with torch.autocast(device, dtype=dtype, enabled=amp):
                loss = F.smooth_l1_loss(net(x), y)
            opt.zero_grad()
            if not torch.isfinite(loss):
                bad += 1
                if bad > cfg["max_bad_steps"]:
                    print("too many bad steps, stopping")
                    sys.exit(1)
                continue
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            tot += loss.item()
            cnt += 1
        print(f"epoch {ep} loss {tot / max(cnt, 1):.4f} used {cnt}/{len(dl)}")


if __name__ == "__main__":
    main()
