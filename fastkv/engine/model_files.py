"""Where a config's model files are, and what can be read from them without Paddle: the tokenizer.

The front end of an engine whose worker runs elsewhere needs no more than this.
"""

from __future__ import annotations

from fastkv.config import Config
from fastkv.engine.gguf_weights import PACKAGE_PREFIX, open_model
from fastkv.engine.tokenizer import Tokenizer
from fastkv.errors import ConfigError

RANDOM_PREFIX = "random:"


def weights_name(config: Config) -> str:
    """model.weights, a relative file name resolved against the config's folder.

    Raises:
        ConfigError: the config names no weights.
    """
    weights = config.model.weights
    if weights is None:
        raise ConfigError(
            f"model {config.model.name} has no weights in its config, so it can be planned but not run; "
            "set model.weights"
        )
    is_file = not weights.startswith((PACKAGE_PREFIX, RANDOM_PREFIX))
    return str(config.resolve_path(weights)) if is_file else weights


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that the model's weights file carries.

    Raises:
        ConfigError: no weights named, not found, or random weights, which have no text.
    """
    name = weights_name(config)
    if name.startswith(RANDOM_PREFIX):
        raise ConfigError(f"model {name} has no tokenizer; give prompts as lists of token ids")
    return Tokenizer(open_model(name))
