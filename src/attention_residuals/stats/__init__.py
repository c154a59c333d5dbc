"""Statistics of traces, each with its range and the meaning of both ends."""

from attention_residuals.stats.agreement import Agreement, edge_agreement, edge_effects, rank_correlation
from attention_residuals.stats.attribution import KeySplit, key_split, logit_attribution
from attention_residuals.stats.collapse import Collapse, CollapseMonitor, RoutingWarning, collapsed
from attention_residuals.stats.contributions import (
    coherence,
    contributions,
    l1_proximity,
    norm_shares,
    projection_shares,
    writer_contributions,
)
from attention_residuals.stats.depth import (
    Distance,
    effective_distance,
    embedding_share,
    locality,
    reach_back,
    source_distances,
)
from attention_residuals.stats.lexical import LexicalBaseline, clr, lexical_baseline
from attention_residuals.stats.mixing import MixingMatrix, mixing_matrix, semiseparable_order, writer_weights
from attention_residuals.stats.pairs import PairDistance, pair_contrast, pair_distance
from attention_residuals.stats.population import SinkScores, input_dependence, sink_scores
from attention_residuals.stats.queries import Queries, queries
from attention_residuals.stats.routing import (
    Routing,
    average_routing,
    output_magnitude,
    site_means,
    token_routing,
)
from attention_residuals.stats.spread import normalised_entropy, perplexity, uniform_excess

__all__ = [
    "Agreement",
    "Collapse",
    "CollapseMonitor",
    "Distance",
    "KeySplit",
    "LexicalBaseline",
    "MixingMatrix",
    "PairDistance",
    "Queries",
    "Routing",
    "RoutingWarning",
    "SinkScores",
    "average_routing",
    "clr",
    "coherence",
    "collapsed",
    "contributions",
    "edge_agreement",
    "edge_effects",
    "effective_distance",
    "embedding_share",
    "input_dependence",
    "key_split",
    "l1_proximity",
    "lexical_baseline",
    "locality",
    "logit_attribution",
    "mixing_matrix",
    "norm_shares",
    "normalised_entropy",
    "output_magnitude",
    "pair_contrast",
    "pair_distance",
    "perplexity",
    "projection_shares",
    "queries",
    "rank_correlation",
    "reach_back",
    "semiseparable_order",
    "sink_scores",
    "site_means",
    "source_distances",
    "token_routing",
    "uniform_excess",
    "writer_contributions",
    "writer_weights",
]
