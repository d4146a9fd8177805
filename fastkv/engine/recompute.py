"""The truth the cached engine is compared with: all tokens computed again, no cache anywhere.

Called by tests and by `fastkv eval`. Shares the layers with the engine (`llama.LlamaModel`) but neither its caches nor
its custom ops: rotary embedding, causal mask and soft-max are spelled out in plain Paddle. Slow and obvious; memory
grows with the square of the length (num_heads * n * n * 4 bytes).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from fastkv.engine.llama import LlamaModel
from fastkv.ops import Rope


def rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotate-half rotary embedding of x [num_tokens, heads, head_dim] at int64 positions [num_tokens]."""
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
    first, second = x.split(2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_mask(num_tokens: int) -> Tensor:
    """float32 [num_tokens, num_tokens] to add to scores: 0 where the key is at or before the query, else -inf."""
    return paddle.triu(paddle.full([num_tokens, num_tokens], float("-inf")), diagonal=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: Tensor) -> Tensor:
    """Attention of one sequence: q [n, num_heads, d], k and v [n, kv_heads, d], mask [n, n] added -> shaped as q."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # [kv_heads, queries of the group, n, d]: head h reads KV head h // group.
    grouped = (q * softmax_scale).transpose([1, 0, 2]).reshape([kv_heads, -1, num_tokens, head_dim])
    keys, values = k.transpose([1, 0, 2]).unsqueeze(1), v.transpose([1, 0, 2]).unsqueeze(1)
    weights = F.softmax(paddle.matmul(grouped, keys, transpose_y=True) + mask, axis=-1)
    return paddle.matmul(weights, values).reshape([num_heads, num_tokens, head_dim]).transpose([1, 0, 2])


@paddle.no_grad()
def logits(model: LlamaModel, token_ids: Sequence[int], first_row: int = 0) -> npt.NDArray[np.float32]:
    """Next-token logits after each token of one sequence, computed in one pass.

    Args:
        model: the model.
        token_ids: the sequence, at least one token.
        first_row: logits of earlier tokens are not wanted (they cost a pass over the output matrix each).

    Returns:
        float32 [len(token_ids) - first_row, vocab_size]; row i predicts the token after token_ids[first_row + i].
    """
    positions, mask = paddle.arange(len(token_ids), dtype="int64"), causal_mask(len(token_ids))

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = model.split_heads(qkv)
        rotated_q, rotated_k = rotate(q, model.rope, positions), rotate(k, model.rope, positions)
        return causal_attention(rotated_q, rotated_k, v, model.softmax_scale, mask).flatten(1)

    hidden = model.forward(paddle.to_tensor(list(token_ids), dtype="int64"), positions, attend)
    rows: npt.NDArray[np.float32] = model.logits(hidden[first_row:]).numpy()
    return rows


def greedy_generate(
    model: LlamaModel, token_ids: Sequence[int], num_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """The next num_tokens greedy tokens, everything recomputed at each step; ends after a token of stop_ids."""
    sequence = list(token_ids)
    for _ in range(num_tokens):
        sequence.append(int(logits(model, sequence, len(sequence) - 1)[0].argmax()))
        if sequence[-1] in stop_ids:
            break
    return sequence[len(token_ids) :]


def teacher_forced(
    model: LlamaModel, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """What greedy decoding would say at each place of a given output, in one pass.

    The first place that differs from output_ids is where a greedy decoder without cache would have left this path; if
    none does, it would have generated exactly output_ids.

    Returns:
        The len(output_ids) greedy tokens, and the logits they come from, float32 [len(output_ids), vocab_size].
    """
    sequence = [*prompt_ids, *output_ids[:-1]]
    rows = logits(model, sequence, len(prompt_ids) - 1)
    return [int(token) for token in rows.argmax(-1)], rows
