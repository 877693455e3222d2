"""The model in Megatron, and the rows that go through it."""
