"""The inner loops of the operators, one folder an operator, as plain torch references."""
