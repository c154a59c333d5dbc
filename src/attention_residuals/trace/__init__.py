"""Recording depth routing, and keeping it."""

from attention_residuals.trace.edit_files import EDITS, decode_edits, encode_edits, load_edits, save_edits
from attention_residuals.trace.edit_tap import Receipt
from attention_residuals.trace.edits import Edit
from attention_residuals.trace.effects import (
    Effect,
    change_of_log_probability,
    change_of_logit_difference,
    change_of_loss,
    divergence,
)
from attention_residuals.trace.estimates import EdgeEstimate, edge_estimates
from attention_residuals.trace.exclusivity import Freedom, freedom
from attention_residuals.trace.generation import joined, record_generation
from attention_residuals.trace.gradients import GradientRecorder
from attention_residuals.trace.intervention import Intervened, Intervention, control, intervene
from attention_residuals.trace.lenses import LensReading, SourceLens, lens
from attention_residuals.trace.proof import Traceable, prove
from attention_residuals.trace.query_edits import ReplaceQuery, RotateQuery, ScaleQuery
from attention_residuals.trace.recorder import Recorder
from attention_residuals.trace.recording import record, trace_bytes
from attention_residuals.trace.references import Means, Reference, dataset_mean, reference_of
from attention_residuals.trace.rule_facts import RuleFacts, rule_facts
from attention_residuals.trace.site import SiteTrace, source_identity
from attention_residuals.trace.summary import SiteSummary, Summary
from attention_residuals.trace.sweeps import Swept, every_edge, every_pair, every_source, sweep
from attention_residuals.trace.trace import Trace, routing_table
from attention_residuals.trace.tuned_lens import TunedLens, tune_lens
from attention_residuals.trace.value_edits import Mean, Patch, RemoveWriter, Resample, Zero
from attention_residuals.trace.weight_edits import Drop, Force, PatchWeights, Shuffle, Static, Temperature
from attention_residuals.trace.write_edits import MeanWrite, PatchWrite, ResampleWrite, Skip, ZeroWrite

__all__ = [
    "EDITS",
    "Drop",
    "EdgeEstimate",
    "Edit",
    "Effect",
    "Force",
    "Freedom",
    "GradientRecorder",
    "Intervened",
    "Intervention",
    "LensReading",
    "Mean",
    "MeanWrite",
    "Means",
    "Patch",
    "PatchWeights",
    "PatchWrite",
    "Receipt",
    "Recorder",
    "Reference",
    "RemoveWriter",
    "ReplaceQuery",
    "Resample",
    "ResampleWrite",
    "RotateQuery",
    "RuleFacts",
    "ScaleQuery",
    "Shuffle",
    "SiteSummary",
    "SiteTrace",
    "Skip",
    "SourceLens",
    "Static",
    "Summary",
    "Swept",
    "Temperature",
    "Trace",
    "Traceable",
    "TunedLens",
    "Zero",
    "ZeroWrite",
    "change_of_log_probability",
    "change_of_logit_difference",
    "change_of_loss",
    "control",
    "dataset_mean",
    "decode_edits",
    "divergence",
    "edge_estimates",
    "encode_edits",
    "every_edge",
    "every_pair",
    "every_source",
    "freedom",
    "intervene",
    "joined",
    "lens",
    "load_edits",
    "prove",
    "record",
    "record_generation",
    "reference_of",
    "routing_table",
    "rule_facts",
    "save_edits",
    "source_identity",
    "sweep",
    "trace_bytes",
    "tune_lens",
]
