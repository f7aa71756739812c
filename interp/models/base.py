"""What all four architectures share: the configuration, the read-in, the readout, and declared hook sites."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from interp.errors import ModelError
from tasks.base import Task, unknown

ARCHITECTURES = {"transformer": "Transformer", "mamba": "Mamba", "lstm": "LSTM", "mlp": "MLPModel"}
"""Architecture name -> class name, in the module ``interp.models.<architecture>``."""

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "transformer": {
        "small": {"n_layers": 4, "d_model": 128, "n_heads": 4},
        "paper": {"n_layers": 6, "d_model": 192, "n_heads": 6},
    },
    "mamba": {
        "small": {"n_layers": 4, "d_model": 168, "positions": "none"},
        "paper": {"n_layers": 6, "d_model": 256, "positions": "none"},
    },
    "lstm": {
        "small": {"n_layers": 6, "d_model": 128, "positions": "none"},
        "paper": {"n_layers": 9, "d_model": 192, "positions": "none"},
    },
    "mlp": {
        "small": {"n_layers": 6, "d_model": 128},
        "paper": {"n_layers": 9, "d_model": 192},
    },
}
"""Named sizes of each architecture: equal widths, and parameter counts within 10 % of the transformer's."""

OWNERS = {"n_heads": "transformer", "d_state": "mamba", "d_conv": "mamba", "expand": "mamba", "window": "mlp"}
"""Setting -> the one architecture that has it."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a model but its weights."""

    d_vocab: int
    """Number of token ids, or the width of the vectors read in."""
    d_out: int
    """Number of classes, or 2 for a Gaussian readout (mean and log-variance)."""
    n_ctx: int
    """Longest sequence."""
    architecture: str = "transformer"
    readin: Literal["tokens", "vectors"] = "tokens"
    readout: Literal["categorical", "gaussian"] = "categorical"
    n_layers: int = 4
    d_model: int = 128
    n_heads: int = 4
    d_state: int = 16
    """States of a channel of Mamba."""
    d_conv: int = 4
    """Positions that Mamba's convolution sees."""
    expand: int = 2
    """Channels of Mamba over d_model."""
    window: int = 1
    """Positions that the MLP sees: the last one, or the last few."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    norm: Literal["rms", "layer"] = "layer"
    embed_std: float = 0.2
    """Standard deviation of token and position embeddings at initialisation: tenfold the weights', or AdamW's
    first steps drown them."""
    init_std: float = 0.02
    """Standard deviation of weights at initialisation; 1/sqrt(2 n_layers) of it where a block writes."""

    def __post_init__(self) -> None:
        choose("architecture", self.architecture, list(ARCHITECTURES))
        choose("positions", self.positions, ["learned", "rotary", "none"])
        choose("norm", self.norm, ["rms", "layer"])
        choose("readin", self.readin, ["tokens", "vectors"])
        choose("readout", self.readout, ["categorical", "gaussian"])
        for key in ("d_vocab", "d_out", "n_ctx", "n_layers", "d_model", *OWNERS):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{key} must be a positive integer, got {value!r}")
        for key, owner in OWNERS.items():
            if self.architecture != owner and getattr(self, key) != getattr(type(self), key):
                raise ModelError(f"{key} is a setting of the {owner}, which the {self.architecture} does not have")
        if self.positions == "rotary" and self.architecture != "transformer":
            raise ModelError(
                f"rotary positions turn queries and keys, which the {self.architecture} does not have; "
                "choose learned or none"
            )
        if self.architecture == "transformer" and self.d_model % self.n_heads:
            raise ModelError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}; change one")
        if self.positions == "rotary" and self.d_head % 2:
            raise ModelError(f"rotary positions need an even d_head, got {self.d_head}; change d_model or n_heads")

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def d_mlp(self) -> int:
        """Hidden width of the MLP: 4 d_model, or less where a wider window needs the parameters."""
        return 8 * self.n_layers * self.d_model // (2 * self.n_layers + self.window - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a config file."""
        return asdict(self)


