"""Cases for reads in two phases, and the same reads in one."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from attention_residuals.ops import reference
from attention_residuals.ops.two_phase import phase_1, read_open_block

ALL = ("cpu", "eager", "reference")
PLAIN = ("eager", "reference")
NORM = {"output_eps": 1e-3}
every_backend = pytest.mark.parametrize("backend", ALL)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sources and the vectors of all sites; the live sources are None, one tensor or several."""

    blocks: list
    live: list
    queries: torch.Tensor
    gains: torch.Tensor
    output_gain: torch.Tensor

    def tensors(self):
        return [*self.blocks, *self.live, self.queries, self.gains, self.output_gain]

    def to(self, dtype):
        def convert(tensor):
            return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        blocks, live = ([convert(source) for source in sources] for sources in (self.blocks, self.live))
        vectors = [convert(vector) for vector in (self.queries, self.gains, self.output_gain)]
        return Case(blocks=blocks, live=live, queries=vectors[0], gains=vectors[1], output_gain=vectors[2])


def case(num_blocks, num_live, num_queries, tokens, width, dtype=torch.float32, grad=False):
    def source():
        return torch.randn(*tokens, width, dtype=torch.float64).to(dtype).requires_grad_(grad)

    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    vectors = [
        torch.randn(num_queries, width, dtype=torch.float64) / width**0.5,
        1 + torch.rand(num_queries, width, dtype=torch.float64),
        1 + torch.rand(width, dtype=torch.float64),
    ]
    queries, gains, output_gain = (vector.to(kind).requires_grad_(grad) for vector in vectors)
    return Case(
        blocks=[source() for _ in range(num_blocks)],
        live=[source() for _ in range(num_live)],
        queries=queries,
        gains=gains,
        output_gain=output_gain,
    )


def in_two_phases(given, backend, sites=None, with_norm=True, known=None):
    """Reads of the sites, [mix, logits, inverse norms] each."""
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend=backend, inverse_norms=known)
    live = given.live[0] if len(given.live) == 1 else given.live or None
    options = {"output_gain": given.output_gain, **NORM} if with_norm else {}
    return [
        read_open_block(
            found, site, live, given.queries[site], given.gains[site], eps=1e-6, backend=backend, **options
        )
        for site in sites or range(len(given.queries))
    ]


def in_one_phase(given, sites=None, with_norm=True):
    options = {"output_gain": given.output_gain, **NORM} if with_norm else {}
    return [
        reference.depth_attention(
            [*given.blocks, *given.live], given.queries[site], given.gains[site], eps=1e-6, **options
        )
        for site in sites or range(len(given.queries))
    ]


def flat(reads):
    return [tensor for read in reads for tensor in read]


def gradients(reads, inputs):
    """Gradients of a sum that sees every number of mixes and weights differently."""
    total = 0.0
    for number, read in enumerate(reads):
        for output in (read.mix, read.weights):
            total = (
                total + (output * torch.sin(torch.arange(output.numel()) + number).view(output.shape)).sum()
            )
    return torch.autograd.grad(total, inputs)


shapes = st.tuples(
    st.sampled_from([1, 2, 3, 8, 29, 40]),  # finished sources
    st.sampled_from([0, 1, 3]),  # live ones
    st.sampled_from([1, 2, 5, 24]),  # sites
    st.sampled_from([(1,), (2, 3), (63,), (0,)]),
    st.sampled_from([1, 60, 1000]),
)
