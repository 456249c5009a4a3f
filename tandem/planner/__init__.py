"""Decides how a model is laid out and predicts what that costs, before anything is started. Imports no torch."""
