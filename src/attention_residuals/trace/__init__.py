"""Recording depth routing, and keeping it."""

from attention_residuals.trace.generation import joined, record_generation
from attention_residuals.trace.recorder import GradientRecorder, Recorder, record
from attention_residuals.trace.rule_facts import RuleFacts, rule_facts
from attention_residuals.trace.trace import SiteTrace, Trace, routing_table

__all__ = [
    "GradientRecorder",
    "Recorder",
    "RuleFacts",
    "SiteTrace",
    "Trace",
    "joined",
    "record",
    "record_generation",
    "routing_table",
    "rule_facts",
]
