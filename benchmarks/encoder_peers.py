"""Encoders of other installed libraries for benchmarks/encoder.py, in the sizes of ours."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.models.config import ModelConfig
from encoder_candidates import Candidate, Work, config_of


@dataclass(frozen=True)
class Peer:
    """A library with encoders of some families."""

    package: str
    families: tuple[str, ...]
    training: Callable[[ModelConfig, Work, str], nn.Module]
    inference: Callable[[ModelConfig, Work, str], nn.Module] | None = None
    can_compile: bool = True
    mask: str = "attention_mask"
    """Name of the forward argument for the mask of real tokens."""


def peers(
    family: str, size: str, device: str, *, is_compiled: bool, modes: list[str]
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates of every installed library, and the names of missing ones."""
    candidates, missing = [], []
    for name, peer in PEERS.items():
        if family not in peer.families:
            continue
        if importlib.util.find_spec(peer.package) is None:
            missing.append(name)
            continue
        for mode in modes:
            if mode == "eager" or (is_compiled and peer.can_compile):
                training = partial(_make, peer.training, family, size, device)
                inference = None if peer.inference is None else partial(_make, peer.inference, family, size, device)
                candidates.append(Candidate(family, name, "", mode, training, partial(_inputs, peer.mask), inference))
    return candidates, missing


def add_site() -> None:
    """Add the folder named by PEERS_SITE to the import path."""
    site = os.environ.get("PEERS_SITE")
    if site:
        sys.path.insert(0, site)


def _make(
    make: Callable[[ModelConfig, Work, str], nn.Module], family: str, size: str, device: str, work: Work
) -> nn.Module:
    return make(config_of(family, size, work.max_length), work, device)


def _inputs(mask: str, work: Work) -> tuple[tuple[Any, ...], dict[str, Any]]:
    masks = {} if work.is_token is None else {mask: work.is_token if mask == "mask" else work.is_token.long()}
    return (work.ids,), masks


def _transformers(config: ModelConfig, work: Work, device: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    with torch.device(device):
        module = transformers.AutoModel.from_config(_their_config(config))
    return module.to(device).float().train()


def _their_config(config: ModelConfig) -> Any:
    from transformers import AutoConfig

    adapters = {adapter.family: adapter for adapter in ADAPTERS.values()}
    return AutoConfig.for_model(**adapters[config.family].write_config(config))


def _flashdeberta(config: ModelConfig, work: Work, device: str) -> nn.Module:
    from flashdeberta import FlashDebertaV2Model

    with torch.device(device):
        module = FlashDebertaV2Model(_their_config(config))
    return module.to(device).train()


def _disentangled_training(config: ModelConfig, work: Work, device: str) -> nn.Module:
    from disentangled_flash import optimize_deberta_training

    module = _transformers(config, work, device)
    optimize_deberta_training(module, backend="triton")
    return module


def _disentangled_inference(config: ModelConfig, work: Work, device: str) -> nn.Module:
    from disentangled_flash import optimize_deberta

    module = _transformers(config, work, device).eval().to(torch.bfloat16)
    optimize_deberta(module, sequence_lengths=[work.max_length])
    return module


def _performer(config: ModelConfig, work: Work, device: str) -> nn.Module:
    return _PerformerEncoder(config).to(device).train()


class _PerformerEncoder(nn.Module):
    """Token embeddings and the layers of performer-pytorch, with as many random features as ours."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from performer_pytorch import Performer

        encoder, mixer = config.encoder, config.encoder.layers[0].mixer
        self.tokens = nn.Embedding(encoder.vocabulary, encoder.width)
        self.layers = Performer(
            dim=encoder.width,
            depth=len(encoder.layers),
            heads=mixer.heads,
            dim_head=encoder.width // mixer.heads,
            causal=False,
            nb_features=mixer.features,
            ff_mult=4,
        )

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layers(self.tokens(ids), **({} if mask is None else {"mask": mask}))


PEERS = {
    "transformers": Peer(
        "transformers", ("bert", "electra", "modern", "deberta", "deberta-v3", "convbert"), _transformers
    ),
    "flashdeberta": Peer("flashdeberta", ("deberta-v3",), _flashdeberta, can_compile=False),
    "disentangled-flash": Peer(
        "disentangled_flash", ("deberta-v3",), _disentangled_training, _disentangled_inference, can_compile=False
    ),
    "performer-pytorch": Peer("performer_pytorch", ("performer",), _performer, mask="mask"),
}
