"""Every architecture in a few lines; `size.layer` and `size.embedding` default to BERT's."""

from bertsmith.errors import InputError
from bertsmith.layers.block import BranchConfig
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.halting import HaltingConfig
from bertsmith.layers.mixers.dynamic_conv import DynamicConvConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import (
    MaskedTokensConfig,
    NextSentenceConfig,
    NextTokenConfig,
    PoolerConfig,
    ReplacedTokensConfig,
)
from bertsmith.models.sizes import (
    BucketSize,
    ConvBertSize,
    DebertaSize,
    DisentangledSize,
    DynamicConvSize,
    FactorisedSize,
    LiteSize,
    LiteTransformerSize,
    ModernSize,
    PerformerSize,
    ProteinSize,
    Size,
    TransformerSize,
    UniversalSize,
)
from bertsmith.models.universal import UniversalConfig


def bert(size: Size) -> ModelConfig:
    """Devlin et al. 2019: post-norm, learned positions, two segments, masked tokens and next sentence."""
    layer = size.layer(FullConfig(heads=size.heads, dropout=size.dropout))
    encoder = size.encoder(size.embedding(positions="learned", types=2), *[layer] * size.layers)
    heads = (MaskedTokensConfig(), PoolerConfig(), NextSentenceConfig())
    return ModelConfig(family="bert", encoder=encoder, heads=heads)


def mpnet(size: Size) -> ModelConfig:
    """Song et al. 2020: BERT's layers without segments, with a bias for each head and relative position (T5)."""
    layer = size.layer(FullConfig(heads=size.heads, dropout=size.dropout, has_relative_bias=True))
    layer = layer.changed(norm=size.norm_of(1e-5))
    relative = RelativeConfig(heads=size.heads, span=16, max_distance=128)
    embedding = size.embedding(positions="learned", types=0, epsilon=1e-5)
    encoder = size.encoder(embedding, *[layer] * size.layers, relative=relative)
    return ModelConfig(family="mpnet", encoder=encoder, heads=(MaskedTokensConfig(epsilon=1e-5),))


def electra(size: FactorisedSize) -> ModelConfig:
    """Clark et al. 2020, the discriminator: BERT's encoder on a factorised embedding, one score per token."""
    layer = size.layer(FullConfig(heads=size.heads, dropout=size.dropout))
    encoder = size.encoder(size.embedding(), *[layer] * size.layers)
    return ModelConfig(family="electra", encoder=encoder, heads=(ReplacedTokensConfig(),))


def electra_generator(size: FactorisedSize) -> ModelConfig:
    """The generator of ELECTRA: the same encoder with scores over the vocabulary."""
    return electra(size).changed(heads=(MaskedTokensConfig(),))


def deberta(size: DebertaSize) -> ModelConfig:
    """He et al. 2021: separate scores for content and relative position, absolute positions in the mask decoder."""
    mixer = size.mixer(shares_projections=False, has_key_bias=False)
    layer = size.layer(mixer, norm=size.norm_of(1e-7))
    embedding = size.embedding(positions="none", types=0, epsilon=1e-7)
    encoder = size.encoder(embedding, *[layer] * size.layers, relative=size.relative())
    return ModelConfig(family="deberta", encoder=encoder, heads=size.masked_heads())


def deberta_ap(size: DebertaSize) -> ModelConfig:
    """He et al. 2021, appendix A.4: DeBERTa with absolute positions at the input instead of the mask decoder."""
    config = deberta(size)
    encoder = config.encoder.changed(embedding=config.encoder.embedding.changed(positions="learned"))
    return config.changed(encoder=encoder)


def deberta_v2(size: BucketSize) -> ModelConfig:
    """DeBERTa v2: one projection for content and positions, bucketed distances; also the generators of v3."""
    layer = size.layer(size.mixer(), norm=size.norm_of(1e-7))
    first = (
        layer.changed(branch=BranchConfig(kernel_size=size.kernel_size, dropout=size.dropout))
        if size.kernel_size
        else layer
    )
    embedding = size.embedding(positions="none", types=0, epsilon=1e-7)
    relative = size.relative(max_distance=size.max_distance, has_norm=True)
    encoder = size.encoder(embedding, first, *[layer] * (size.layers - 1), relative=relative)
    return ModelConfig(family="deberta-v2", encoder=encoder, heads=size.masked_heads())


