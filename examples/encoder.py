"""A non-causal encoder of one's own with depth attention; the ten changed lines are marked with ``# +``."""

import torch
from torch import nn

from attention_residuals import OUTPUT, AttnRes, Site  # +


class EncoderLayer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.residual = AttnRes(sublayers_per_block=4).build(num_layers=num_layers, width=width)  # +

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        state = self.residual.open(hidden)  # +
        for number, layer in enumerate(self.layers):
            attention, mlp = Site(number, "attention"), Site(number, "mlp")  # +
            # Was: hidden = hidden + layer.attend(layer.attention_norm(hidden))
            inputs, state = self.residual.read(state, attention, layer.attention_norm)  # +
            state = self.residual.write(state, attention, layer.attend(*inputs))  # +
            # Was: hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
            inputs, state = self.residual.read(state, mlp, layer.mlp_norm)  # +
            state = self.residual.write(state, mlp, layer.mlp(*inputs))  # +
        # Was: return self.norm(hidden)
        inputs, _ = self.residual.read(state, OUTPUT, self.norm)  # +
        return inputs[0]  # +


if __name__ == "__main__":
    torch.manual_seed(0)
    encoder = Encoder(num_layers=6, width=64, num_heads=4)
    target, tokens = torch.randn(8, 12, 64), torch.randn(8, 12, 64)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    for step in range(20):
        loss = (encoder(tokens) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f}")
    queries = [p.norm().item() for n, p in encoder.named_parameters() if n.endswith("pseudo_query")]
    print(f"{sum(query > 0 for query in queries)} of {len(queries)} pseudo-queries have left zero")
