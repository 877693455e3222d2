"""The only files that may name an accelerator."""
