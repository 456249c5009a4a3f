"""The device of one rank's process."""

import torch


def rank_device(kind: str, rank: int) -> torch.device:
    """Returns the device of ``rank`` of those of this machine, for ``cuda`` GPU ``rank``. Makes it this thread's current
    device, on which Triton launches programs wherever their tensors are."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
