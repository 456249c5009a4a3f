"""The layout of a recipe that leaves it to the planner, on this machine. Imports no torch."""

from tandem.config.recipe import AnyRecipe
from tandem.runtime.machine.gpus import chosen_device, probe
from tandem.runtime.process.processes import available_cores


def on_this_machine(recipe: AnyRecipe) -> tuple[AnyRecipe, str]:
    """Returns ``recipe`` with its layout for the GPUs of this machine, or without any for its cores, and a line that says which; a layout that is given stays,
    without a line. Raises ``UserError`` if none fits."""
    if recipe.parallel.layout == "given":
        return recipe, ""
    # Most runs need no planner.
    from tandem.estimate.hardware.load import hardware_of_device
    from tandem.planner.automatic import with_layout

    gpus = [gpu.name for gpu in probe().gpus] if chosen_device(recipe.machine, 1) == "cuda" else []
    chosen, line = with_layout(recipe, gpus, hardware_of_device(gpus[0]) if gpus else None, available_cores())
    chosen.check()
    return chosen, line
