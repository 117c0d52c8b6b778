"""The config of a whole model. Sizes are in sizes.py and published.py; each module's settings are beside the module."""

from typing import Literal

from pydantic import Field, model_validator

from bertsmith.layers.block import BranchConfig
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers import AnyMixer, MixerConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.models.equilibrium import EquilibriumConfig
from bertsmith.models.heads import AnyHead, DecoderExitsConfig, ExitsConfig, MaskDecoderConfig, TaskHeadConfig
from bertsmith.models.heads.task import EmbedderConfig
from bertsmith.models.universal import UniversalConfig
from bertsmith.settings import Record

Sharing = Literal["none", "all", "mixer", "feedforward"]


class LayerConfig(Record):
    """One block."""

    mixer: AnyMixer
    feedforward: FeedForwardConfig
    norm: NormConfig = NormConfig()
    has_mixer_norm: bool = True
    """Whether the mixer has a norm. False in the first layer of ModernBERT, which directly follows the embedding's
    norm."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on the outputs of mixer and feed-forward, before the residual sum."""
    cross: AnyMixer | None = None
    """In a decoder: the mixer between mixer and feed-forward that attends to the encoder's hidden states."""
    branch: BranchConfig | None = None
    """A convolution beside the whole layer."""

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixer and, in a decoder, the cross mixer."""
        return (self.mixer,) if self.cross is None else (self.mixer, self.cross)

    @model_validator(mode="after")
    def _check_cross(self) -> "LayerConfig":
        if self.cross is None:
            return self
        if not self.cross.reads_memory:
            raise ValueError(f"cross is of kind {self.cross.kind!r}, which cannot attend to an encoder")
        if self.cross.heads != self.mixer.heads:
            raise ValueError(f"cross has {self.cross.heads} heads and mixer {self.mixer.heads}; they must be equal")
        if self.cross.is_causal:
            raise ValueError("cross.is_causal is true; a cross mixer attends to the whole source")
        return self


_OTHER_WALKS = ("universal", "reversible", "equilibrium")


class EncoderConfig(Record):
    """embedding → layers → hidden states. In a file, `repeat = 12` repeats a layer."""

    vocabulary: int = Field(gt=0)
    width: int = Field(gt=0)
    embedding: EmbeddingConfig = EmbeddingConfig()
    layers: tuple[LayerConfig, ...] = Field(min_length=1)
    final_norm: NormConfig | None = None
    """A norm after the last layer; pre-norm encoders need one."""
    relative: RelativeConfig | None = None
    """The table of relative positions that disentangled mixers, and full mixers with a relative bias, read."""
    sharing: Sharing = "none"
    """Weights that all layers share: none, all, the mixers, or the feed-forwards (with their norms)."""
    universal: UniversalConfig | None = None
    """Run the layers as steps of a Universal Transformer; the paper's model also has `sharing = "all"`."""
    reversible: bool = False
    """Reversible layers: training keeps the activations of one layer instead of all and computes every layer twice;
    for pre-norm layers."""
    equilibrium: EquilibriumConfig | None = None
    """Repeat the layers, usually one, until their output no longer changes (deep equilibrium model); for post-norm
    layers."""
    layer_drop: float = Field(default=0.0, ge=0, lt=1)
    """Probability of skipping each layer in training, drawn for every micro-batch, so that layers can be removed
    later (LayerDrop, Fan et al. 2020)."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of fresh weights, drawn from a normal truncated at two standard deviations."""
    scales_outputs: bool = False
    """Divide the fresh weights of the n projections that write to the residual stream by √n, so that its scale does
    not grow with depth; for pre-norm encoders."""

    @model_validator(mode="after")
    def _check_layers(self) -> "EncoderConfig":
        for index, layer in enumerate(self.layers):
            for name, part in (("mixer", layer.mixer), ("cross", layer.cross), ("feedforward", layer.feedforward)):
                if part is None:
                    continue
                try:
                    part.check(self.width)
                except ValueError as error:
                    raise ValueError(f"layers.{index}.{name}: {error}") from None
                limit = part.length_limit if isinstance(part, MixerConfig) else None
                if limit is not None and limit < self.embedding.max_length:
                    raise ValueError(
                        f"layers.{index}.{name}.max_length is {limit}; allowed: embedding.max_length, "
                        f"{self.embedding.max_length}, or more"
                    )
                if isinstance(part, MixerConfig):
                    self._check_relative(part, f"layers.{index}.{name}")
        return self

    def _check_relative(self, mixer: MixerConfig, path: str) -> None:
        """Raise ValueError if the relative table does not have the vectors or biases that the mixer reads."""
        if not (mixer.reads_positions or mixer.reads_biases):
            return
        if self.relative is None:
            raise ValueError(f"{path} reads relative positions; set relative")
        heads = self.relative.heads
        if mixer.reads_positions and heads is not None:
            raise ValueError(f"{path} reads relative position vectors, but relative.heads is {heads}; leave it out")
        if mixer.reads_biases and (heads is None or heads < mixer.heads):
            raise ValueError(
                f"{path} reads a bias for {mixer.heads} heads; set relative.heads to {mixer.heads} or more"
            )

    @model_validator(mode="after")
    def _check_rank(self) -> "EncoderConfig":
        rank, full_rank = self.embedding.rank, min(self.vocabulary, self.embedding_width)
        if rank is not None and rank > full_rank:
            raise ValueError(f"embedding.rank is {rank}; allowed: up to {full_rank}, the full rank of the table")
        return self

    @model_validator(mode="after")
    def _check_layer_drop(self) -> "EncoderConfig":
        if self.layer_drop and self.universal is not None:
            raise ValueError(f"layer_drop is {self.layer_drop}; allowed with universal steps: 0")
        return self

    @model_validator(mode="after")
    def _check_walk(self) -> "EncoderConfig":
        # f(z) = z + … has no fixed point that iteration would find
        for walk, placement, unsupported in (
            ("reversible", "pre", ("cross", "branch")),
            ("equilibrium", "post", ("cross",)),
        ):
            if not getattr(self, walk):
                continue
            for name in ("layer_drop", *_OTHER_WALKS):
                if name != walk and getattr(self, name):
                    raise ValueError(f"{walk} and {name} are given; remove one of them")
            for index, layer in enumerate(self.layers):
                if layer.norm.placement != placement:
                    given = f"layers.{index}.norm.placement is {layer.norm.placement!r}"
                    raise ValueError(f"{walk} is given, but {given}; use {placement!r}")
                for name in unsupported:
                    if getattr(layer, name) is not None:
                        raise ValueError(f"{walk} is given, but layers.{index} has a {name}; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_sharing(self) -> "EncoderConfig":
        parts = {
            "branch": self.sharing == "all",
            "cross": self.shares_mixer,
            "feedforward": self.shares_feedforward,
            "has_mixer_norm": self.shares_mixer,
            "mixer": self.shares_mixer,
            "norm": self.sharing != "none",
        }
        for part, is_shared in parts.items():
            if is_shared and len({getattr(layer, part) for layer in self.layers}) > 1:
                raise ValueError(f"sharing is {self.sharing!r}, but the layers differ in their {part}")
        return self

    @property
    def shares_mixer(self) -> bool:
        """Whether all layers have the same mixers, with their norms."""
        return self.sharing in ("mixer", "all")

    @property
    def shares_feedforward(self) -> bool:
        """Whether all layers have the same feed-forward, with its norm."""
        return self.sharing in ("feedforward", "all")

    @property
    def other_walk(self) -> str | None:
        """The setting that replaces "one layer after the other"; mask decoders and exits need None."""
        return next((name for name in _OTHER_WALKS if getattr(self, name)), None)

    @property
    def embedding_width(self) -> int:
        return self.embedding.width or self.width

    @property
    def jacobian_weight(self) -> float | None:
        """The weight of the Jacobian regularisation in the loss; None without an equilibrium."""
        return None if self.equilibrium is None else self.equilibrium.jacobian_weight

    @property
    def ponder_weight(self) -> float | None:
        """The weight of the ponder cost in the loss; None where positions do not halt."""
        halting = None if self.universal is None else self.universal.halting
        return None if halting is None else halting.cost

    def flops(self, length: int) -> int:
        """Floating-point operations of one token's forward pass through the layers (2 per multiply-add).

        An upper bound for an equilibrium, whose sequences may converge early.
        """
        widening = 0 if self.embedding_width == self.width else 2 * self.embedding_width * self.width
        evaluations = 1 if self.equilibrium is None else self.equilibrium.steps + 1
        return widening + evaluations * sum(self._layer_flops(layer, length) for layer in self.layers)

    def _layer_flops(self, layer: LayerConfig, length: int) -> int:
        flops = layer.mixer.flops(self.width, length) + layer.feedforward.flops(self.width)
        if layer.cross is not None:
            flops += layer.cross.flops(self.width, length)
        return flops if layer.branch is None else flops + layer.branch.flops(self.width)


class GeneratorConfig(Record):
    """The masked-token model whose samples an encoder learns to detect (ELECTRA)."""

    model: "ModelConfig"
    sharing: Literal["none", "full", "gradient_disentangled"] = "full"
    """Embedding weights that generator and encoder share: none; token, position and type vectors and their norm
    (ELECTRA); or the generator's token vectors, to which the encoder adds its own table without sending gradients into
    them (DeBERTa v3)."""

    @model_validator(mode="after")
    def _check_heads(self) -> "GeneratorConfig":
        kinds = [head.kind for head in self.model.heads]
        if "masked_tokens" not in kinds or set(kinds) - {"masked_tokens", "mask_decoder"}:
            raise ValueError(f"generator.model.heads is {kinds}; allowed: masked_tokens, with or without mask_decoder")
        if self.model.generator is not None or self.model.decoder is not None:
            raise ValueError("generator.model has a generator or decoder; allowed: an encoder only")
        return self


class ModelConfig(Record):
    """An encoder and its heads; with a decoder, a sequence-to-sequence model."""

    family: str
    """The architecture, for exchange with other libraries: "bert", "electra", …"""
    encoder: EncoderConfig
    decoder: EncoderConfig | None = None
    """A stack whose layers have cross mixers that attend to the encoder's hidden states."""
    heads: tuple[AnyHead, ...] = ()
    generator: GeneratorConfig | None = None
    """The generator an encoder was trained with, kept to continue training and to fill masks."""
    quantisation: QuantisationConfig | None = None
    """Simulated quantisation of weights and activations to integers of a few bits; None for no quantisation."""

    @property
    def is_causal(self) -> bool:
        """Whether every mixer of the encoder is causal."""
        return all(layer.mixer.is_causal for layer in self.encoder.layers)

    @property
    def embedder(self) -> EmbedderConfig | None:
        """The settings of the embedder head, or None."""
        return next((head for head in self.heads if isinstance(head, EmbedderConfig)), None)

    @property
    def text_length(self) -> int:
        """Number of tokens that texts are truncated to."""
        own, most = None if self.embedder is None else self.embedder.texts.max_length, self.encoder.embedding.max_length
        return most if own is None else own

    def causal(self) -> "ModelConfig":
        """Return the config with every mixer of the encoder causal; raise InputError if one cannot be causal."""
        layers = tuple(layer.changed(mixer=layer.mixer.changed(is_causal=True)) for layer in self.encoder.layers)
        return self.changed(encoder=self.encoder.changed(layers=layers))

    @property
    def scored_rows(self) -> str | None:
        """Name of the token rows whose product with hidden states is quantised; None without a decoder."""
        if self.decoder is None:
            return None
        return "encoder.embedding.rows" if self.decoder.embedding.table == "given" else "decoder.embedding.rows"

    @model_validator(mode="after")
    def _check_generator(self) -> "ModelConfig":
        embedding, generator = self.encoder.embedding, self.generator
        is_difference = embedding.table == "difference"
        if is_difference and (generator is None or generator.sharing != "gradient_disentangled"):
            raise ValueError(
                "encoder.embedding.table is 'difference'; allowed with a gradient_disentangled generator only"
            )
        if generator is None or generator.sharing == "none":
            return self
        other = generator.model.encoder
        pairs = {
            "vocabulary": (self.encoder.vocabulary, other.vocabulary),
            "embedding width": (self.encoder.embedding_width, other.embedding_width),
        }
        if generator.sharing == "full":
            for name in ("positions", "max_length", "types", "has_norm", "norm", "epsilon", "has_bias"):
                pairs[f"embedding.{name}"] = (getattr(embedding, name), getattr(other.embedding, name))
        for name, (own, others) in pairs.items():
            if own != others:
                values = f"{own} and its generator's {others}"
                raise ValueError(
                    f"the encoder's {name} is {values}; generator.sharing = {generator.sharing!r} requires equal values"
                )
        if embedding.rank or other.embedding.rank or self.decoder is not None:
            raise ValueError("generator.sharing is given with embedding.rank or a decoder; allowed: sharing = 'none'")
        return self

    @model_validator(mode="after")
    def _check_quantisation(self) -> "ModelConfig":
        if self.quantisation is None:
            return self
        if self.generator is not None:
            raise ValueError("quantisation is set for a model with a generator; allowed: encoders and encoder-decoders")
        if self.encoder.other_walk in ("reversible", "equilibrium"):
            walk = self.encoder.other_walk  # observers of ranges would count activations several times
            raise ValueError(f"quantisation and encoder.{walk} are given; remove one of them")
        stacks = [self.encoder, *([] if self.decoder is None else [self.decoder])]
        bits, layers = self.quantisation.layer_bits, sum(len(stack.layers) for stack in stacks)
        if bits is not None and (len(bits) != layers or any(stack.sharing != "none" for stack in stacks)):
            raise ValueError(
                f"quantisation.layer_bits lists {len(bits)} layers; allowed: all {layers}, with sharing = 'none'"
            )
        if self.quantisation.places == "all":
            self._check_places()
        return self

    def _check_places(self) -> None:
        """Raise ValueError if a module has tensors that no rounding of places = "all" covers."""
        if any(isinstance(head, MaskDecoderConfig) for head in self.heads):
            raise ValueError("quantisation.places is 'all' for a model with a mask_decoder; use 'linear'")
        for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack is None:
                continue
            for setting, value in (("universal", stack.universal), ("embedding.rank", stack.embedding.rank)):
                if value is not None:
                    raise ValueError(f"quantisation.places is 'all' and {name}.{setting} is given; use 'linear'")
            for index, layer in enumerate(stack.layers):
                found = [f"a mixer of kind {mixer.kind!r}" for mixer in layer.mixers if mixer.kind != "full"]
                found += ["sparse attention" for mixer in layer.mixers if getattr(mixer, "sparse", None) is not None]
                found += ["a relative bias" for mixer in layer.mixers if mixer.reads_biases]
                found += ["a grouped feed-forward"] if layer.feedforward.groups > 1 else []
                found += ["a branch"] if layer.branch is not None else []
                if found:
                    where = f"{name}.layers.{index} has {found[0]}"
                    raise ValueError(f"quantisation.places is 'all', but {where}; use 'linear', or full attention")

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        kinds = [head.kind for head in self.heads]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"heads are {kinds}; each kind may occur once")
        last = self.decoder or self.encoder  # heads read the last stack
        if "next_token" in kinds and last.embedding_width != last.width:
            widths = f"{last.embedding_width} ≠ {last.width}"
            raise ValueError(f"a next_token head needs an embedding as wide as the hidden states: {widths}")
        return self

    @model_validator(mode="after")
    def _check_causal(self) -> "ModelConfig":
        if not self.is_causal:
            return self
        for head in self.heads:
            pooling = getattr(head, "pooling", None)
            if pooling in ("first", "pooler") and getattr(head, "recurrent", None) is None:
                raise ValueError(
                    f"the {head.kind} head has pooling {pooling!r}, but in a causal encoder the first token sees "
                    "itself alone, so every text has the same vector; allowed: 'last', 'mean', or a recurrent layer"
                )
        return self

    @model_validator(mode="after")
    def _check_exits(self) -> "ModelConfig":
        exits = next((head for head in self.heads if isinstance(head, ExitsConfig)), None)
        if exits is None:
            return self
        if self.decoder is not None or self.encoder.other_walk is not None:
            raise ValueError(
                "exits are given; allowed: an encoder without universal steps, reversible layers or an equilibrium; a "
                "decoder takes decoder_exits"
            )
        if any(isinstance(head, TaskHeadConfig) and not head.features.layers for head in self.heads):
            raise ValueError("exits need a task head that reads layers, but head.features.layers is 0")
        depth = len(self.encoder.layers)
        if exits.layers[-1] >= depth:
            raise ValueError(f"exits.layers is {list(exits.layers)}; allowed: 1 to {depth - 1}, below the last layer")
        return self

    @model_validator(mode="after")
    def _check_decoder_exits(self) -> "ModelConfig":
        exits = next((head for head in self.heads if isinstance(head, DecoderExitsConfig)), None)
        if exits is None:
            return self
        if self.decoder is None or not any(head.kind == "next_token" for head in self.heads):
            raise ValueError("decoder_exits need a decoder with a next_token head")
        depth = len(self.decoder.layers)
        if exits.layers[-1] >= depth:
            raise ValueError(
                f"decoder_exits.layers is {list(exits.layers)}; allowed: 1 to {depth - 1}, those below the last block"
            )
        return self

    @model_validator(mode="after")
    def _check_mask_decoder(self) -> "ModelConfig":
        if not any(head.kind == "mask_decoder" for head in self.heads):
            return self
        last = self.encoder.layers[-1]
        if self.decoder is not None or last.cross is not None or not last.mixer.reads_memory:
            raise ValueError("a mask_decoder needs an encoder whose last mixer supports cross attention")
        walk = self.encoder.other_walk
        if walk is not None:
            raise ValueError(
                f"a mask_decoder is given with encoder.{walk}, which has no last layer; remove one of them"
            )
        if last.mixer.is_causal and not last.mixer.reads_positions:
            raise ValueError(
                f"a causal mask_decoder needs a last mixer that reads the positions of its queries (disentangled, with "
                f"position terms); this one is {last.mixer.kind!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_decoder(self) -> "ModelConfig":
        decoder = self.decoder
        for index, layer in enumerate(self.encoder.layers):
            if layer.cross is not None:
                raise ValueError(f"encoder.layers.{index}.cross is given; allowed in the layers of a decoder only")
        if decoder is not None and (decoder.embedding.rank or self.encoder.embedding.rank):
            raise ValueError("embedding.rank is given; allowed in a model without a decoder")
        if decoder is None:
            if self.encoder.embedding.table == "given":
                raise ValueError("encoder.embedding.table is 'given'; only a decoder reads another table")
            return self
        for index, layer in enumerate(decoder.layers):
            if layer.cross is None or not layer.mixer.is_causal:
                raise ValueError(f"decoder.layers.{index} needs a causal mixer and a cross mixer")
        if decoder.universal is not None:
            raise ValueError("decoder.universal is given; allowed in an encoder only")
        if self.encoder.ponder_weight is not None:
            raise ValueError("encoder.universal.halting is given; allowed in a model without a decoder")
        if decoder.width != self.encoder.width:
            raise ValueError(f"decoder.width is {decoder.width}; allowed: encoder.width, {self.encoder.width}")
        tables = (decoder.vocabulary, decoder.embedding_width)
        if decoder.embedding.table == "given" and tables != (self.encoder.vocabulary, self.encoder.embedding_width):
            raise ValueError("decoder.embedding.table is 'given'; its vocabulary and width must be the encoder's")
        return self
