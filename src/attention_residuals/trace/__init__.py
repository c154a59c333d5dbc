"""Recording depth routing, and keeping it."""

from attention_residuals.trace.recorder import GradientRecorder, Recorder, record
from attention_residuals.trace.rule_facts import RuleFacts, rule_facts
from attention_residuals.trace.trace import SiteTrace, Trace, routing_table

__all__ = [
    "GradientRecorder",
    "Recorder",
    "RuleFacts",
    "SiteTrace",
    "Trace",
    "record",
    "routing_table",
    "rule_facts",
]
