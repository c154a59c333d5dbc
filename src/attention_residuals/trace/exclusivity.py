"""Freedom: how far the weights of one read can move while the predictions stay what they are."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, EditError, ShapeError, is_count, is_finite, nearest
from attention_residuals.layers.tap import Onlooker, Read
from attention_residuals.models import LanguageModel
from attention_residuals.trace.effects import divergence as divergence_of
from attention_residuals.trace.sweeps import SourcesOf, reads_of

__all__ = ["Freedom", "freedom"]

BISECTIONS = 12


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """Other weights for one read, far from its own, with which the model predicts nearly the same.

    All numbers are means over tokens that count, real ones by default. The weights are what a search has found:
    others may be farther.

    Args:
        site: Where the read is.
        part: Of the site.
        source_names: What is read.
        clean_weights: The model's own weights.
        weights: The weights found, >= 0 and 1 in all; the model's own at tokens that do not count.
        total_variation: Between both, 0 to 1: the share of the weight that has moved. 0: the predictions pin
            the weights down; ``farthest``: they say nothing about what the model needs to read.
        farthest: The total variation of all weight on the source that had the least: what any weights can
            reach, 1 - 1/S for S sources with equal weights.
        divergence: Mean KL(clean || edited) with the weights found, nats, 0 up to the bound.
        uniform_total_variation: How far plain uniform weights are, 0 to 1.
        uniform_divergence: What those cost, nats, 0 or more.
    """

    site: str
    part: str
    source_names: tuple[str, ...]
    clean_weights: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"]
    weights: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"]
    total_variation: float
    farthest: float
    divergence: float
    uniform_total_variation: float
    uniform_divergence: float


def freedom(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    site: str,
    *,
    part: str | None = None,
    divergence: float = 0.01,
    num_steps: int = 50,
    learning_rate: float = 0.3,
    mask: Bool[Tensor, "B T"] | None = None,
    counted: Bool[Tensor, "B T"] | None = None,
    seed: int = 0,
) -> Freedom:
    """Searches for weights far from a read's own with which the model still predicts the same.

    Where such weights exist, the model's own are one way among many to its predictions, and are no
    explanation of them alone. That weights can be exchanged from outside, token by token, does not say that
    a trained query could give them.

    Args:
        model: Any language model; its parameters and their gradients stay as they are.
        tokens: Texts.
        site: Such as ``"L3.mlp"`` or ``"output"``.
        part: ``"q"``, ``"k"`` or ``"v"`` where the site reads separately for them.
        divergence: The most that the mean KL(clean || edited) over tokens that count may be, nats, above 0.
        num_steps: Forward and backward passes of the search, 1 or more.
        learning_rate: Of Adam, in logits a step, above 0.
        mask: True for real tokens.
        counted: True for tokens whose weights may move and whose predictions must stay, such as the one before
            an answer; all real ones by default.
        seed: Of the noise that the search starts with.

    Raises:
        ConfigError: A site or part that the model does not have, a read of one source, a number out of range.
        EditError: Weights that are not shares of 1.
        ShapeError: No real token that counts.

    Source:
        Jain and Wallace, "Attention is not Explanation" (arXiv:1902.10186), for attention over tokens; what
        it can and cannot show: Wiegreffe and Pinter, "Attention is not not Explanation" (arXiv:1908.04626).

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> found = freedom(model, torch.tensor([[5, 6, 7]]), "L1.mlp", divergence=0.01, num_steps=5)
        >>> 0 < found.total_variation <= found.farthest, found.divergence <= 0.01
        (True, True)
    """
    _require_in_range(divergence, num_steps, learning_rate)
    read = _read_named(model, site, part)
    search = _Search(model, tokens, mask, counted, read)
    found = search.farthest_within(divergence, num_steps, learning_rate, seed)
    uniform = search.at_real(torch.full_like(search.clean, 1 / len(read.sources)))
    with torch.no_grad():
        return Freedom(
            site=read.site,
            part=read.part,
            source_names=search.source_names,
            clean_weights=search.clean,
            weights=found,
            total_variation=search.moved(found).item(),
            farthest=search.of_real(1 - search.clean.amin(0)).item(),
            divergence=search.cost(found).item(),
            uniform_total_variation=search.moved(uniform).item(),
            uniform_divergence=search.cost(uniform).item(),
        )


class _Search:
    """One read of one model on one text, with the distance and the cost of other weights for it."""

    def __init__(
        self,
        model: LanguageModel,
        tokens: Tensor,
        mask: Tensor | None,
        counted: Tensor | None,
        read: SourcesOf,
    ) -> None:
        self.model, self.tokens, self.mask, self.place = model, tokens, mask, read
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        self.real = real if counted is None else real & counted
        if not self.real.any():
            raise ShapeError(
                got="a mask without a real token that counts",
                expected="at least one",
                do="mark the tokens that count",
            )
        with torch.no_grad():
            looker = _Forced(read, None)
            model(tokens, mask=mask, tap=looker)
            self.clean, self.source_names = looker.clean, looker.source_names
            self._require_shares()
            # By the arithmetic of an edited read, so that the model's own weights cost exactly 0.
            self.logits = self._run(self.clean)

    def farthest_within(self, bound: float, num_steps: int, learning_rate: float, seed: int) -> Tensor:
        """Climbs in total variation, turns back where the bound is passed, and ends inside of it."""
        noise = torch.randn(self.clean.shape, generator=torch.Generator().manual_seed(seed))
        # Flatter than the model's own, so that the climb leads away from the heaviest source.
        free = 0.5 * self.clean.clamp_min(1e-6).log() + 0.1 * noise.to(self.clean)
        free.requires_grad_()
        climber = torch.optim.Adam([free], lr=learning_rate)
        best, best_moved = self.clean, 0.0
        for _ in range(num_steps):
            with torch.enable_grad():
                weights = self.at_real(free.softmax(0))
                moved, cost = self.moved(weights), self.cost(weights)
                # Total variation is flat once all weight is on sources that have gained, however many; the
                # squared distance goes on rising towards the one that had the least.
                squared = self.of_real((weights - self.clean).square().sum(0))
                loss = (cost / bound - 1).clamp_min(0.0) - moved - squared
                (free.grad,) = torch.autograd.grad(loss, [free])
            if cost.item() <= bound and moved.item() > best_moved:
                best, best_moved = weights.detach(), moved.item()
            climber.step()
        with torch.no_grad():
            last = self._scaled_back(self.at_real(free.softmax(0)), bound)
            return last if self.moved(last).item() > best_moved else best

    def at_real(self, weights: Tensor) -> Tensor:
        """Returns weights that are the model's own at tokens that do not count."""
        return torch.where(self._over_heads(self.real), weights, self.clean)

    def moved(self, weights: Tensor) -> Tensor:
        """Measures the mean total variation between weights and the model's own."""
        return self.of_real((weights - self.clean).abs().sum(0) / 2)

    def cost(self, weights: Tensor) -> Tensor:
        """Measures the mean KL(clean || edited) that weights cost, with a pass of its own."""
        return divergence_of(self.logits, self._run(weights)).values[self.real].mean()

    def of_real(self, values: Tensor) -> Tensor:
        """Averages over real tokens, and heads where weights have them."""
        return values[self.real].mean()

    def _scaled_back(self, weights: Tensor, bound: float) -> Tensor:
        """Returns the last point found inside the bound on the line from the model's own weights to others."""
        if self.cost(weights).item() <= bound:
            return weights
        inside, inside_share, outside_share = self.clean, 0.0, 1.0
        for _ in range(BISECTIONS):
            share = (inside_share + outside_share) / 2
            point = self.clean.lerp(weights, share)
            # What is kept has been measured, so that the bound holds though the cost need not rise steadily.
            if self.cost(point).item() <= bound:
                inside, inside_share = point, share
            else:
                outside_share = share
        return inside

    def _run(self, weights: Tensor) -> Tensor:
        logits: Tensor = self.model(self.tokens, mask=self.mask, tap=_Forced(self.place, weights))
        return logits

    def _over_heads(self, real: Tensor) -> Tensor:
        return real if self.clean.ndim == 3 else real[..., None]

    def _require_shares(self) -> None:
        sums = self.clean.sum(0)
        if (self.clean < 0).any() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            raise EditError(
                got=f"weights that sum to {sums.mean().item():.2f} at {self.place.site}",
                expected="weights >= 0 whose sum is 1, which can be moved from source to source",
                do="choose a rule whose sources compete, such as AttnRes",
            )


