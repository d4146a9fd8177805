"""Prepares the environment that Paddle reads once, before any test module imports Paddle."""

from __future__ import annotations

from fastkv.engine.runtime_env import prepare_runtime

prepare_runtime()
