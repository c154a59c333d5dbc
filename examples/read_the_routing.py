"""What a model's sites read: record one forward pass, print the table, ask for one site."""

import torch

from attention_residuals import AttnRes, Decoder, presets, record

torch.manual_seed(0)
model = Decoder(presets.scaled(4, vocab_size=100, residual=AttnRes(sublayers_per_block=4)))
for reader in model.residual.readers.values():
    torch.nn.init.normal_(
        reader.pseudo_query, std=0.5
    )  # untrained queries, so that there is something to see

trace = record(model, torch.randint(100, (1, 12)))
print(trace)
print("\nL3.mlp reads", trace["L3.mlp"].source_names)
print(
    "its last token's weights:", [round(weight, 3) for weight in trace["L3.mlp"].weights[:, 0, -1].tolist()]
)