class _Forced(Onlooker):
    """A tap that notes the weights of one read, and puts others in place of them."""

    clean: Tensor
    source_names: tuple[str, ...]

    def __init__(self, place: SourcesOf, weights: Tensor | None) -> None:
        self.place, self.weights = place, weights

    def read(self, read: Read) -> Read:
        """Puts the weights in place at the one read."""
        if (str(read.site), read.part) != (self.place.site, self.place.part):
            return read
        self.clean, self.source_names = read.weights.detach().clone(), read.source_names
        return read if self.weights is None else read._replace(weights=self.weights)


def _read_named(model: LanguageModel, site: str, part: str | None) -> SourcesOf:
    reads = reads_of(model)
    here = [read for read in reads if read.site == site]
    if not here:
        raise ConfigError(
            got=f"site {site!r}",
            expected="a site of this model",
            do=nearest(site, {read.site for read in reads}),
        )
    parts = [read.part for read in here]
    if (part is None and len(here) > 1) or (part is not None and part not in parts):
        raise ConfigError(
            got=f"part={part!r} at {site}", expected=f"one of {parts}", do="choose one read of the site"
        )
    read = here[0] if part is None else here[parts.index(part)]
    if len(read.sources) == 1:
        raise ConfigError(
            got=f"{site}, which reads {read.sources[0]!r} alone",
            expected="a read of two or more sources",
            do="choose a later site",
        )
    return read


def _require_in_range(divergence: float, num_steps: int, learning_rate: float) -> None:
    for name, number in (("divergence", divergence), ("learning_rate", learning_rate)):
        if not is_finite(number) or number <= 0:
            raise ConfigError(
                got=f"{name}={number!r}",
                expected="a number > 0",
                do="leave it out for the default",
            )
    if not is_count(num_steps):
        raise ConfigError(got=f"num_steps={num_steps!r}", expected="1 or more", do="pass 50 for a start")
