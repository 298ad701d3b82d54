from dataclasses import dataclass, fields
import argparse


@dataclass
class Cfg:
    img: int = 32
    ch: int = 3
    latent: int = 24
    batch: int = 64
    steps: int = 150
    lr: float = 2e-3
    beta: float = 1e-4
    rec_w: float = 0.003
    precision: str = "float16"
    seed: int = 0


def parse():
    ap = argparse.ArgumentParser()
    for f in fields(Cfg):
        ap.add_argument("--" + f.name, type=type(f.default), default=f.default)
    return Cfg(**vars(ap.parse_args()))
