"""How a model is sharded and scheduled, as plain data. Imports no torch."""
