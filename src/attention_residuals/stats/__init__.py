"""Statistics of traces, each with its range and the meaning of both ends."""

from attention_residuals.stats.adjusted import Ancova, ancova, restoration
from attention_residuals.stats.agreement import Agreement, edge_agreement, edge_effects, rank_correlation
from attention_residuals.stats.attribution import KeySplit, key_split, logit_attribution
from attention_residuals.stats.bootstrap import Interval, bootstrap
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
from attention_residuals.stats.experts import (
    ExpertRouting,
    expert_loads,
    routing_by_expert,
    tokens_of_expert,
)
from attention_residuals.stats.families import benjamini_hochberg, benjamini_yekutieli, max_t
from attention_residuals.stats.gradients import gradient_magnitude
from attention_residuals.stats.lexical import LexicalBaseline, clr, lexical_baseline
from attention_residuals.stats.mixing import MixingMatrix, mixing_matrix, semiseparable_order, writer_weights
from attention_residuals.stats.paired import EffectSize, SignFlip, effect_size, sign_flip
from attention_residuals.stats.pairs import PairDistance, pair_contrast, pair_distance
from attention_residuals.stats.population import SinkScores, input_dependence, sink_scores
from attention_residuals.stats.power import check_items, needed_items, paired_power
from attention_residuals.stats.power_law import PowerLaw, compute_multiplier, power_law
from attention_residuals.stats.queries import Queries, queries
from attention_residuals.stats.routing import (
    Routing,
    average_routing,
    output_magnitude,
    site_means,
    token_routing,
)
from attention_residuals.stats.seeds import (
    RandomEffects,
    needed_seeds,
    random_effects,
    seed_interval,
    sign_agreement,
)
from attention_residuals.stats.spread import normalised_entropy, perplexity, uniform_excess
from attention_residuals.stats.units import crossed_effects, item_means

__all__ = [
    "Agreement",
    "Ancova",
    "Collapse",
    "CollapseMonitor",
    "Distance",
    "EffectSize",
    "ExpertRouting",
    "Interval",
    "KeySplit",
    "LexicalBaseline",
    "MixingMatrix",
    "PairDistance",
    "PowerLaw",
    "Queries",
    "RandomEffects",
    "Routing",
    "RoutingWarning",
    "SignFlip",
    "SinkScores",
    "ancova",
    "average_routing",
    "benjamini_hochberg",
    "benjamini_yekutieli",
    "bootstrap",
    "check_items",
    "clr",
    "coherence",
    "collapsed",
    "compute_multiplier",
    "contributions",
    "crossed_effects",
    "edge_agreement",
    "edge_effects",
    "effect_size",
    "effective_distance",
    "embedding_share",
    "expert_loads",
    "gradient_magnitude",
    "input_dependence",
    "item_means",
    "key_split",
    "l1_proximity",
    "lexical_baseline",
    "locality",
    "logit_attribution",
    "max_t",
    "mixing_matrix",
    "needed_items",
    "needed_seeds",
    "norm_shares",
    "normalised_entropy",
    "output_magnitude",
    "pair_contrast",
    "pair_distance",
    "paired_power",
    "perplexity",
    "power_law",
    "projection_shares",
    "queries",
    "random_effects",
    "rank_correlation",
    "reach_back",
    "restoration",
    "routing_by_expert",
    "seed_interval",
    "semiseparable_order",
    "sign_agreement",
    "sign_flip",
    "sink_scores",
    "site_means",
    "source_distances",
    "token_routing",
    "tokens_of_expert",
    "uniform_excess",
    "writer_contributions",
    "writer_weights",
]
