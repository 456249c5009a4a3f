"""A local cache of model folders in object storage.

``objects`` reads the storage, ``manifest`` records which files are cached, ``download`` fetches the rest, ``store`` decides what is
evicted. None of them imports torch.
"""

from tandem.model.weight_store.store import HeldModel, WeightStore, is_remote

__all__ = ["HeldModel", "WeightStore", "is_remote"]
