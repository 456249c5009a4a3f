"""Model families, one module each with a constant ``FAMILY`` (``tandem.model.family.Family``). A module here is all that a family needs
to be read, written, trained, served and created from a recipe."""
