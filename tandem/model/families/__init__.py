"""Model families, one module each with a constant ``FAMILY`` (``tandem.model.family.Family``). Such a module suffices for a family to be
read, written, trained, served and created from a recipe."""
