"""Model folders in object storage, kept on the local disk.

``objects`` reads the storage, ``manifest`` says what of a folder is here, ``download`` fetches the rest, ``store`` decides
what stays. None of them imports torch.
"""

from tandem.model.weight_store.store import HeldModel, WeightStore, is_remote

__all__ = ["HeldModel", "WeightStore", "is_remote"]
