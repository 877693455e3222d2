"""The model, built with Megatron, and the rows of tokens that go through it."""
