"""The model store: models that were pulled, by name, in one folder; and how they get there."""

from hardpoint.weights.store.catalogue import CATALOGUE, NamedModel
from hardpoint.weights.store.folder import StoredModel, list_models, models_folder, remove, resolve
from hardpoint.weights.store.pulling import PullProgress, pull

__all__ = [
    "CATALOGUE",
    "NamedModel",
    "PullProgress",
    "StoredModel",
    "list_models",
    "models_folder",
    "pull",
    "remove",
    "resolve",
]
