"""A tiny run, shared by the tests and by the processes that they start and kill.

As a script: ``tiny_run.py CORPUS RUN DEATH KIND``; a death is a function below, a kind is one of ``KINDS``.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from attention_residuals.data import Corpus, TextFiles, prepare
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import DecoderConfig
from attention_residuals.train import Cosine, Muon, Saving, TrainConfig, train
from attention_residuals.train import checkpoint as checkpoint_module

SAVING = Saving(every=2, keep=2, evaluate_every=4, evaluate_batches=2, log_every=1)
NUM_STEPS = 6


def model_config(residual=None, **changes):
    values = {
        "vocab_size": 300,
        "num_layers": 2,
        "width": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_width": 16,
        "mlp_width": 48,
        "max_tokens": 64,
        "residual": residual or AttnRes(sublayers_per_block=2),
    }
    return DecoderConfig(**(values | changes))


def train_config(**changes):
    values = {
        "model": model_config(),
        "optimizer": Muon(learning_rate=3e-3),
        "schedule": Cosine(warmup_steps=2),
        "num_steps": NUM_STEPS,
        "batch_size": 4,
        "micro_batch_size": 2,
        "sequence_length": 24,
        "seed": 3,
    }
    return TrainConfig(**(values | changes))


def make_corpus(folder, documents=400):
    """Documents much shorter than a sequence, so that most sequences hold several."""
    text = "\n".join(f"{n} ducks met {n * n % 17} swans near pond {n % 5}." for n in range(documents))
    (folder / "tale.txt").write_text(text)
    source = TextFiles(path=str(folder / "tale.txt"), separator="\n")
    return prepare(source, folder / "corpus", vocab_size=300, valid_fraction=0.2)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(number, original, before=lambda: None):
    """Wraps a function so that its n-th call kills the process, after doing something half."""
    calls = [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number:
            before()
            die()
        return original(*args, **kwargs)

    return wrapped


def die_inside_the_update():
    """Of step 5: Muon has stepped the matrices, AdamW has not stepped the rest."""
    torch.optim.AdamW.step = on_call(5, torch.optim.AdamW.step)


def die_inside_the_checkpoint():
    """Of step 4: the model is written, the optimizer's file is cut short."""
    partial = Path(sys.argv[2]) / "checkpoints" / ".partial-step-00000004"
    checkpoint_module.save_file = on_call(
        2, checkpoint_module.save_file, lambda: (partial / "optimizer.safetensors").write_bytes(b"half")
    )


def die_before_the_rename():
    """Of step 4: everything is written and safe, but not named."""
    rename = Path.rename
    Path.rename = on_call(2, rename)


def fill_the_disk():
    """No file may grow beyond 60 kB, less than the model takes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def die_in_step_5():
    """Of the whole run: after the update, before anything is written."""
    torch.optim.AdamW.zero_grad = on_call(5, torch.optim.AdamW.zero_grad)


def nothing():
    """Lives on."""


KINDS = {
    "tiny": {},
    "long": {"num_steps": 200},
    "compiled-standard": {"compile": True, "model": model_config(StandardResidual())},
    "compiled-block": {"compile": True},
}


def main():
    torch.set_num_threads(1)
    corpus_folder, run_folder, death, kind = sys.argv[1:]
    globals()[death]()

    def monitor(step, model):
        print(step, flush=True)
        if kind == "long":
            time.sleep(0.2)

    config, corpus = train_config(**KINDS[kind]), Corpus.load(corpus_folder)
    result = train(config, corpus, run_folder, saving=SAVING, monitor=monitor)
    print("interrupted" if result.interrupted else "done", result.step, flush=True)


if __name__ == "__main__":
    main()
