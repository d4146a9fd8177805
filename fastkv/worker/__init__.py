"""The worker side: allocates cache tensors and carries out what the scheduler decided. Imports paddle."""
