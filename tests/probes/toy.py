"""A hooked model whose causes are known: heads write token features, and one direction is read out."""

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

LAYERS, HEADS, D_HEAD, D_MODEL, VOCAB = 2, 3, 4, 16, 40


def kl(p, q):
    """KL(p || q) in bits, by the definition."""
    return (p * (p / q).log2()).sum(-1)


class Toy(HookedRootModule):
    """Two layers of three heads; each writes a feature of the token along a direction of its own.

    ``carriers`` write the token's log-odds, all others noise. The answer's log-odds are those of the carrier with the
    largest magnitude, so that carriers stand in for each other. Layers pass the residual stream on unchanged otherwise.
    """

    sites: ClassVar = {"z": "attn.hook_z", "resid_post": "hook_resid_post", "attn_out": "hook_attn_out"}

    def __init__(self, *carriers, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.cfg = SimpleNamespace(n_layers=LAYERS)
        self.carriers = carriers
        self.log_odds = nn.Parameter(2 * torch.randn(VOCAB, generator=generator))
        self.noise = torch.randn(LAYERS, HEADS, VOCAB, D_HEAD, generator=generator)
        # orthonormal columns: one direction a head
        self.write = torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=generator))[0]
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            block = nn.Module()
            block.attn = nn.Module()
            block.attn.hook_z, block.hook_attn_out, block.hook_resid_post = HookPoint(), HookPoint(), HookPoint()
            self.blocks.append(block)
        self.setup()

    def direction(self, layer, head):
        """Where a head writes."""
        return self.write[:, [layer * HEADS + head]]

    def forward(self, tokens, position):
        residual = torch.zeros(*tokens.shape, D_MODEL)
        for layer, block in enumerate(self.blocks):
            z = self.noise[layer][:, tokens].movedim(0, 2)
            z = z.clone()
            for head in range(HEADS):
                if (layer, head) in self.carriers:
                    z[:, :, head] = 0.0
                    z[:, :, head, 0] = self.log_odds[tokens]
            z = block.attn.hook_z(z)
            columns = self.write[:, layer * HEADS : (layer + 1) * HEADS]
            residual = block.hook_resid_post(residual + block.hook_attn_out(z[..., 0] @ columns.T))
        read = torch.stack([residual @ self.direction(*carrier)[:, 0] for carrier in self.carriers], -1)
        chosen = read.gather(-1, read.abs().argmax(-1, keepdim=True))[..., 0]
        logits = torch.stack([chosen, torch.zeros_like(chosen)], -1)
        return logits.gather(1, position[..., None].expand(-1, -1, 2))

    def batch(self, sequences=24, length=5, seed=0):
        """Tokens with the posterior that the model computes, at every position but the first."""
        tokens = torch.randint(VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))
        position = torch.arange(1, length).expand(sequences, -1)
        p = self.log_odds.detach()[tokens[:, 1:]].double().sigmoid()
        return SimpleNamespace(tokens=tokens, position=position, posterior=torch.stack([p, 1 - p], -1))
