"""Tiny GGUF files for tests, written by the gguf package so that our reader is checked against another author's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from fastkv.engine.gguf_weights import ModelGeometry, ModelWeights

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_characters() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with, by byte."""
    characters, hidden = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + hidden))
            hidden += 1
    return characters


def interleave(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotate-half row order to the order GGUF keeps query and key rows in: halves interleaved."""
    rows, columns = matrix.shape
    halves = matrix.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def model_tensors(weights: ModelWeights, g: ModelGeometry) -> dict[str, np.ndarray]:
    """A model's weights under GGUF's names, unfused."""
    tensors = {"token_embd.weight": weights.embedding, "output_norm.weight": weights.output_norm}
    if not g.tied_embedding:
        tensors["output.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        q, k, v = np.split(layer.qkv, [g.q_dim, g.q_dim + g.kv_dim])
        gate, up = np.split(layer.gate_up, 2)
        named = {
            "attn_norm": layer.attention_norm,
            "attn_q": interleave(q, g.num_heads),
            "attn_k": interleave(k, g.kv_heads),
            "attn_v": v,
            "attn_output": layer.attention_out,
            "ffn_norm": layer.ffn_norm,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": layer.ffn_down,
        }
        tensors.update({f"blk.{index}.{name}.weight": array for name, array in named.items()})
    return tensors


def model_metadata(g: ModelGeometry) -> dict[str, str | int | float | list]:
    """Metadata of a llama model with a vocabulary of 3 special tokens, 256 bytes and the merges "th", "the"."""
    tokens = [*SPECIAL_TOKENS, *byte_characters(), "th", "the"]
    return {
        "general.architecture": "llama",
        "llama.block_count": g.num_layers,
        "llama.embedding_length": g.d_model,
        "llama.attention.head_count": g.num_heads,
        "llama.attention.head_count_kv": g.kv_heads,
        "llama.attention.key_length": g.head_dim,
        "llama.feed_forward_length": g.ffn_dim,
        "llama.rope.freq_base": g.rope_theta,
        "llama.context_length": g.context_tokens,
        "llama.attention.layer_norm_rms_epsilon": g.rms_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)),
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(path: Path, metadata: dict, tensors: dict[str, np.ndarray], quantised: dict | None = None) -> Path:
    """Write a file; `quantised` maps tensor names to (uint8 rows, GGML type) for tensors that are not float32."""
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for name, (rows, kind) in (quantised or {}).items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
