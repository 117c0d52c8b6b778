"""The enhanced mask decoder against a plain transcription of the official formula."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, linear, pad

import bertsmith
from bertsmith import SequenceLayout, Subnet
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.models.build import rebuild
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model

SIZE = {"width": 12, "layers": 3, "heads": 2, "vocabulary": 40, "max_length": 16, "span": 5, "init_std": 0.4}
PRESETS = {
    "v1": ("deberta-base", {}),
    "v2": ("deberta-v2-xlarge", {"max_distance": 9}),
    "v2 pre-norm": ("deberta-v2-xlarge", {"max_distance": 9, "placement": "pre"}),
}
LENGTHS = [9, 1, 12, 4]


def make(name: str, **changes: object) -> Model:
    preset, extra = PRESETS[name]
    model = bertsmith.build(bertsmith.preset(preset, **{**SIZE, **extra, **changes}), seed=2).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def norm(part: torch.nn.Module, hidden: Tensor) -> Tensor:
    return layer_norm(hidden, hidden.shape[-1:], part.weight, part.bias, 1e-7)


def plain_layer(
    block: Block, states: Tensor, query_states: Tensor, vectors: Tensor, slots: Tensor, *, is_causal: bool
) -> Tensor:
    """Apply one layer to one sequence (length, width) as the official code does: the residual is on the queries.

    In a pre-norm layer queries, keys and values are computed from normalised hidden states.
    """
    mixer, d, residual = block.mixer, block.mixer.head_width, query_states
    if block.is_pre_norm:
        states, query_states = (norm(block.mixer_norm, hidden) for hidden in (states, query_states))
    weights, biases = mixer.project.prefix(None, None)
    (wq, wk, wv), (bq, bk, bv) = weights.chunk(3), biases.chunk(3)
    query, key, value = linear(query_states, wq, bq), linear(states, wk, bk), linear(states, wv, bv)
    if mixer.position_key is None:
        position_key, position_query = linear(vectors, wk, bk), linear(vectors, wq, bq)
    else:
        position_key = linear(vectors, mixer.position_key.weight)
        position_query = linear(vectors, mixer.position_query.weight, mixer.position_query.bias)
    position, reach = torch.arange(len(states)), len(slots) // 2
    row = slots[(position[:, None] - position).clamp(-reach, reach) + reach]
    mixed = []
    for head in range(mixer.heads):
        q, k, v, pk, pq = (t[:, head * d : head * d + d] for t in (query, key, value, position_key, position_query))
        scores = (q @ k.T + (q @ pk.T).gather(1, row) + (k @ pq.T).gather(1, row.T).T) / math.sqrt(3 * d)
        if is_causal:
            scores = scores.masked_fill(position[:, None] < position, -torch.inf)
        mixed.append(scores.softmax(-1) @ v)
    mixed = linear(torch.cat(mixed, -1), mixer.output.weight, mixer.output.bias)
    hidden = residual + mixed if block.is_pre_norm else norm(block.mixer_norm, residual + mixed)
    expand, contract = block.feedforward.expand, block.feedforward.contract
    entering = norm(block.feedforward_norm, hidden) if block.is_pre_norm else hidden
    inner = linear(gelu(linear(entering, expand.weight, expand.bias)), contract.weight, contract.bias)
    return hidden + inner if block.is_pre_norm else norm(block.feedforward_norm, hidden + inner)


def official(model: Model, tokens: Tensor, *, is_causal: bool = False) -> Tensor:
    """Return the decoder's hidden states of one sequence: z = H + P; twice z = last layer(H, queries z)."""
    encoder = model.encoder
    vectors = (
        encoder.relative.table if encoder.relative.norm is None else norm(encoder.relative.norm, encoder.relative.table)
    )
    hidden = norm(encoder.embedding.norm, encoder.embedding.token_table[tokens])
    for block in encoder.blocks[:-1]:
        entered = hidden
        hidden = plain_layer(block, hidden, hidden, vectors, encoder.relative.slots, is_causal=is_causal)
        if block.branch is not None:
            kernel = block.branch.weight.unflatten(1, (3, -1)).transpose(1, 2)
            around = pad(entered.T[None], (2, 0) if is_causal else (1, 1))
            added = conv1d(around, kernel, block.branch.bias)[0].T
            hidden = norm(block.branch.norm, hidden + gelu(added))
    z = hidden + model.head("mask_decoder").table[: len(tokens)]
    for _ in range(2):
        z = plain_layer(encoder.blocks[-1], hidden, z, vectors, encoder.relative.slots, is_causal=is_causal)
    return norm(encoder.final_norm, z) if encoder.blocks[-1].is_pre_norm else z


