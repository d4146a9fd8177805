"""The CacheManager's border with real Paddle tensors: tokens in, block tables out, without a copy of the table."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastkv.core.digest import prefix_digests
from fastkv.errors import RequestError
from fastkv.scheduler import CacheManager

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_open_and_digests_take_paddle_tensors(dtype):
    tensor = paddle.to_tensor(TOKENS, dtype=dtype, place=paddle.CPUPlace())
    manager = CacheManager(4, 4)
    manager.open("one", tensor)
    assert manager.prefix_digests("one") == prefix_digests(tensor, 4) == prefix_digests(TOKENS, 4)


def test_write_block_tables_reaches_the_tensors_own_memory():
    manager = CacheManager(8, 4)
    for name, blocks in (("one", 1), ("two", 3)):
        manager.open(name, TOKENS)
        manager.allocate(name, blocks)
    tables = paddle.full([3, 4], 77, dtype="int32")
    address = tables.data_ptr()
    manager.write_block_tables(["two", "one"], tables)
    assert tables.numpy().tolist() == [[1, 2, 3, -1], [0, -1, -1, -1], [77] * 4]
    assert tables.data_ptr() == address
    row = paddle.full([2], 77, dtype="int32")
    assert manager.write_block_table("one", row) == 1
    assert row.numpy().tolist() == [0, -1]


@pytest.mark.parametrize(
    "tensor", [lambda: paddle.zeros([1, 4], dtype="int64"), lambda: paddle.zeros([4, 2], dtype="int32").t()]
)
def test_write_block_tables_refuses_tensors_that_do_not_fit(tensor):
    manager = CacheManager(8, 4)
    manager.open("one", TOKENS)
    with pytest.raises(RequestError, match="contiguous int32 in host memory"):
        manager.write_block_tables(["one"], tensor())
    assert manager.block_table("one").dtype == np.int32
