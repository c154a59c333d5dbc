"""How strongly each layer is pulled at: gradients of the loss at what layers write."""

from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from attention_residuals.models import LanguageModel
from attention_residuals.trace import GradientRecorder

__all__ = ["gradient_magnitude"]


def gradient_magnitude(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    targets: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T T"] | None = None,
) -> tuple[float, ...]:
    """Measures the gradient at each layer's MLP output (paper, Fig. 5c, whose statistic is not published).

    The loss is the mean over scored tokens, in nats. Gradients of parameters are dropped before and afterwards.

    Args:
        model: Any decoder whose parameters require gradients.
        tokens: What it reads.
        targets: The token that follows each, or ``UNSCORED``.
        mask: True for the (query, key) pairs that may attend.

    Returns:
        For each layer the root mean square over tokens and channels; 0 or more, no upper end. It falls as the
        number of tokens grows, since each token has its share of the mean: compare on the same tokens only.

    Example:
        >>> import torch
        >>> from attention_residuals.models import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=9))
        >>> len(gradient_magnitude(model, torch.tensor([[5, 6]]), torch.tensor([[6, 7]])))
        2
    """
    recorder = GradientRecorder()
    model.zero_grad(set_to_none=True)
    logits_BTV = model(tokens, mask=mask, tap=recorder).float()
    F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten()).backward()
    magnitudes = recorder.magnitudes()
    model.zero_grad(set_to_none=True)
    return tuple(magnitudes[f"L{layer}.mlp"] for layer in range(model.config.num_layers))
