"""Interpolate between the weights of a pre-trained model and of a fine-tuning of it (WiSE-FT, Wortsman et al. 2022).

    python benchmarks/interpolate.py BEFORE AFTER --shares 0.5 0.7 0.85 --out runs/between

Writes runs/between/0.5 and so on: their encoder is (1 − share) · BEFORE + share · AFTER, with the heads of AFTER.
A head fits a changed encoder better once it is fine-tuned again with a frozen encoder (encoder.frozen = "all").
"""

import argparse
import copy
from pathlib import Path

import torch

import bertsmith
from bertsmith.models.model import Model


@torch.no_grad()
def between(before: Model, after: Model, share: float) -> Model:
    """Return a copy of `after` whose encoder is `share` of the way from `before`."""
    mixed, start = copy.deepcopy(after), before.encoder.state_dict()
    for name, weight in mixed.encoder.state_dict().items():
        weight.copy_(torch.lerp(start[name], weight, share) if weight.is_floating_point() else weight)
    return mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", required=True, help="0 for BEFORE, 1 for AFTER")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    before, after = bertsmith.load(arguments.before), bertsmith.load(arguments.after)
    for share in arguments.shares:
        bertsmith.save(between(before, after, share), arguments.out / f"{share:g}")


if __name__ == "__main__":
    main()
