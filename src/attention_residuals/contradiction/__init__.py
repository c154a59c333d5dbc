"""The planted-contradiction study: does a model look back when a step contradicts an earlier one?

``Study`` is what decides it; ``run_study`` trains the models, runs the pilot, runs the confirming analysis once
the preregistration is committed, and writes the report. ``studies/contradiction`` has the question and the
preregistration.
"""

from attention_residuals.contradiction.behaviour import Gate, gate, probe
from attention_residuals.contradiction.causal import patched, swept_routes
from attention_residuals.contradiction.claims import Claim
from attention_residuals.contradiction.conclusions import conclusions
from attention_residuals.contradiction.controls import CONTROLS, Control, Evidence
from attention_residuals.contradiction.effects import PRIMARY, finding, primary_effects
from attention_residuals.contradiction.measurement import Measured, measure
from attention_residuals.contradiction.preregistration import preregistered
from attention_residuals.contradiction.stages import STAGES, run_study
from attention_residuals.contradiction.study import ARMS, ITEM_SETS, Study, study_of

__all__ = [
    "ARMS",
    "CONTROLS",
    "ITEM_SETS",
    "PRIMARY",
    "STAGES",
    "Claim",
    "Control",
    "Evidence",
    "Gate",
    "Measured",
    "Study",
    "conclusions",
    "finding",
    "gate",
    "measure",
    "patched",
    "preregistered",
    "primary_effects",
    "probe",
    "run_study",
    "study_of",
    "swept_routes",
]
