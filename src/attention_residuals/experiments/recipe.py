"""Shapes and recipes: how all runs of a study are trained, but for what it compares."""

from dataclasses import dataclass, field, replace

from attention_residuals.layers.residual import ResidualConfig
from attention_residuals.models import ConvertedConfig, DecoderConfig, presets
from attention_residuals.models.costs import costs
from attention_residuals.train import AdamW, Cosine, Muon, TrainConfig

__all__ = ["KimiPreset", "Recipe", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a decoder, without its vocabulary and its residual rule.

    Args:
        num_layers: L.
        width: D.
        num_heads: Of queries, keys and values alike.
        head_width: K, even.
        mlp_width: F.
        tied: The head shares the embedding's matrix.

    Example:
        >>> Shape(num_layers=10, width=48, num_heads=3, head_width=16, mlp_width=128).num_parameters
        276480
    """

    num_layers: int
    width: int
    num_heads: int
    head_width: int
    mlp_width: int
    tied: bool = True

    @property
    def num_parameters(self) -> int:
        """Numbers in the matrices of all layers: neither embedding and head, nor norms, nor what a rule learns."""
        attention = 4 * self.width * self.num_heads * self.head_width
        return self.num_layers * (attention + 3 * self.width * self.mlp_width)

    def model(self, vocab_size: int, max_tokens: int, residual: ResidualConfig) -> DecoderConfig:
        """Makes the config of a decoder of this shape."""
        return DecoderConfig(
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_width=self.head_width,
            mlp_width=self.mlp_width,
            max_tokens=max_tokens,
            tied=self.tied,
            residual=residual,
        )


@dataclass(frozen=True, kw_only=True)
class KimiPreset:
    """The shape of a Kimi Linear model, which takes the place of a decoder's.

    Args:
        preset: One of ``presets.KIMI_LINEAR_SHAPES``.

    Example:
        >>> KimiPreset(preset="kimi-linear-tiny").num_layers
        8
    """

    preset: str

    def __post_init__(self) -> None:
        presets.kimi_linear(self.preset, vocab_size=1)  # refuses an unknown name

    @property
    def num_layers(self) -> int:
        """L."""
        return presets.KIMI_LINEAR_SHAPES[self.preset].num_layers

    @property
    def num_heads(self) -> int:
        """Of either attention."""
        return presets.KIMI_LINEAR_SHAPES[self.preset].num_heads

    @property
    def tied(self) -> bool:
        """Head and embedding have matrices of their own."""
        return False

    @property
    def num_parameters(self) -> int:
        """Numbers in all layers that work on one token, norms among them: neither embedding and head, nor the rule."""
        found = costs(presets.kimi_linear(self.preset, vocab_size=1))
        return found.active - found.embeddings - found.residual

    def model(self, vocab_size: int, max_tokens: int, residual: ResidualConfig) -> ConvertedConfig:
        """Makes the config of the model, whose longest sequence is the preset's, or shorter."""
        config = presets.kimi_linear(self.preset, vocab_size=vocab_size, residual=residual)
        return replace(config, max_tokens=min(max_tokens, config.max_tokens))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run is trained.

    Args:
        shape: Of the model, a decoder's or Kimi Linear's.
        num_steps: Optimizer steps; a twentieth of them is warm-up.
        batch_size: Sequences per step.
        sequence_length: Tokens.
        optimizer: With the peak of the learning rate.
        micro_batch_size: Sequences per forward pass; None takes all at once.
        for_gpus: Matrix products in bfloat16, and activations made again; else float32 as it is. Not compiled, since
            several ranks cannot be, and a run is the same run on any number of them.
    """

    shape: Shape | KimiPreset
    num_steps: int
    batch_size: int
    sequence_length: int
    optimizer: AdamW | Muon = field(default_factory=Muon)
    micro_batch_size: int | None = None
    for_gpus: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.sequence_length

    def at_rate(self, learning_rate: float) -> "Recipe":
        """Returns the recipe with another peak of the learning rate."""
        return replace(self, optimizer=replace(self.optimizer, learning_rate=learning_rate))

    def train_config(self, residual: ResidualConfig, *, seed: int, vocab_size: int) -> TrainConfig:
        """Makes the config of a run.

        Args:
            residual: The rule.
            seed: Of the weights and the order of the data.
            vocab_size: Of the text's tokenizer.
        """
        return TrainConfig(
            model=self.shape.model(vocab_size, self.sequence_length, residual),
            optimizer=self.optimizer,
            schedule=Cosine(warmup_steps=self.num_steps // 20),
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            sequence_length=self.sequence_length,
            seed=seed,
            precision="bfloat16" if self.for_gpus else "float32",
            checkpoint_activations=self.for_gpus,
        )
