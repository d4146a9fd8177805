"""From a config to a model: finds the weights and refuses a config whose geometry is not the model's."""

from __future__ import annotations

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
from fastkv.engine.model_files import RANDOM_PREFIX, weights_name
from fastkv.errors import ConfigError


class LoadedModel(LlamaModel):
    """A model and the name of its weights. revision is what scales and storage recognise them by."""

    revision: str


def load_model(config: Config) -> LoadedModel:
    """Load the model that config.model.weights names.

    Args:
        config: weights may be a GGUF file, package:NAME, or random:SEED (a tiny model of the config's geometry, for
            tests and trials without any download).

    Raises:
        ConfigError: no weights named, not found, or of another geometry than the config's.
    """
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
    if model.attention not in ("mha", "gqa"):
        wrong.append(f"attention is {model.attention}, the weights are of a Llama with mha or gqa")
    if wrong:
        raise ConfigError(f"the config's model section does not fit {model.weights}: {'; '.join(wrong)}")


def _random_model(config: Config, seed: str) -> LoadedModel:
    model = config.model
    if not seed.isdigit():
        raise ConfigError(f"model.weights {model.weights!r}: write {RANDOM_PREFIX}SEED with a whole number")
    if model.attention not in ("mha", "gqa"):
        raise ConfigError(f"model.weights {model.weights!r}: random models exist for mha and gqa attention")
    geometry = random_geometry(
        num_layers=model.num_layers,
        num_heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        context_tokens=model.max_context,
    )
    loaded = LoadedModel(random_weights(geometry, int(seed)), geometry)
    loaded.revision = f"random-{seed}"
    return loaded
