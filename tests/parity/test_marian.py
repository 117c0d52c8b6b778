"""The encoder-decoder against transformers' Marian, in float64, on tiny random models."""

from pathlib import Path

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.checkpoint.hf import twin_of
from bertsmith.checkpoint.names import to_theirs
from bertsmith.layers.call import Memory
from bertsmith.models.decoding import GenerationConfig
from bertsmith.models.seq2seq import Seq2Seq

PAD, END = 46, 0
TINY = {
    "vocab_size": 47,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "init_std": 0.3,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
}


def make(seed: int, **changes: object) -> MarianMTModel:
    torch.manual_seed(seed)
    model = MarianMTModel(MarianConfig(**{**TINY, **changes})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.final_logits_bias.normal_()
    return model


def ours(theirs: MarianMTModel, folder: Path) -> Seq2Seq:
    theirs.save_pretrained(folder)
    model = bertsmith.load(folder)
    assert isinstance(model, Seq2Seq)
    return model


def batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.where(mask.bool(), torch.randint(1, PAD, mask.shape), PAD), mask


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [{}, {"scale_embedding": True, "activation_function": "swish"}, {"activation_function": "relu", "d_model": 12}],
)
def test_scores_and_every_gradient(seed: int, changes: dict, tmp_path: Path) -> None:
    theirs = make(seed, **changes)
    model = ours(theirs, tmp_path)
    source, mask = batch([7, 3, 5])
    target, target_mask = batch([4, 8, 2])
    real = target_mask.bool()
    expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    memory = Memory(model(source, mask), SequenceLayout.padded(mask.bool()))
    scores = model.scores(model.decode(target, SequenceLayout.padded(real), memory))
    torch.testing.assert_close(scores[real], expected[real], rtol=0, atol=1e-8)
    labels = torch.randint(0, 47, (int(real.sum()),))
    for values in (scores, expected):
        torch.nn.functional.cross_entropy(values[real], labels).backward()
    rows = twin_of(model).rows(model.config, frozenset({"heads.next_token"}))
    mine = to_theirs(rows, {name: parameter.grad for name, parameter in model.named_parameters()})
    mine.pop("final_logits_bias")  # a buffer there
    reference = {name: parameter.grad for name, parameter in theirs.named_parameters() if name in mine}
    assert reference.keys() == mine.keys()
    for name, gradient in reference.items():
        if name == "model.shared.weight":  # the row of the pad has no gradient from look-ups there
            gradient[PAD], mine[name][PAD] = 0, 0
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_there_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(3).to(dtype)
    model = ours(theirs, tmp_path / "theirs")
    bertsmith.save(model, tmp_path / "ours")
    bertsmith.export(bertsmith.load(tmp_path / "ours"), tmp_path / "back")
    back = MarianMTModel.from_pretrained(tmp_path / "back", dtype=dtype).state_dict()
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("seed", [4, 5])
def test_greedy_writes_what_theirs_writes(seed: int, tmp_path: Path) -> None:
    theirs = make(seed, max_position_embeddings=64)
    model = ours(theirs, tmp_path)
    source, mask = batch([7, 3, 5])
    written = model.generate(source, mask, GenerationConfig(method="greedy", extra_length=20), start=PAD, end=END)
    expected = theirs.generate(
        input_ids=source, attention_mask=mask, num_beams=1, do_sample=False, max_length=24, min_length=0
    )
    for mine, row in zip(written, expected.tolist(), strict=True):
        reference = row[1:]
        reference = reference[: reference.index(END)] if END in reference else reference
        assert mine[:23] == reference[:23]


def test_what_marian_cannot_be_is_refused(tmp_path: Path) -> None:
    model = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=30))
    with pytest.raises(bertsmith.InputError, match=r"encoder\.embedding\.positions is 'sinusoid'"):
        bertsmith.export(model, tmp_path / "hf")
    halves = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=30, positions="sinusoid_halves"))
    bertsmith.export(halves, tmp_path / "hf")
    assert MarianMTModel.from_pretrained(tmp_path / "hf").config.d_model == 128
