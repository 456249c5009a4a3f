"""How a model is cut and run, as plain data. Imports no torch."""
