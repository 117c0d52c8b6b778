"""The encoder-decoder against transformers' Marian, in float64, on tiny random models."""

from pathlib import Path

import pytest
import torch
from theirs import VOCABULARY, assert_gradients_equal, batch, make, ours, there_and_back
from transformers import MarianMTModel

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.layers.context import Memory
from bertsmith.models.seq2seq import GenerationConfig

PAD, END = VOCABULARY - 1, 0
TINY = {
    "vocab_size": VOCABULARY,
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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [{}, {"scale_embedding": True, "activation_function": "swish"}, {"activation_function": "relu", "d_model": 12}],
)
def test_logits_and_gradients_equal_theirs(seed: int, changes: dict, tmp_path: Path) -> None:
    theirs = make(MarianMTModel, seed, TINY | changes)
    theirs.final_logits_bias.requires_grad_()  # a buffer in their model
    model = ours(theirs, tmp_path)
    source, target = batch([7, 3, 5], 7, pad=PAD), batch([4, 8, 2], 8, pad=PAD)
    ids, mask = source["input_ids"], source["attention_mask"]
    layout = SequenceLayout.padded(target["attention_mask"].bool())
    expected = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=target["input_ids"]).logits
    memory = Memory(model(ids, mask), SequenceLayout.padded(mask.bool()))
    scores, real = model.scores(model.decode(target["input_ids"], layout, memory)), layout.is_token
    torch.testing.assert_close(scores[real], expected[real], rtol=0, atol=1e-10)
    labels = torch.randint(0, VOCABULARY, (int(real.sum()),))
    for values in (scores, expected):
        torch.nn.functional.cross_entropy(values[real], labels).backward()
    assert_gradients_equal(model, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_survive_import_and_export(dtype: torch.dtype, tmp_path: Path) -> None:
    there_and_back(make(MarianMTModel, 3, TINY), dtype, tmp_path)


@pytest.mark.parametrize("seed", [4, 5])
def test_greedy_decoding_equals_theirs(seed: int, tmp_path: Path) -> None:
    theirs = make(MarianMTModel, seed, TINY | {"max_position_embeddings": 64})
    model, inputs = ours(theirs, tmp_path), batch([7, 3, 5], 7, pad=PAD)
    source, mask = inputs["input_ids"], inputs["attention_mask"]
    written = model.generate(source, mask, GenerationConfig(method="greedy", extra_length=20), start=PAD, end=END)
    expected = theirs.generate(
        input_ids=source, attention_mask=mask, num_beams=1, do_sample=False, max_length=24, min_length=0
    )
    for mine, row in zip(written, expected.tolist(), strict=True):
        reference = row[1:]
        reference = reference[: reference.index(END)] if END in reference else reference
        assert mine[:23] == reference[:23]


def test_model_without_counterpart_is_not_exported(tmp_path: Path) -> None:
    model = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=30))
    with pytest.raises(bertsmith.InputError, match=r"encoder\.embedding\.positions is 'sinusoid'"):
        bertsmith.export(model, tmp_path / "hf", native="always")
    halves = bertsmith.build(bertsmith.preset("transformer-tiny", vocabulary=30, positions="sinusoid_halves"))
    bertsmith.export(halves, tmp_path / "hf")
    assert MarianMTModel.from_pretrained(tmp_path / "hf").config.d_model == 128
