"""Attention residuals in two phases: finished sources for many sites at once, then each site's live ones."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.norm import foldable
from attention_residuals.layers.residual.attnres import AttnResRule
from attention_residuals.layers.residual.interface import Norm, ResidualRule
from attention_residuals.layers.residual.sources import DepthReader, SourceState, read_often, reader_name
from attention_residuals.layers.tap import Site, Tap
from attention_residuals.ops import DepthRead, Phase1, phase_1, read_open_block

__all__ = ["TwoPhaseRule", "TwoPhaseState"]


class TwoPhaseState(NamedTuple):
    """The sources, and what phase 1 has found for the sites of this partition."""

    blocks: tuple[Tensor, ...]
    open_block: tuple[Tensor, ...] = ()
    phase_1: tuple[Phase1, ...] = ()


class TwoPhaseRule(AttnResRule):
    """Another schedule of a rule's reads, with the rule's own parameters: the same numbers, other traffic.

    At the first site of a partition, the sources that are finished by then are read once for all its sites;
    each site adds the sources that have come since. Give it to a model as ``residual``. It begins with the
    rule's ``backend``.

    Args:
        rule: The rule of a model.
        partition: Sublayers that share a phase 1; need not divide the depth. By default those of a block,
            and in the full form the square root of their number, where traffic is least.

    Raises:
        ConfigError: A rule of another kind, or a partition below 1.

    Source:
        Attention Residuals (arXiv:2603.15031), algorithm 1; full form: appendix B.

    Example:
        >>> from attention_residuals import AttnRes, Decoder, presets
        >>> model = Decoder(presets.scaled(4, vocab_size=9, residual=AttnRes(sublayers_per_block=2)))
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> torch.allclose(model(tokens, residual=TwoPhaseRule(model.residual)), model(tokens), atol=1e-6)
        True
    """

    def __init__(self, rule: ResidualRule[Any], partition: int | None = None) -> None:
        if type(rule) is not AttnResRule:
            raise ConfigError(
                got=f"a {type(rule).__name__} to read in two phases",
                expected="the rule of AttnRes, whose queries do not depend on the input",
                do="run this model in one phase",
            )
        ResidualRule.__init__(self, rule.num_layers, rule.width)
        self.config, self.readers, self._seen = rule.config, rule.readers, rule._seen
        self.backend = rule.backend
        size = rule.config.sublayers_per_block
        default = size if size > 1 else round(math.sqrt(2 * rule.num_layers))
        self.partition = default if partition is None else partition
        if not is_count(self.partition):
            raise ConfigError(
                got=f"partition={partition!r}",
                expected="1 or more sublayers",
                do="leave it out for the default",
            )

    def opened(self, embedding: Tensor, tap: Tap | None) -> TwoPhaseState:
        """Starts with the embedding."""
        return TwoPhaseState(blocks=(read_often(embedding, tap),))

    def written(self, state: TwoPhaseState, site: Site, output: Tensor, tap: Tap | None) -> TwoPhaseState:
        """Adds to the open block, and keeps what phase 1 has found."""
        grown: SourceState = super().written(state, site, output, tap)
        return TwoPhaseState(*grown, state.phase_1)

    def read(
        self, state: TwoPhaseState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], TwoPhaseState]:
        """Reads the live sources of a site, and at the first of a partition the finished ones for all."""
        sources = self.sources(state, site)
        number = self.num_written(site)
        if number % self.partition == 0:
            state = state._replace(phase_1=(self._phase_1(state, number),))
        folded = foldable(norm)
        gain, eps = (None, None) if folded is None else folded
        finished = state.phase_1[0]
        reader = self._reader(site)
        result = read_open_block(
            finished,
            number % self.partition,
            sources[len(finished.inverse_norms) :] or None,
            reader.pseudo_query,
            reader.key_gain,
            eps=self.config.key_eps,
            output_gain=gain,
            output_eps=eps,
            backend=self.backend,
        )
        if folded is None:
            result = DepthRead(norm(self._like_parameters(result.mix)), result.logits, result.inverse_norms)
        changed = None if tap is None else self._offered(sources, sources, result, site, "in", tap)
        if changed is not None:
            return (norm(self._like_parameters(changed)),), state
        return (self._like_parameters(result.mix),), state

    def _phase_1(self, state: TwoPhaseState, number: int) -> Phase1:
        """Reads the finished sources for the sites from this one on to the end of the partition."""
        readers = [self._reader(site) for site in self.sites()[number : number + self.partition]]
        known = state.phase_1[0].inverse_norms if state.phase_1 else None
        return phase_1(
            state.blocks,
            torch.stack([reader.pseudo_query for reader in readers]),
            torch.stack([reader.key_gain for reader in readers]),
            eps=self.config.key_eps,
            inverse_norms=known,
            backend=self.backend,
        )

    def _reader(self, site: Site) -> DepthReader:
        reader = self.readers[reader_name(site)]
        assert isinstance(reader, DepthReader)
        return reader