def deberta_v3(size: BucketSize) -> ModelConfig:
    """He et al. 2023, the discriminator: v2's encoder, one score per token, which also reads the first token."""
    if not size.has_mask_decoder:
        raise InputError(
            "has_mask_decoder is false, but the mask decoder of DeBERTa v3 belongs to its generator; override it there "
            "(generator.preset and generator.overrides.has_mask_decoder, or generator.has_mask_decoder)"
        )
    return deberta_v2(size).changed(heads=(ReplacedTokensConfig(adds_first=True),))


def disentangled(size: DisentangledSize) -> ModelConfig:
    """The bundled model: ELECTRA's shape and objective with DeBERTa's attention, pre-norm."""
    relative = size.relative(max_distance=size.max_distance, has_norm=True)
    encoder = size.encoder(
        size.embedding(positions="none"), *[size.layer(size.mixer())] * size.layers, relative=relative
    )
    return ModelConfig(family="disentangled", encoder=encoder, heads=(ReplacedTokensConfig(),))


def convbert(size: ConvBertSize) -> ModelConfig:
    """Jiang et al. 2020: ELECTRA with mixed attention in a bottleneck, and grouped feed-forwards."""
    mixer = SpanConvConfig(
        heads=size.heads // size.ratio or size.heads,  # with fewer heads than the ratio, the released code drops it
        head_width=size.width // size.heads,
        kernel_size=size.kernel_size,
        kernel_from=size.kernel_from,
        dropout=size.dropout,
    )
    layer = size.layer(mixer, feedforward=FeedForwardConfig(neurons=4 * size.width, groups=size.groups))
    encoder = size.encoder(size.embedding(), *[layer] * size.layers)
    return ModelConfig(family="convbert", encoder=encoder, heads=(ReplacedTokensConfig(),))


def convbert_generator(size: ConvBertSize) -> ModelConfig:
    """The generator of ConvBERT: the same encoder with scores over the vocabulary."""
    return convbert(size).changed(heads=(MaskedTokensConfig(),))


def dynamic_conv(size: DynamicConvSize) -> ModelConfig:
    """Wu et al. 2019 as an encoder (sizes are ours): gated convolutions whose kernels grow from layer to layer."""
    layers = []
    for index in range(size.layers):
        kernel_size = min(2 ** (index + 2) - 1, 31)  # 3, 7, 15, then 31, as published
        mixer = DynamicConvConfig(
            heads=size.heads, kernel_size=kernel_size, kernel_from=size.kernel_from, dropout=size.dropout
        )
        layers.append(size.layer(mixer))
    encoder = size.encoder(size.embedding(positions="sinusoid"), *layers)
    return ModelConfig(family="dynamic_conv", encoder=encoder, heads=(MaskedTokensConfig(),))


def transformer(size: TransformerSize) -> ModelConfig:
    """Vaswani et al. 2017: post-norm, ReLU, one table of scaled token vectors for source, target and output scores."""
    value_width = size.value_width or size.head_width
    attention = FullConfig(heads=size.heads, head_width=size.head_width, value_width=value_width, dropout=0.0)
    feedforward = FeedForwardConfig(neurons=size.neurons, activation="relu")
    encoder_layer = size.layer(attention, feedforward=feedforward, norm=size.norm_of(1e-5))
    decoder_layer = encoder_layer.changed(mixer=encoder_layer.mixer.changed(is_causal=True), cross=attention)
    embedding = size.embedding(positions=size.positions, is_scaled=True, has_norm=False, types=0)
    encoder = size.encoder(embedding, *[encoder_layer] * size.layers)
    decoder = size.encoder(embedding.changed(table="given"), *[decoder_layer] * (size.decoder_layers or size.layers))
    return ModelConfig(family="transformer", encoder=encoder, decoder=decoder, heads=(NextTokenConfig(),))


def lite_bert(size: LiteSize) -> ModelConfig:
    """BERT with the layers of Wu et al. 2020 (sizes are ours): long-short range attention, flattened feed-forwards."""
    encoder = size.encoder(size.embedding(), *size.lite_layers("gelu", size.norm_of()))
    return ModelConfig(family="lite-bert", encoder=encoder, heads=(MaskedTokensConfig(), PoolerConfig()))


