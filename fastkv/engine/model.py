"""From a config to a model that runs over paged caches. Refuses a config whose geometry is not the model's.

config.model.attention chooses: Llama for mha and gqa, the small MLA decoder for mla. Whoever runs a step (the worker,
`fastkv eval`) needs no more than `CausalModel`; which op attends is the model's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle
from paddle import Tensor

from fastkv.config import Config
from fastkv.engine.gguf_weights import (
    ModelGeometry,
    find_model,
    load_weights,
    model_revision,
    open_model,
    read_geometry,
)
from fastkv.engine.llama import LlamaModel, random_geometry, random_weights
from fastkv.engine.mla import MlaGeometry, MlaModel
from fastkv.engine.model_files import RANDOM_PREFIX, weights_name
from fastkv.errors import ConfigError
from fastkv.ops import AttentionBatch, LayerCache, append_attention_qkv, mla_append_attention

logger = logging.getLogger(__name__)

AnyAttend = Callable[..., Tensor]
"""Attention of one step: (layer, the model's own tensors) -> attended, as `Attend` or `LatentAttend` says."""


class CausalModel(Protocol):
    """A model that the engine can run. revision names its weights: scales and storage recognise them by it."""

    revision: str

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """Run all layers: int64 [n], int64 [n] -> float32 [n, d_model]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of rows of `forward`'s result: float32 [rows, vocab_size]."""
        ...

    def paged_attend(self, layers: Sequence[LayerCache], batch: AttentionBatch, dtype: str) -> AnyAttend:
        """The attention of one step over paged caches.

        Args:
            layers: the caches of all layers.
            batch: the step's requests.
            dtype: logical dtype. The CPU model computes in float32; what goes into a cache has the logical dtype.
        """
        ...


class LoadedModel(LlamaModel):
    """A Llama over paged key and value caches. See CausalModel."""

    revision: str

    @property
    def vocab_size(self) -> int:
        """See CausalModel."""
        return self.geometry.vocab_size

    def paged_attend(self, layers: Sequence[LayerCache], batch: AttentionBatch, dtype: str) -> AnyAttend:
        """See CausalModel. Rotary embedding happens inside the op; all layers of the step share its result's memory."""
        shape = [batch.num_tokens, self.geometry.q_dim]
        scale, rope, out = self.softmax_scale, self.rope, paddle.empty(shape, getattr(paddle, dtype))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return append_attention_qkv(qkv, layers[layer], batch, softmax_scale=scale, rope=rope, out=out)

        def cast_and_attend(layer: int, qkv: Tensor) -> Tensor:
            return _cast(attend(layer, _cast(qkv, dtype)), "float32")

        return attend if dtype == "float32" else cast_and_attend


class LoadedMlaModel(MlaModel):
    """An MLA decoder over paged latent caches, in absorbed form. See CausalModel."""

    revision: str

    @property
    def vocab_size(self) -> int:
        """See CausalModel."""
        return self.geometry.vocab_size

    def paged_attend(self, layers: Sequence[LayerCache], batch: AttentionBatch, dtype: str) -> AnyAttend:
        """See CausalModel. Rotary embedding happened in the model."""

        def attend(layer: int, q: Tensor, latent: Tensor) -> Tensor:
            out = mla_append_attention(
                _cast(self.absorb(layer, q), dtype),
                _cast(latent, dtype),
                layers[layer],
                batch,
                kv_lora_rank=self.geometry.kv_lora_rank,
                softmax_scale=self.softmax_scale,
            )
            return self.project_values(layer, _cast(out, "float32"))

        return attend


def load_model(config: Config) -> LoadedModel | LoadedMlaModel:
    """Load the model that config.model.weights names.

    Args:
        config: weights may be a GGUF file, package:NAME, or random:SEED (a tiny model of the config's geometry, for
            tests and trials without any download).

    Raises:
        ConfigError: no weights named, not found, of another geometry than the config's, or of an attention kind that
            fastkv has no op for.
    """
    if config.model.attention == "dsa":
        raise ConfigError(
            "model.attention dsa: fastkv allocates, sizes and moves these caches, but has no attention op for their "
            "format, so no model can run over them; take the tensors from CacheController or RunnerCache"
        )
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"parallel.tensor_parallel_size is {config.parallel.tensor_parallel_size}, and this engine runs a model on "
            "one rank; fastkv's caches can be planned and allocated for any rank, an engine of yours may run them"
        )
    if config.speculation is not None:
        logger.warning(
            "caches of %d MTP layers are allocated, but this engine does not speculate", config.speculation.num_layers
        )
    name = weights_name(config)
    if name.startswith(RANDOM_PREFIX):
        return _random_model(config, name.removeprefix(RANDOM_PREFIX))
    file = open_model(name)
    geometry = read_geometry(file)
    check_geometry(config, geometry)
    model = LoadedModel(load_weights(file, geometry), geometry)
    model.revision = model_revision(find_model(name))
    return model


def check_geometry(config: Config, geometry: ModelGeometry) -> None:
    """Refuse a config that describes another model than the weights hold. Raises ConfigError."""
    model = config.model
    pairs = {
        "num_layers": (model.num_layers, geometry.num_layers),
        "num_attention_heads": (model.num_attention_heads, geometry.num_heads),
        "num_kv_heads": (model.num_kv_heads, geometry.kv_heads),
        "head_dim": (model.head_dim, geometry.head_dim),
    }
    wrong = [f"{key} is {given}, the weights have {real}" for key, (given, real) in pairs.items() if given != real]
    if model.max_context > geometry.context_tokens:
        wrong.append(f"max_context is {model.max_context}, the weights allow {geometry.context_tokens}")
    if model.v_head_dim not in (0, geometry.head_dim):
        wrong.append(f"v_head_dim is {model.v_head_dim}, the weights have {geometry.head_dim}")
    if model.attention not in ("mha", "gqa"):
        wrong.append(f"attention is {model.attention}, the weights are of a Llama with mha or gqa")
    if wrong:
        raise ConfigError(f"the config's model section does not fit {model.weights}: {'; '.join(wrong)}")


def _random_model(config: Config, seed: str) -> LoadedModel | LoadedMlaModel:
    model = config.model
    if not seed.isdigit():
        raise ConfigError(f"model.weights {model.weights!r}: write {RANDOM_PREFIX}SEED with a whole number")
    loaded: LoadedModel | LoadedMlaModel
    if model.attention == "mla":
        loaded = LoadedMlaModel(
            MlaGeometry(
                num_layers=model.num_layers,
                num_heads=model.num_attention_heads,
                kv_lora_rank=model.kv_lora_rank,
                qk_rope_head_dim=model.qk_rope_head_dim,
                context_tokens=model.max_context,
            ),
            int(seed),
        )
    else:
        geometry = random_geometry(
            num_layers=model.num_layers,
            num_heads=model.num_attention_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            context_tokens=model.max_context,
        )
        check_geometry(config, geometry)
        loaded = LoadedModel(random_weights(geometry, int(seed)), geometry)
    loaded.revision = f"random-{seed}"
    return loaded


def _cast(x: Tensor, dtype: str) -> Tensor:
    target = getattr(paddle, dtype)
    return x if x.dtype is target else x.astype(target)  # by identity: comparing two dtypes takes Paddle 2 us