def items() -> list[Tensor]:
    return [torch.randint(0, 40, (length,)) for length in LENGTHS]


def packed() -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([0, *LENGTHS, 0]).cumsum(0).int(), max(LENGTHS))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_decoder_equals_the_official_formula(name: str, layers: int) -> None:
    model, sequences = make(name, layers=layers), items()
    expected = torch.cat([official(model, tokens) for tokens in sequences])
    tokens = torch.cat(sequences)
    for backend in ("sdpa", "reference"):
        inputs = EncoderInputs(tokens, packed(), backend=backend)
        output = model.run(inputs, Want(masked_positions=torch.arange(len(tokens))))
        torch.testing.assert_close(output.masked_states, expected, rtol=0, atol=1e-11)
        assert output.final is None
    assert not torch.allclose(model.encoder(tokens, packed()), expected, atol=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_positions_can_have_any_order_and_layout(name: str) -> None:
    model, sequences = make(name), items()
    everything = torch.cat([official(model, tokens) for tokens in sequences])
    tokens, count = torch.cat(sequences), sum(LENGTHS)
    positions = torch.cat([torch.randperm(count)[:9], torch.tensor([3, 3, 3])])
    states = model.run(EncoderInputs(tokens, packed()), Want(masked_positions=positions)).masked_states
    torch.testing.assert_close(states, everything[positions], rtol=0, atol=1e-11)
    max_length = 14
    is_token = torch.arange(max_length) < torch.tensor(LENGTHS)[:, None]
    rows = torch.full((len(LENGTHS), max_length), 7)
    rows[is_token] = tokens
    in_rows = is_token.flatten().nonzero().squeeze(-1)[positions]
    # unused positions may be padding
    in_rows = torch.cat([in_rows, torch.tensor([max_length - 1])])
    want = Want(masked_positions=in_rows, final=True)
    output = model.run(EncoderInputs(rows, SequenceLayout.padded(is_token)), want)
    states = output.masked_states
    torch.testing.assert_close(states[:-1], everything[positions], rtol=0, atol=1e-11)
    assert states.isfinite().all()
    torch.testing.assert_close(output.last, model(rows, is_token.long()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "subnet", [Subnet(depth=0.34), Subnet(depth=0.67, width=0.5), Subnet(layers=(0,)), Subnet(layers=(0, 1))], ids=str
)
def test_subnet_decodes_with_its_last_kept_layer(name: str, subnet: Subnet) -> None:
    model, tokens = make(name), torch.cat(items())
    positions = torch.tensor([20, 2, 9])
    states = model.run(EncoderInputs(tokens, packed(), subnet=subnet), Want(masked_positions=positions)).masked_states
    small = bertsmith.extract(model, subnet)
    expected = torch.cat([official(small, part) for part in tokens.split(LENGTHS)])
    torch.testing.assert_close(states, expected[positions], rtol=0, atol=1e-11)
    torch.testing.assert_close(
        small.run(EncoderInputs(tokens, packed()), Want(masked_positions=positions)).masked_states,
        expected[positions],
    )


def test_gradients_reach_the_requested_positions() -> None:
    model, tokens = make("v1"), torch.cat(items())
    states = model.run(
        EncoderInputs(tokens, packed()), Want(masked_positions=torch.tensor([4, 9 + 0, 10 + 7]))
    ).masked_states
    states.square().sum().backward()
    changed = model.head("mask_decoder").table.grad.abs().sum(-1).nonzero().squeeze(-1)
    assert changed.tolist() == [0, 4, 7]
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_causal_decoder_equals_the_masked_formula(name: str) -> None:
    """The mask applies to every layer, the branch and both decoder steps, by forward pass or config."""
    model, sequences = make(name), items()
    expected = torch.cat([official(model, tokens, is_causal=True) for tokens in sequences])
    tokens, positions = torch.cat(sequences), torch.randperm(sum(LENGTHS))
    twin = rebuild(model, model.config.causal())
    for backend in ("sdpa", "reference"):
        states = model.run(
            EncoderInputs(tokens, packed(), backend=backend, is_causal=True),
            Want(masked_positions=positions),
        ).masked_states
        torch.testing.assert_close(states, expected[positions], rtol=0, atol=1e-11)
        states = twin.run(
            EncoderInputs(tokens, packed(), backend=backend), Want(masked_positions=positions)
        ).masked_states
        torch.testing.assert_close(states, expected[positions], rtol=0, atol=1e-11)
    assert not torch.allclose(
        model.run(EncoderInputs(tokens, packed()), Want(masked_positions=positions)).masked_states,
        expected[positions],
        atol=1e-3,
    )


@pytest.mark.slow
def test_decoder_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    model, tokens = make("v2", layers=2), torch.cat(items())

    def masked_states(tokens: Tensor, layout: SequenceLayout, positions: Tensor) -> Tensor:
        return model.run(EncoderInputs(tokens, layout), Want(masked_positions=positions)).masked_states

    compiled = torch.compile(masked_states, fullgraph=True, backend="aot_eager")
    positions = torch.randperm(sum(LENGTHS))[: max(LENGTHS) + 1]
    expected = masked_states(tokens, packed(), positions)
    torch.testing.assert_close(compiled(tokens, packed(), positions), expected, rtol=0, atol=1e-11)
    # in the same graph: more positions than a sequence has tokens, all in one sequence
    with pytest.raises(RuntimeError, match="contains a position more than once"):
        compiled(tokens, packed(), positions * 0)


def test_unsupported_inputs_raise() -> None:
    model = make("v1")
    with pytest.raises(InputError, match="may have 17 tokens; this mask decoder takes at most 16"):
        model.run(
            EncoderInputs(torch.zeros(1, 17, dtype=torch.long), SequenceLayout.full(1, 17)),
            Want(masked_positions=torch.tensor([0])),
        )
    bert = bertsmith.preset("bert-tiny").encoder
    crossed = bert.layers[0].model_copy(update={"cross": bert.layers[0].mixer})
    encoder = bert.model_copy(update={"layers": (crossed,)})
    with pytest.raises(ValueError, match="last mixer supports cross attention"):
        type(model.config)(family="x", encoder=encoder, heads=model.config.heads)


def test_fill_mask_uses_the_decoder(corpus_folder: Path) -> None:
    tokenizer = bertsmith.Tokenizer.load(corpus_folder)
    model = make("v1", vocabulary=tokenizer.size)
    model.tokenizer = tokenizer
    text = "the [MASK] forges an iron [MASK]."
    tokens = torch.from_numpy(tokenizer.encode([text])["input_ids"])[0].long()
    states = official(model, tokens)[tokens == tokenizer.mask]
    scores = model.head("masked_tokens")(states, model.token_table).softmax(-1)
    predictions = model.fill_mask(text, top_k=2)
    assert len(predictions) == 2
    for row, prediction in zip(scores, predictions, strict=True):
        assert [token for token, _ in prediction] == tokenizer.tokens(row.topk(2).indices.tolist())
        assert [probability for _, probability in prediction] == pytest.approx(row.topk(2).values.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_everywhere_equals_selected_positions(name: str) -> None:
    """Exported graphs use `everywhere`, whose shapes do not depend on the positions."""
    model = make(name)
    is_token = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    layout = SequenceLayout.padded(is_token)
    tokens = torch.randint(0, SIZE["vocabulary"], is_token.shape)
    output = model.encoder.run(EncoderInputs(tokens, layout), Want(last_block=False))
    below, (block, context) = output.hidden_states[-1], output.blocks[-1]
    decoder = model.heads["mask_decoder"]
    expected = decoder(below, block, context, is_token.flatten().nonzero().squeeze(-1))
    torch.testing.assert_close(decoder.everywhere(below, block, context)[is_token], expected)
