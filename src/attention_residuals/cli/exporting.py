"""The command that makes one model of a run's newest checkpoint."""

from pathlib import Path

from tyro.conf import Positional

from attention_residuals.cli.app import command
from attention_residuals.cli.names import opened
from attention_residuals.durable import write_new
from attention_residuals.models import save_model

__all__ = ["export_command"]


@command("export")
def export_command(folder: Positional[Path], out: Positional[Path]) -> int:
    """Write the model of a run's newest checkpoint as one file of weights, with its config and tokenizer.

    Runs on several processes keep their checkpoints in parts; every command reads those too, but a model to
    hand on is simpler in one piece. It has no corpus and no training config: attnres eval needs --text for it,
    and --sequence-length for the windows of training.

    For example:
      attnres export runs/four exported
      attnres eval exported --text README.md

    Args:
        folder: A folder that attnres train wrote.
        out: A folder that holds no model yet.
    """
    found = opened(folder, "cpu")
    save_model(found.model, out)
    write_new(out / "tokenizer.json", found.tokenizer.to_json().encode())
    print(f"{out / 'model.safetensors'}")
    return 0
