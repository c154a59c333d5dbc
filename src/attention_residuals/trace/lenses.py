"""Logit lenses: what a model would predict if it ended at a read, with one source, or with what it has by then.

A model with attention residuals has no stream that persists, so there is no "the" logit lens. There are four,
each with a name of its own. All recompute the last norm for the vector that they look at, and so are no
decomposition of the logits; ``stats`` has that one, with the shared norm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, nearest
from attention_residuals.layers.residual import AttnResRule
from attention_residuals.layers.tap import EMBEDDING, OUTPUT, Onlooker, Read
from attention_residuals.models import LanguageModel
from attention_residuals.trace.reads import contribution
from attention_residuals.trace.site import source_identity

__all__ = ["TARGETS", "Lens", "LensReading", "Looking", "SourceLens", "lens", "lens_through"]

TARGETS = ("state", "open block", "truncated output")


@dataclass(frozen=True, kw_only=True)
class SourceLens:
    """Looks at one source, as it is, wherever it is read.

    Args:
        source: Its name, such as ``"embedding"``, ``"B2"`` or ``"L3.mlp"``.
    """

    source: str


Lens = str | SourceLens
"""What to look at: one of ``TARGETS``, or a source.

``"state"``: the mix that a site reads. ``"open block"``: the sum so far of the block that is open at a site
(in the full form, the newest output). ``"truncated output"``: what the output read makes of the sources that
are there by then, with its own query: the model's natural early exit.
"""


class LensReading(NamedTuple):
    """What the model would predict at each site, and how far that is from what it predicts in the end.

    Sites that do not hold the target are left out.
    """

    sites: tuple[str, ...]
    top_tokens: Int[Tensor, "R B T N"]
    """The likeliest next tokens."""
    top_probabilities: Float[Tensor, "R B T N"]
    log_probabilities: Float[Tensor, "R B T"]
    """Of the token that comes next, in nats, at most 0; NaN at the last token of each row."""
    divergences: Float[Tensor, "R B T"]
    """KL from the model's own prediction to the lens's, in nats: 0 says the same, no upper end."""


def lens(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    target: Lens = "state",
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    num_top: int = 5,
) -> LensReading:
    """Looks at what a model would predict at each site on the way.

    Args:
        model: Any language model of this library.
        tokens: What it reads.
        target: What is taken for the last state.
        mask: True for real tokens.
        num_top: How many of the likeliest tokens to keep, 1 to V.

    Raises:
        ConfigError: An unknown target or source, or a rule that has no truncated output.

    Source:
        nostalgebraist, "interpreting GPT: the logit lens" (2020), for models with a stream.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> reading = lens(model, torch.tensor([[5, 6, 7]]))
        >>> reading.sites[-1], reading.divergences[-1].max().item() < 1e-6
        ('output', True)
    """
    return lens_through(model, tokens, target, lambda site, state: state, mask=mask, num_top=num_top)


@torch.no_grad()
def lens_through(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    target: Lens,
    translate: Callable[[str, Tensor], Tensor],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    num_top: int = 5,
) -> LensReading:
    """Looks as ``lens`` does, at what a translator makes of each vector.

    Args:
        model: Any language model of this library.
        tokens: What it reads.
        target: What is taken for the last state.
        translate: Takes the name of a site and the vectors there, and returns what is to be unembedded.
        mask: True for real tokens.
        num_top: How many of the likeliest tokens to keep, 1 to V.
    """
    look = Looking(model, target)
    final = model(tokens, mask=mask, tap=look).float().log_softmax(-1)
    look.require_found()
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)[..., None]
    top_tokens, top_probabilities, log_probabilities, divergences = [], [], [], []
    for site, state in zip(look.sites, look.states, strict=True):
        predicted = model.unembed(translate(site, state)).float().log_softmax(-1)
        best = predicted.topk(num_top, dim=-1)
        top_tokens.append(best.indices)
        top_probabilities.append(best.values.exp())
        own = predicted.gather(-1, following).squeeze(-1)
        own[:, -1] = torch.nan
        log_probabilities.append(own)
        divergences.append((final.exp() * (final - predicted)).sum(-1).clamp_min(0.0))
    return LensReading(
        tuple(look.sites),
        torch.stack(top_tokens),
        torch.stack(top_probabilities),
        torch.stack(log_probabilities),
        torch.stack(divergences),
    )


class Looking(Onlooker):
    """A tap that keeps the vectors a lens looks at.

    Args:
        model: Whose rule says what there is to look at.
        target: What is kept, at each site that holds it.

    Raises:
        ConfigError: An unknown target, or a rule that has no truncated output.
    """

    def __init__(self, model: LanguageModel, target: Lens) -> None:
        if not isinstance(target, SourceLens) and target not in TARGETS:
            raise ConfigError(
                got=f"target {target!r}",
                expected=f"one of {TARGETS} or SourceLens(source=...)",
                do=nearest(str(target), TARGETS),
            )
        if target == "truncated output" and not isinstance(model.residual, AttnResRule):
            raise ConfigError(
                got=f"the truncated output of {type(model.residual).__name__}",
                expected="AttnRes, whose output read takes any number of sources",
                do="look at 'state' or 'open block'",
            )
        self.rule, self.target = model.residual, target
        self.sites: list[str] = []
        self.states: list[Tensor] = []
        self._names: dict[str, None] = {}

    def read(self, read: Read) -> Read:
        """Keeps the target, if the site holds it."""
        self._names |= dict.fromkeys(source_identity(name) for name in read.source_names)
        state = self._state(read)
        if state is not None and read.part in ("in", "q"):
            self.sites.append(str(read.site))
            self.states.append(state.to(read.values[0].dtype))
        return read

    def _state(self, read: Read) -> Tensor | None:
        if self.target == "state":
            parts = zip(read.weights, read.values, strict=True)
            return torch.stack([contribution(weight, value) for weight, value in parts]).sum(0)
        if self.target == "open block":
            newest = read.source_names[-1]
            is_open = ".open@" in newest or newest == read.writers[-1] != EMBEDDING
            return read.values[-1] if is_open else None
        if self.target == "truncated output":
            assert isinstance(self.rule, AttnResRule)
            return self.rule.attend(read.values, OUTPUT, "in", None, None).mix
        assert isinstance(self.target, SourceLens)
        places = [source_identity(name) for name in read.source_names]
        return read.values[places.index(self.target.source)] if self.target.source in places else None

    def require_found(self) -> None:
        """Refuses a target that no site held."""
        if not self.states:
            name = self.target.source if isinstance(self.target, SourceLens) else str(self.target)
            raise ConfigError(
                got=f"{name!r}, which no site reads",
                expected="a source of this model",
                do=nearest(name, self._names),
            )
