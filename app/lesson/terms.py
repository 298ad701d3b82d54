"""Words of the lessons, explained on hover. A word is used only where it is offered here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TERMS: Final[Mapping[str, str]] = {
    "exponent": "The power of two that a number is multiplied by: 12 is 1.5 × 2^3.",
    "mantissa": "The digits of a number: 12 is 1.5 × 2^3, and 0.5 is stored as its mantissa.",
    "spacing": "The distance from a number to the next one that the format has.",
    "subnormal": "A number below the smallest normal one: it has fewer digits the smaller it is.",
    "underflow": "A number is too small for the format, and becomes zero or subnormal.",
    "overflow": "A number is too large for the format, and becomes infinite.",
    "lost": "Zero in half precision, and not zero in fp32: below the format's range, or cancelled.",
    "gradient": "How much the loss changes with a number; backward computes it for every weight.",
    "loss scale": "A factor on the loss: backward multiplies every gradient by it. The optimizer "
    "divides it out again.",
    "scaler": "The object that keeps the loss scale, undoes it and skips bad steps: GradScaler.",
    "skipped step": "A step whose gradients held Inf or NaN: the weights are left as they were.",
    "autocast": "A region in which the framework chooses the precision of every op by lists.",
    "half precision": "A format of 16 bits: fp16 or bf16.",
    "master weights": "The weights in fp32, which the optimizer changes; half copies are computed "
    "with.",
    "NaN": "Not a number: the result of Inf - Inf, 0 × Inf or 0 / 0.",
    "Inf": "Infinity: what a number too large for its format becomes.",
    "eps": "A small number that an optimizer or a norm adds before it divides.",
    "Tensor Core": "A unit of NVIDIA GPUs that multiplies half matrices and adds up in fp32.",
    "activation": "What a layer puts out in the forward pass and keeps for the backward pass.",
    "throughput": "Samples that are trained with in a second.",
}
