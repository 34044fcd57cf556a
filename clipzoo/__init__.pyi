"""Public names for type checkers and editors; `__init__.py` imports a name at its first use."""

from clipzoo.data.in_memory import InMemoryDataset as InMemoryDataset
from clipzoo.distributed.world import World as World
from clipzoo.encoders.base import Encoder as Encoder
from clipzoo.errors import ConfigError as ConfigError
from clipzoo.explore.index import SearchIndex as SearchIndex, build_index as build_index
from clipzoo.exports.adapters import save_adapters as save_adapters
from clipzoo.exports.hub import export as export, load as load
from clipzoo.exports.open_clip import from_open_clip as from_open_clip
from clipzoo.exports.transformers import from_transformers as from_transformers
from clipzoo.loading import LoadedModel as LoadedModel, interpolate as interpolate, mteb as mteb
from clipzoo.model import Model as Model
from clipzoo.training.train import train as train
from clipzoo.types import (
    Batch as Batch,
    Features as Features,
    Loss as Loss,
    PointSet as PointSet,
    Progress as Progress,
    Scores as Scores,
    Similarity as Similarity,
    concatenate as concatenate,
)

__version__: str
__all__: list[str]
