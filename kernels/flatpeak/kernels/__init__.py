"""Triton kernels, one folder an operator, each beside its plain torch reference."""
