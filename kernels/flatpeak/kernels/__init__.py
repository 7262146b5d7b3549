"""The inner loops of the operators, one folder an operator: plain torch, and Triton beside it."""
