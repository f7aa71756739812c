"""Pretrained language models behind the hooks, axes and calls of our own models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformer_lens import HookedRootModule
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaForCausalLM, PreTrainedModel

from interp.attention_hooks import ROTARY_SITES, SITES, HookedAttention, head_sizes, hook_attention
from interp.errors import CheckpointError, InterpError, ModelError
from interp.gguf_weights import load_gguf, smollm2_folder
from interp.mamba_hooks import hook_mamba
from interp.models.mamba import Mamba

PADDING = -1
"""Token id that marks padding, so that tokens alone say what is to be read, through every probe."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """The sizes of a language model under TransformerLens's names; None where the architecture lacks it."""

    name: str
    architecture: str
    """transformers' ``model_type``."""
    n_layers: int
    d_model: int
    d_vocab: int
    n_ctx: int | None
    """Longest sequence that it was trained for."""
    n_heads: int | None = None
    n_kv_heads: int | None = None
    """Heads of keys and values; consecutive query heads share one."""
    d_head: int | None = None
    d_state: int | None = None


class PretrainedModel(HookedRootModule):
    """A transformers model that is called, cached, hooked and edited as our own models are.

    Weights are as trained: nothing is folded or centred. Queries that are grouped keep their axis: keys and values
    are ``batch pos kv_head d_head``, and query head h reads key and value head h // (n_heads / n_kv_heads). A token
    id of -1 (``PADDING``) is padding, at either end: nothing attends to it, positions count from the first
    real token, and what is recorded there means nothing.
    """

    def __init__(self, lm: PreTrainedModel, name: str, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg = _read_config(lm, name)
        self.lm = lm.eval()
        if isinstance(lm, MambaForCausalLM):
            self.blocks, self.sites = hook_mamba(lm), dict(Mamba.sites)
        else:
            self.blocks = hook_attention(lm)
            rotary = any(name.endswith("hook_rot_q") for name, _ in self.blocks.named_modules())
            self.sites = SITES | (ROTARY_SITES if rotary else {})
        self._tokenizer = tokenizer
        self.setup()

    def forward(
        self, tokens: Int64[Tensor, "batch pos"], position: Int64[Tensor, "batch query"] | None = None
    ) -> Float[Tensor, "batch query d_out"]:
        """Logits over the vocabulary at ``position``, or at every position when it is None.

        Raises:
            ModelError: for a token id outside the vocabulary, or when a layer computes its attention elsewhere.
        """
        low, high = tokens.aminmax()
        if low < PADDING or high >= self.cfg.d_vocab:
            raise ModelError(
                f"token ids run from {low} to {high}, but the model knows 0 to {self.cfg.d_vocab - 1} (-1 is padding)"
            )
        attention = [module for module in self.blocks.modules() if isinstance(module, HookedAttention)]
        for layer in attention:
            layer.reported = False
        with self._reading(position):
            logits = self.lm(input_ids=tokens.clamp_min(0), use_cache=False, **self._padding(tokens >= 0)).logits
        if silent := [i for i, layer in enumerate(attention) if not layer.reported]:
            raise ModelError(
                f"{self.cfg.name}: layers {silent} bypass transformers' attention interface, so their attention "
                "can't be seen; choose an architecture that supports it"
            )
        return logits

    def _padding(self, real: Bool[Tensor, "batch pos"]) -> dict[str, Tensor]:
        if real.all():
            return {}
        mask = {"attention_mask": real.long()}
        return mask if self.cfg.n_heads is None else mask | {"position_ids": (real.cumsum(1) - 1).clamp_min(0)}

    def _reading(self, position: Tensor | None) -> Any:
        """Restrict the readout to some positions while in the context, so that no other logits are computed."""
        gather = partial(_gather, position)
        return self.lm.get_output_embeddings().register_forward_pre_hook(gather)

    @property
    def device(self) -> torch.device:
        """Where tokens go: the device of the first weights that are not offloaded."""
        devices = (parameter.device for parameter in self.lm.parameters())
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def reinitialized(self, seed: int) -> PretrainedModel:
        """The untrained twin: the same configuration, at transformers' own initialisation, in memory."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            lm = AutoModelForCausalLM.from_config(deepcopy(self.lm.config), dtype=self.lm.dtype)
        return PretrainedModel(lm.to(self.device), f"{self.cfg.name}, untrained", self._tokenizer)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that belongs to the model, or the one that was given."""
        if self._tokenizer is None:
            raise ModelError(f"{self.cfg.name} came without a tokenizer; pass load_pretrained(..., tokenizer=...)")
        if isinstance(self._tokenizer, (str, Path)):
            return AutoTokenizer.from_pretrained(self._tokenizer)
        return self._tokenizer

    def encode(self, prompts: Sequence[str]) -> Int64[Tensor, "batch pos"]:
        """Token ids of prompts, padded at the end with ``PADDING``."""
        ids = self.tokenizer(list(prompts))["input_ids"]
        return pad_sequence([torch.tensor(row) for row in ids], batch_first=True, padding_value=PADDING)

    @property
    def n_parameters(self) -> int:
        """Number of scalars that were trained."""
        return sum(parameter.numel() for parameter in self.lm.parameters())

    def describe(self) -> dict[str, Any]:
        """One flat row about the model: sizes, parameter count, number format, where its weights come from."""
        sizes = {key: value for key, value in asdict(self.cfg).items() if value is not None}
        weights = getattr(self.lm.config, "weights_note", "as stored")
        number = str(self.lm.dtype).removeprefix("torch.")
        return {**sizes, "parameters": self.n_parameters, "dtype": number, "weights": weights, "sites": self.sites}


def load_pretrained(
    source: str | Path | PreTrainedModel,
    *,
    dtype: torch.dtype = torch.float32,
    device_map: str | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> PretrainedModel:
    """A causal language model with hooks, from wherever it is.

    Args:
        source: a local folder, a GGUF file, ``smollm2`` (the package of :mod:`interp.gguf_weights`), a hub id, or a
            transformers model in memory, which gets its hooks in place and keeps its own number format.
        dtype: number format of the weights in memory; ``torch.bfloat16`` halves it.
        device_map: accelerate's: ``"auto"`` spreads the weights over GPUs, memory and disk. The untrained twin has
            to fit beside them on one device: else extract with ``twin_seed=None``.
        tokenizer: a tokenizer, or the folder or hub id of one; by default the source's.

    Raises:
        CheckpointError: when there is nothing at the source, or only with network access; when weights are missing
            or not safetensors.
        ModelError: when the architecture is not supported.
    """
    if isinstance(source, PreTrainedModel):
        return PretrainedModel(source, source.name_or_path or type(source).__name__, tokenizer)
    name, path = str(source), Path(source)
    if name == "smollm2":
        path = smollm2_folder()
    own: Any = str(path) if path.is_dir() else name
    options = {} if device_map is None else {"device_map": device_map}
    missing: list[str] = []
    try:
        if path.is_file():
            lm = load_gguf(path, dtype, **options)
            if tokenizer is None:
                own = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                own, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
            lm, loading = loaded
            missing = sorted(loading["missing_keys"])
    except InterpError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if path.exists():
            raise CheckpointError(f"{name} holds no causal language model in safetensors or GGUF ({reason})") from error
        raise CheckpointError(
            f"no folder or GGUF file '{name}', and the hub did not give it; offline, only local files load ({reason})"
        ) from error
    if missing:
        raise CheckpointError(f"{name} lacks {len(missing)} of its weights, '{missing[0]}' first; download it again")
    return PretrainedModel(lm, name, own if tokenizer is None else tokenizer)


def _read_config(lm: PreTrainedModel, name: str) -> LanguageModelConfig:
    config = lm.config.get_text_config()
    heads = head_sizes(config) if hasattr(config, "num_attention_heads") else (None, None, None)
    return LanguageModelConfig(
        name=name,
        architecture=config.model_type,
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        d_vocab=lm.get_output_embeddings().weight.shape[0],
        n_ctx=getattr(config, "max_position_embeddings", None),
        n_heads=heads[0],
        n_kv_heads=heads[1],
        d_head=heads[2],
        d_state=getattr(config, "state_size", None),
    )


def _gather(position: Tensor | None, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if position is None:
        return args
    return (args[0].gather(1, position.to(args[0].device)[..., None].expand(-1, -1, args[0].shape[-1])),)
