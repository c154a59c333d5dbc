"""Models, texts and edits that the tests of interventions share."""

import pytest
import torch

from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    Delta,
    DenseFormer,
    Highway,
    HyperConnections,
    Inkling2,
    InputQuery,
    ManifoldHyperConnections,
    MultiHead,
    RawKeys,
    Sigmoid,
    SlidingWindow,
    StandardResidual,
    StaticMixing,
    ValueQuery,
)
from attention_residuals.models import Decoder, DecoderConfig
from attention_residuals.ops import weighted_sum
from attention_residuals.trace import (
    Drop,
    Force,
    Mean,
    MeanWrite,
    Patch,
    PatchWeights,
    PatchWrite,
    RemoveWriter,
    ReplaceQuery,
    Resample,
    ResampleWrite,
    RotateQuery,
    ScaleQuery,
    Shuffle,
    Skip,
    Static,
    Temperature,
    Zero,
    ZeroWrite,
    dataset_mean,
    intervene,
    reference_of,
)

VOCABULARY = 23
TOKENS = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
BUT_FIRST = ("*", "!L0.attention")

RULES = {
    "standard": StandardResidual(),
    "full": AttnRes(sublayers_per_block=1),
    "block": AttnRes(sublayers_per_block=4),
    "odd block": AttnRes(sublayers_per_block=3),
    "input query": InputQuery(sublayers_per_block=2),
    "static": StaticMixing(),
    "static, not normalised": StaticMixing(normalised=False),
    "sigmoid": Sigmoid(),
    "sigmoid, normalised": Sigmoid(normalised=True),
    "raw keys": RawKeys(),
    "window": SlidingWindow(window=2),
    "heads": MultiHead(num_heads=2),
    "value query": ValueQuery(),
    "delta": Delta(sublayers_per_block=2),
    "inkling2": Inkling2(sublayers_per_block=2),
    "cumulative": Cumulative(),
    "denseformer": DenseFormer(),
    "hyper-connections": HyperConnections(streams=2),
    "mHC": ManifoldHyperConnections(streams=2),
    "highway": Highway(),
}
SOFTMAX = ["full", "block", "odd block", "input query", "static", "sigmoid, normalised", "raw keys", "window",
           "heads", "value query", "inkling2", "cumulative"]  # fmt: skip
SCORED = [*SOFTMAX, "sigmoid", "delta"]
CANNOT = (Drop, Force, Temperature, ScaleQuery, RotateQuery, ReplaceQuery)  # without scores
every_rule = pytest.mark.parametrize("rule", RULES)
softmax_rules = pytest.mark.parametrize("rule", SOFTMAX)
_MODELS: dict = {}
_REFERENCES: dict = {}


def model_of(rule: str, *, eps: float = 1e-6, depth: int = 3, fresh: bool = False) -> Decoder:
    """A small float64 model with weights that matter; the same one at every call unless a fresh one is asked for."""
    key = (rule, eps, depth)
    if key not in _MODELS or fresh:
        config = DecoderConfig(
            vocab_size=VOCABULARY, num_layers=depth, width=12, num_heads=2, num_kv_heads=1, head_width=6,
            mlp_width=16, max_tokens=32, norm_eps=eps, residual=RULES[rule],
        )  # fmt: skip
        torch.manual_seed(3)
        model = Decoder(config).double().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.startswith("residual"):
                parameter += torch.randn_like(parameter) * (0.4 if "query" in name else 0.1)
            elif parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) / 3)
        if fresh:
            return model
        _MODELS[key] = model
    return _MODELS[key]


class Looker:
    """Keeps every event, returns each as it came."""

    def __init__(self):
        self.reads, self.writes = {}, {}

    def begin(self, run):
        pass

    def read(self, read):
        self.reads[f"{read.site}.{read.part}"] = read
        return read

    def write(self, write):
        self.writes[write.writer] = write.output
        return write

    def state(self, name):
        read = self.reads[name]
        return weighted_sum(read.weights, read.values)


def look(model, edits, tokens=TOKENS, **options) -> Looker:
    looker = Looker()
    intervene(model, tokens, edits, tap=looker, **options)
    return looker


def references(model):
    if model not in _REFERENCES:
        run = reference_of(model, OTHER)
        _REFERENCES[model] = {"paired": run, "other": run, "mean": dataset_mean(model, [TOKENS, OTHER])}
    return _REFERENCES[model]


# one edit of each verb, at a read (a write) of the middle of a block model of three layers
EXAMPLES = {
    "drop": Drop(sites="L2.mlp", sources="B1"),
    "zero": Zero(sites="L2.mlp", sources="B1"),
    "mean": Mean(sites="L2.mlp", sources="B2"),
    "mean, routed anew": Mean(sites="L2.mlp", sources="B2", reroute=True),
    "resample": Resample(sites="L2.mlp", sources="*"),
    "resample, routed anew": Resample(sites="L2.mlp", sources="*", row=0, reroute=True),
    "patch": Patch(sites="L2.mlp", sources="B1"),
    "patch, routed anew": Patch(sites="L2.mlp", sources="B1", reroute=True),
    "remove": RemoveWriter(sites="L2.mlp", writer="L0.mlp"),
    "remove, routed anew": RemoveWriter(sites="L2.mlp", writer="L0.mlp", reroute=True),
    "one-hot": Force(sites="L2.mlp", to="B1"),
    "uniform": Force(sites="L2.mlp"),
    "a row": Force(sites="L2.mlp", to=(0.5, 0.2, 0.3)),
    "patched weights": PatchWeights(sites="L2.mlp"),
    "static": Static(sites="L2.mlp"),
    "shuffle": Shuffle(sites="L2.mlp"),
    "temperature": Temperature(sites="L2.mlp", temperature=0.3),
    "scaled query": ScaleQuery(sites="L2.mlp", factor=-2.0),
    "turned query": RotateQuery(sites="L2.mlp", degrees=50.0),
    "another query": ReplaceQuery(sites="L2.mlp", by="L1.mlp"),
    "no write": ZeroWrite(writers="L1.mlp"),
    "mean write": MeanWrite(writers="L1.mlp"),
    "resampled write": ResampleWrite(writers="L1.mlp"),
    "patched write": PatchWrite(writers="L1.*"),
    "skip": Skip(layers=(1,)),
}
READ_EDITS = {name: edit for name, edit in EXAMPLES.items() if hasattr(edit, "sites")}
every_edit = pytest.mark.parametrize("edit", EXAMPLES.values(), ids=EXAMPLES.keys())
every_read_edit = pytest.mark.parametrize("edit", READ_EDITS.values(), ids=READ_EDITS.keys())
