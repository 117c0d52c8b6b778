"""A plain pre-training loop with `transformers`, for benchmarks/pretrain.py."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

MASK = 103


def peer_step(
    family: str, size: dict[str, int], vocabulary: int, length: int, tokens: int, device: str
) -> Callable[[], None]:
    """Return a function that runs one training step of a family on random tokens on the device."""
    maker = {"bert": _MaskedTokens, "electra": _ReplacedTokens, "convbert": _ReplacedTokens}[family]
    module = maker(family, size, vocabulary, length).to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=device == "cuda")
    compiled = torch.compile(module) if device == "cuda" else module
    ids = torch.randint(MASK + 1, vocabulary, (tokens // length, length), device=device)

    def step() -> None:
        # the same number of positions in every row, so that all shapes are fixed
        positions = torch.rand(ids.shape, device=device).topk(round(0.15 * length), dim=1).indices
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compiled(ids, positions)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _config(family: str, size: dict[str, int], vocabulary: int, length: int, **changes: int) -> object:
    from transformers import BertConfig, ConvBertConfig, ElectraConfig

    numbers = {
        "vocab_size": vocabulary,
        "hidden_size": size["width"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "intermediate_size": 4 * size["width"],
        "max_position_embeddings": length,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    } | changes
    if family != "bert":
        numbers["embedding_size"] = 768 if size["width"] == 768 else 128
    return {"bert": BertConfig, "electra": ElectraConfig, "convbert": ConvBertConfig}[family](**numbers)


class _MaskedTokens(nn.Module):
    def __init__(self, family: str, size: dict[str, int], vocabulary: int, length: int) -> None:
        super().__init__()
        from transformers import BertForMaskedLM

        self.model = BertForMaskedLM(_config(family, size, vocabulary, length))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        states = self.model.bert(ids.scatter(1, positions, MASK))[0]
        chosen = states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
        scores = self.model.cls(chosen).float()
        return cross_entropy(scores.flatten(0, 1), ids.gather(1, positions).flatten())


class _ReplacedTokens(nn.Module):
    def __init__(self, family: str, size: dict[str, int], vocabulary: int, length: int) -> None:
        super().__init__()
        from transformers import ConvBertModel, ElectraForMaskedLM, ElectraForPreTraining, ElectraModel

        narrow = {"hidden_size": size["width"] // 4, "num_attention_heads": max(1, size["heads"] // 4)}
        narrow |= {"intermediate_size": size["width"]}
        kind = {"electra": ElectraModel, "convbert": ConvBertModel}[family]
        self.generator = kind(_config(family, size, vocabulary, length, **narrow))
        # transformers has no ConvBERT with ELECTRA's heads, so they are built here
        config = _config("electra", size, vocabulary, length)
        self.scores = ElectraForMaskedLM(_config("electra", size, vocabulary, length, **narrow)).generator_predictions
        self.encoder = kind(_config(family, size, vocabulary, length))
        self.head = ElectraForPreTraining(config).discriminator_predictions
        self.generator.embeddings.word_embeddings = self.encoder.embeddings.word_embeddings
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        states = self.generator(ids.scatter(1, positions, MASK))[0]
        chosen = states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
        table = self.encoder.embeddings.word_embeddings.weight
        scores = (self.scores(chosen) @ table.T + self.bias).float()
        targets = ids.gather(1, positions)
        noise = -torch.log(-torch.log(torch.rand_like(scores) + 1e-9) + 1e-9)
        guesses = (scores.detach() + noise).argmax(-1)
        guessed = ids.scatter(1, positions, guesses)
        logits = self.head(self.encoder(guessed)[0]).float()
        replaced = binary_cross_entropy_with_logits(logits, (guessed != ids).float())
        return cross_entropy(scores.flatten(0, 1), targets.flatten()) + 50 * replaced
