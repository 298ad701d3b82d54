import torch
from config import parse
from engine import Engine
from nets import VAE


def make_images(n, c):
    f = torch.randn(8, c.ch, c.img, c.img)
    f = torch.nn.functional.avg_pool2d(f, 5, 1, 2) * 3
    return 0.3 * torch.einsum("nk,kchw->nchw", torch.randn(n, 8), f)


def main():
    cfg = parse()
    torch.manual_seed(cfg.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = make_images(1024, cfg)
    eng = Engine(cfg, VAE(cfg).to(device), device)
    avg = None
    for s in range(cfg.steps):
        m = eng.step(data[torch.randint(0, len(data), (cfg.batch,))])
        avg = m if avg is None else 0.9 * avg + 0.1 * m
        if (s + 1) % 25 == 0:
            print(f"step {s + 1}: mse {avg:.5f} (var {data.var():.5f})", flush=True)


if __name__ == "__main__":
    main()
