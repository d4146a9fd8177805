"""The smallest real Paddle engine on top of fastkv: model, sampler, scheduling loop.

Importing this package imports nothing, in particular not Paddle: `runtime_env.prepare_runtime` has to come first.
"""
