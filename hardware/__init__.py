"""Devices, kernels and quantisation: the only files that may name an accelerator."""