def lite_transformer(size: LiteTransformerSize) -> ModelConfig:
    """Wu et al. 2020: the Transformer with long-short range attention in both stacks, and full cross-attention."""
    reading = size.lite_layers("relu", size.norm_of(1e-5))
    cross = FullConfig(heads=size.heads, dropout=size.dropout)
    writing = [layer.changed(mixer=layer.mixer.changed(is_causal=True), cross=cross) for layer in reading]
    embedding = size.embedding(positions="sinusoid", is_scaled=True, has_norm=False, types=0)
    encoder, decoder = size.encoder(embedding, *reading), size.encoder(embedding.changed(table="given"), *writing)
    return ModelConfig(family="lite-transformer", encoder=encoder, decoder=decoder, heads=(NextTokenConfig(),))


def albert(size: FactorisedSize) -> ModelConfig:
    """Lan et al. 2020: one layer applied repeatedly, on a factorised embedding."""
    mixer = FullConfig(heads=size.heads, dropout=size.dropout)
    layer = size.layer(mixer, feedforward=FeedForwardConfig(neurons=4 * size.width, activation="gelu_tanh"))
    encoder = size.encoder(size.embedding(), *[layer] * size.layers)
    heads = (MaskedTokensConfig(activation="gelu_tanh"), PoolerConfig())
    return ModelConfig(family="albert", encoder=encoder, heads=heads)


def universal(size: UniversalSize) -> ModelConfig:
    """Dehghani et al. 2019 as a text encoder: one BERT layer, step embeddings, adaptive halting."""
    layer = size.layer(FullConfig(heads=size.heads, dropout=size.dropout))
    steps = UniversalConfig(halting=HaltingConfig() if size.is_halting else None)
    embedding = size.embedding(positions="none")
    encoder = size.encoder(embedding, *[layer] * size.layers, universal=steps)
    return ModelConfig(family="universal", encoder=encoder, heads=(MaskedTokensConfig(), PoolerConfig()))


def performer(size: PerformerSize) -> ModelConfig:
    """Choromanski et al. 2021: BERT whose attention is FAVOR+, linear in the length."""
    mixer = FavorConfig(
        heads=size.heads,
        features=size.features,
        feature_map=size.feature_map,
        redraw_every=size.redraw_every,
        dropout=size.dropout,
    )
    encoder = size.encoder(size.embedding(), *[size.layer(mixer)] * size.layers)
    heads = (MaskedTokensConfig(), PoolerConfig(), NextSentenceConfig())
    return ModelConfig(family="performer", encoder=encoder, heads=heads)


def performer_protein(size: ProteinSize) -> ModelConfig:
    """Choromanski et al. 2021, section 4.4: a Performer over amino acids, with sinusoidal positions and no types."""
    base = performer(size)
    feedforward = FeedForwardConfig(neurons=size.neurons)
    layers = [layer.changed(feedforward=feedforward) for layer in base.encoder.layers]
    # unscaled, fresh token vectors would be far smaller than the sines
    embedding = size.embedding(positions="sinusoid", types=0, is_scaled=True)
    return base.changed(encoder=size.encoder(embedding, *layers), heads=(MaskedTokensConfig(),))


def modern(size: ModernSize) -> ModelConfig:
    """Warner et al. 2024: pre-norm, rotary positions, gated feed-forwards, no biases, mostly local attention."""
    global_attention = FullConfig(heads=size.heads, dropout=size.dropout, rotary=size.rotary, has_bias=False)
    local_attention = global_attention.changed(rotary=size.local_rotary, window=size.window)
    norm = NormConfig(placement="pre", kind=size.norm, epsilon=1e-5, has_bias=False)
    gated = FeedForwardConfig(neurons=size.neurons, activation=size.activation, is_gated=True, has_bias=False)
    first = size.layer(global_attention, feedforward=gated, norm=norm, has_mixer_norm=False)
    global_layer = first.changed(has_mixer_norm=True)
    local_layer = global_layer.changed(mixer=local_attention)
    rest = [local_layer if index % size.global_every else global_layer for index in range(1, size.layers)]
    embedding = size.embedding(positions="none", types=0, norm=size.norm, epsilon=1e-5, has_bias=False)
    encoder = size.encoder(embedding, first, *rest, final_norm=norm, scales_outputs=True)
    return ModelConfig(family="modern", encoder=encoder, heads=(MaskedTokensConfig(epsilon=1e-5, has_bias=False),))
