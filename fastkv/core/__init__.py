"""What every part of fastkv agrees on: dtypes, the CacheSpec, plans, messages. No paddle, no I/O."""
