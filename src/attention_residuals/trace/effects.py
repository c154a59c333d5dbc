"""Effects: how far an edit moves what a model predicts, each a number with a unit and a direction."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ShapeError

__all__ = [
    "Effect",
    "change_of_log_probability",
    "change_of_logit_difference",
    "change_of_loss",
    "divergence",
]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What an edit has changed, token by token.

    Args:
        name: What is measured.
        unit: Its unit.
        values: One number for each token that predicts.
    """

    name: str
    unit: str
    values: Float[Tensor, "B T"]

    def mean(self, mask: Bool[Tensor, "B T"] | None = None) -> float:
        """Averages over tokens.

        Args:
            mask: True for the tokens to average over; by default all.

        Raises:
            ShapeError: A mask of another shape, or without a token.
        """
        if mask is None:
            return self.values.mean().item()
        if mask.shape != self.values.shape or not mask.any():
            raise ShapeError(
                got=f"a mask of shape {list(mask.shape)} with {int(mask.sum())} tokens",
                expected=f"shape {list(self.values.shape)} and at least one token",
                do="mark the tokens whose predictions count",
            )
        return self.values[mask].mean().item()


def change_of_logit_difference(
    clean: Float[Tensor, "B T V"],
    edited: Float[Tensor, "B T V"],
    *,
    right: int | Int[Tensor, " B"],
    wrong: int | Int[Tensor, " B"],
) -> Effect:
    """Measures how the logit of one token against another changes: edited minus clean.

    Unit nats of log-odds; any number. 0: nothing changed; above 0: the edit favours ``right``; below 0: it
    favours ``wrong``. Linear in the logits, so that effects of several edits can be compared.

    Args:
        clean: Logits without the edit.
        edited: Logits with it.
        right: A token, or one for each row.
        wrong: Another.

    Example:
        >>> clean, edited = torch.tensor([[[2.0, 1.0]]]), torch.tensor([[[1.0, 1.5]]])
        >>> change_of_logit_difference(clean, edited, right=0, wrong=1).values
        tensor([[-1.5000]])
    """
    _require_pair(clean, edited)

    def difference(logits: Tensor) -> Tensor:
        return _column(logits, right) - _column(logits, wrong)

    values = difference(_precise(edited)) - difference(_precise(clean))
    return Effect(name="change of the logit difference", unit="nats", values=values)


def change_of_log_probability(
    clean: Float[Tensor, "B T V"], edited: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]
) -> Effect:
    """Measures how the log-probability of a token changes: edited minus clean.

    Unit nats; from minus infinity to the surprise of the clean model. 0: nothing changed; below 0: the edit
    takes away from the target; at the upper end the target has become certain.

    Args:
        clean: Logits without the edit.
        edited: Logits with it.
        targets: The token whose probability counts, for each token that predicts.

    Example:
        >>> clean, edited = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[9.0, -9.0]]])
        >>> change_of_log_probability(clean, edited, torch.tensor([[0]])).values
        tensor([[0.6931]])
    """
    _require_pair(clean, edited)
    values = _log_probability(edited, targets) - _log_probability(clean, targets)
    return Effect(name="change of the log-probability", unit="nats", values=values)


def divergence(clean: Float[Tensor, "B T V"], edited: Float[Tensor, "B T V"]) -> Effect:
    """Measures KL(clean || edited) of the predictions.

    Unit nats; 0 to infinity. 0: the predictions are the same; large: the edit makes the clean model's
    predictions seem impossible.

    Args:
        clean: Logits without the edit.
        edited: Logits with it.

    Example:
        >>> clean, edited = torch.tensor([[[30.0, 0.0]]]), torch.tensor([[[0.0, 0.0]]])
        >>> divergence(clean, edited).values
        tensor([[0.6931]])
    """
    _require_pair(clean, edited)
    own, other = _precise(clean).log_softmax(-1), _precise(edited).log_softmax(-1)
    values = (own.exp() * (own - other)).sum(-1).clamp_min(0.0)  # rounding may go below
    return Effect(name="KL(clean || edited)", unit="nats", values=values)


def change_of_loss(
    clean: Float[Tensor, "B T V"], edited: Float[Tensor, "B T V"], tokens: Int[Tensor, "B T"]
) -> Effect:
    """Measures how the cross-entropy loss of the text's own next tokens changes: edited minus clean.

    Unit nats per token; from minus the clean loss to infinity. 0: nothing changed; above 0: the edit hurts;
    at the lower end every next token has become certain. One number for each token but the last, which has
    no next one.

    Args:
        clean: Logits without the edit.
        edited: Logits with it.
        tokens: The text that both ran on.

    Example:
        >>> clean, edited = torch.zeros(1, 2, 2), torch.tensor([[[9.0, -9.0], [0.0, 0.0]]])
        >>> change_of_loss(clean, edited, torch.tensor([[1, 0]])).values
        tensor([[-0.6931]])
    """
    _require_pair(clean, edited)
    next_tokens = tokens[:, 1:]
    values = _log_probability(clean[:, :-1], next_tokens) - _log_probability(edited[:, :-1], next_tokens)
    return Effect(name="change of the loss", unit="nats per token", values=values)


def _require_pair(clean: Tensor, edited: Tensor) -> None:
    if clean.shape != edited.shape:
        raise ShapeError(
            got=f"clean logits {list(clean.shape)} and edited ones {list(edited.shape)}",
            expected="logits of the same tokens",
            do="run both on the same text",
        )


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _column(logits: Tensor, token: int | Tensor) -> Tensor:
    if isinstance(token, int):
        return logits[..., token]
    return logits.gather(-1, token[:, None, None].expand(-1, logits.shape[1], 1)).squeeze(-1)


def _log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    return _precise(logits).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
