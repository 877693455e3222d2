"""The only files that may name an accelerator, beside device.py, which has not moved here yet."""
