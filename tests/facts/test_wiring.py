"""The schedule against the paper's equations, and the usual misreadings, each of which must be caught."""

from dataclasses import dataclass

import pytest
import torch
from closeness import assert_close, distance
from paper_oracle import states

from attention_residuals.layers import OUTPUT, RMSNorm
from attention_residuals.layers.residual import AttnRes, AttnResRule, SourceState
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.ops import DepthRead

NUM_LAYERS, WIDTH = 4, 12
block_sizes = pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])


@dataclass(frozen=True)
class Problem:
    """Random sublayers and readers, with logits far from uniform and far from one-hot."""

    embedding: torch.Tensor
    matrices: torch.Tensor
    queries: torch.Tensor
    gains: torch.Tensor

    @classmethod
    def make(cls):
        sites = 2 * NUM_LAYERS + 1
        return cls(
            embedding=torch.randn(2, 3, WIDTH).double(),
            matrices=torch.randn(sites - 1, WIDTH, WIDTH).double() / WIDTH**0.5,
            queries=torch.randn(sites, WIDTH).double() / WIDTH**0.5,
            gains=1 + torch.rand(sites, WIDTH).double(),
        )

    def functions(self):
        return [lambda x, m=matrix: torch.tanh(x @ m) for matrix in self.matrices]


class Identity(torch.nn.Module):
    def forward(self, mixed):
        return mixed


def states_of(rule: AttnResRule, problem: Problem) -> list[torch.Tensor]:
    rule.double()
    for reader, query, gain in zip(rule.readers.values(), problem.queries, problem.gains, strict=True):
        reader.pseudo_query.data, reader.key_gain.data = query.clone(), gain.clone()
    norm = RMSNorm(WIDTH).double()
    mixed, state = [], rule.open(problem.embedding)
    for site, function in zip(rule.sites(), problem.functions(), strict=False):
        mixed.append(rule.read(state, site, Identity())[0][0])
        (normalised,), state = rule.read(state, site, norm)
        state = rule.write(state, site, function(normalised))
    mixed.append(rule.read(state, OUTPUT, Identity())[0][0])
    return mixed


def furthest(actual, expected) -> float:
    return max(distance(one, other) for one, other in zip(actual, expected, strict=True))


@block_sizes
def test_every_state_is_the_one_of_the_papers_equations(size):
    problem = Problem.make()
    expected = states(problem.embedding, problem.functions(), problem.queries, problem.gains, size)
    actual = states_of(AttnRes(sublayers_per_block=size).build(num_layers=NUM_LAYERS, width=WIDTH), problem)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)


class Misreading(AttnResRule):
    """Reads whatever is there, so that the equations and not the count of sources must catch it."""

    def sources(self, state, site):
        return state.blocks + state.open_block


class BoundaryOneLate(Misreading):
    def write(self, state, site, output, tap=None):
        block = state.open_block[0] + output if state.open_block else output
        closes = site.sublayer > 0 and site.sublayer % self.config.sublayers_per_block == 0
        return SourceState((*state.blocks, block)) if closes else SourceState(state.blocks, (block,))


class SnapshotOfTheMix(Misreading):
    """Closes a block with the mixed vector instead of the sum."""

    def read(self, state, site, norm, tap=None):
        if site.sublayer and site.sublayer % self.config.sublayers_per_block == 0 and site != OUTPUT:
            mixed = super().read(state, site, Identity())[0][0]
            inputs, _ = super().read(state, site, norm, tap)
            return inputs, SourceState((*state.blocks[:-1], mixed))
        return super().read(state, site, norm, tap)


class NoOutputRead(Misreading):
    def read(self, state, site, norm, tap=None):
        if site == OUTPUT:
            return (norm((state.blocks + state.open_block)[-1]),), state
        return super().read(state, site, norm, tap)


class PlainSumAtTheOutput(Misreading):
    def read(self, state, site, norm, tap=None):
        if site == OUTPUT:
            return (norm(sum(state.blocks + state.open_block)),), state
        return super().read(state, site, norm, tap)


class NormalisedValues(Misreading):
    def attend(self, sources, site, part, gain, eps):
        read = super().attend(sources, site, part, None, None)
        terms = zip(read.weights, read.inverse_norms, sources, strict=True)
        mix = sum((weight * inverse)[..., None] * source for weight, inverse, source in terms)
        if gain is not None:
            mix = torch.nn.functional.rms_norm(mix, gain.shape, gain, eps)
        return DepthRead(mix, read.logits, read.inverse_norms)


class NoKeyNorm(Misreading):
    def attend(self, sources, site, part, gain, eps):
        reader = self.readers[reader_name(site, part)]
        scores = torch.stack([source @ (reader.pseudo_query * reader.key_gain) for source in sources])
        mix = sum(w[..., None] * s for w, s in zip(scores.softmax(0), sources, strict=True))
        if gain is not None:
            mix = torch.nn.functional.rms_norm(mix, gain.shape, gain, eps)
        return DepthRead(mix, scores, torch.ones_like(scores))


class CumulativeSources(Misreading):
    def write(self, state, site, output, tap=None):
        total = (state.blocks + state.open_block)[-1] + output
        if (site.sublayer + 1) % self.config.sublayers_per_block == 0:
            return SourceState((*state.blocks, total))
        return SourceState(state.blocks, (total,))


class EmbeddingTwice(Misreading):
    """The first open block starts as the embedding."""

    def write(self, state, site, output, tap=None):
        return super().write(state, site, output + state.blocks[0] if site.sublayer == 0 else output, tap)


class EmbeddingNever(Misreading):
    def read(self, state, site, norm, tap=None):
        if site.sublayer == 0:
            return super().read(state, site, norm, tap)
        inputs, _ = super().read(state._replace(blocks=state.blocks[1:] or state.open_block), site, norm, tap)
        return inputs, state


class FirstReadOfABlockSeesAnEmptySum(Misreading):
    def read(self, state, site, norm, tap=None):
        if state.open_block:
            return super().read(state, site, norm, tap)
        empty = state._replace(open_block=(torch.zeros_like(state.blocks[0]),))
        return super().read(empty, site, norm, tap)[0], state


class LayersCountedAsSublayers(Misreading):
    def write(self, state, site, output, tap=None):
        block = state.open_block[0] + output if state.open_block else output
        closes = site.kind == "mlp" and (site.layer + 1) % self.config.sublayers_per_block == 0
        return SourceState((*state.blocks, block)) if closes else SourceState(state.blocks, (block,))


MISREADINGS = [
    BoundaryOneLate,
    SnapshotOfTheMix,
    NoOutputRead,
    PlainSumAtTheOutput,
    NormalisedValues,
    NoKeyNorm,
    CumulativeSources,
    EmbeddingTwice,
    EmbeddingNever,
    FirstReadOfABlockSeesAnEmptySum,
    LayersCountedAsSublayers,
]


@pytest.mark.parametrize("wrong", MISREADINGS, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_each_misreading_is_caught_by_the_equations(wrong, size):
    problem = Problem.make()
    expected = states(problem.embedding, problem.functions(), problem.queries, problem.gains, size)
    actual = states_of(wrong(AttnRes(sublayers_per_block=size), NUM_LAYERS, WIDTH), problem)
    assert furthest(actual, expected) > 1e-2