class Linear(nn.Linear):
    """A bias-free linear map with Gaussian initialisation of a stated scale."""

    def __init__(self, d_in: int, d_out: int, std: float) -> None:
        self.std = std
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw fresh weights from N(0, std^2)."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """An embedding table with Gaussian initialisation of a stated scale."""

    def __init__(self, n: int, d: int, std: float) -> None:
        self.std = std
        super().__init__(n, d)

    def reset_parameters(self) -> None:
        """Draw fresh rows from N(0, std^2)."""
        nn.init.normal_(self.weight, std=self.std)


class Norm(nn.Module):
    """RMSNorm or LayerNorm, with TransformerLens's ``hook_normalized``."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(cfg.d_model, eps=1e-5) if cfg.norm == "rms" else nn.LayerNorm(cfg.d_model)
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Normalise the last axis."""
        return self.hook_normalized(self.norm(x))


class SequenceModel(HookedRootModule):
    """Embed, mix in blocks, read out at the supervised positions.

    A subclass fills ``self.blocks`` and declares in ``sites`` which hook is the key, query, value or belief
    site of a layer, so that a probe never has to guess.
    """

    sites: ClassVar[dict[str, str]] = {}
    """Short name -> hook name within a block, e.g. ``{"k": "attn.hook_k"}``."""

    def __init__(self, cfg: ModelConfig, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.readin == "tokens":
            self.embed: nn.Module = Embedding(cfg.d_vocab, cfg.d_model, cfg.embed_std)
        else:
            self.embed = Linear(cfg.d_vocab, cfg.d_model, cfg.d_vocab**-0.5)
        self.hook_embed = HookPoint()
        if cfg.positions == "learned":
            self.pos_embed = Embedding(cfg.n_ctx, cfg.d_model, cfg.embed_std)
            self.hook_pos_embed = HookPoint()
        self.blocks = nn.ModuleList(blocks)
        self.ln_final = Norm(cfg)
        self.unembed = Linear(cfg.d_model, cfg.d_out, cfg.init_std)
        self.setup()

    def forward(
        self,
        tokens: Int64[Tensor, "batch pos"] | Float32[Tensor, "batch pos d_in"],
        position: Int64[Tensor, "batch query"] | None = None,
    ) -> Float[Tensor, "batch query d_out"]:
        """Logits (or mean and log-variance) at ``position``, or at every position when it is None.

        Raises:
            ModelError: when the sequence is longer than ``n_ctx`` or a token id is not in the vocabulary.
        """
        self._check(tokens)
        residual = self.hook_embed(self.embed(tokens))
        if self.cfg.positions == "learned":
            rows = torch.arange(tokens.shape[1], device=tokens.device)
            residual = residual + self.hook_pos_embed(self.pos_embed(rows))
        for block in self.blocks:
            residual = block(residual)
        if position is not None:
            residual = residual.gather(1, position[..., None].expand(-1, -1, self.cfg.d_model))
        return self.unembed(self.ln_final(residual))

    def _check(self, tokens: Tensor) -> None:
        if tokens.shape[1] > self.cfg.n_ctx and self.cfg.positions == "learned":
            raise ModelError(
                f"sequence of {tokens.shape[1]} positions is longer than the model's context n_ctx = {self.cfg.n_ctx}"
            )
        if self.cfg.readin == "tokens" and not torch.compiler.is_compiling():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.cfg.d_vocab:
                raise ModelError(f"token ids run from {low} to {high}, but the model knows 0 to {self.cfg.d_vocab - 1}")

    @property
    def n_parameters(self) -> int:
        """Number of trainable scalars."""
        return sum(parameter.numel() for parameter in self.parameters())

    def describe(self) -> dict[str, Any]:
        """One flat row about the model: the settings that it has, parameter count, hook sites."""
        architecture = self.cfg.architecture
        settings = {k: v for k, v in self.cfg.to_dict().items() if OWNERS.get(k, architecture) == architecture}
        return {**settings, "parameters": self.n_parameters, "sites": dict(self.sites)}


def build_model(config: ModelConfig, seed: int = 0) -> SequenceModel:
    """The model that ``config`` describes, at its initialisation for ``seed``; no global state is touched."""
    module = importlib.import_module(f"interp.models.{config.architecture}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return getattr(module, ARCHITECTURES[config.architecture])(config)


def preset(architecture: str, size: str, task: Task, **changes: Any) -> ModelConfig:
    """The configuration of a named size, read-in and readout fitted to ``task``.

    Raises:
        ModelError: for an unknown architecture, size or field (with the closest match).
    """
    choose("architecture", architecture, list(PRESETS))
    choose("size", size, list(PRESETS[architecture]))
    known = [field.name for field in fields(ModelConfig)]
    for key in changes:
        choose("model setting", key, known)
    config = ModelConfig(
        d_vocab=task.d_vocab,
        d_out=task.d_out,
        n_ctx=task.n_ctx,
        readin=task.readin,
        readout=task.readout,
        architecture=architecture,
        **PRESETS[architecture][size],
    )
    return replace(config, **changes)


def choose(what: str, value: Any, known: list[str]) -> None:
    """Raise :class:`ModelError` naming the closest match unless ``value`` is one of ``known``."""
    if value not in known:
        raise ModelError(unknown(what, str(value), known))
