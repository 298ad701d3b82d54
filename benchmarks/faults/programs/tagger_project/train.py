"""Entry point: python train.py"""
import torch

from config import Config
from engine import Engine


def main():
    torch.set_num_threads(1)
    cfg = Config()
    engine = Engine(cfg)
    for _ in range(cfg.epochs):
        engine.train_one_epoch()
    engine.save("tagger.pt")
    print(f"validation loss={engine.validate():.4f}")


if __name__ == "__main__":
    main()
