"""Models on this machine and where to get more. Knows nothing of engines or of HTTP requests.

`gguf` reads headers, `precheck` does so in a child process, `store` holds what is installed,
`sources` brings new models in, `discover` finds those of other programs, `placement` plans
where the parts of a model go.
"""

from node.models.catalogue import CatalogueEntry, load_catalogue
from node.models.download import Progress
from node.models.header import ArrayInfo, GGUFHeader, TensorInfo
from node.models.placement import PlacementPlan, PlacementRequest, plan_placement, smaller
from node.models.precheck import check_gguf
from node.models.shape import model_shape
from node.models.sources import parse_source, pull
from node.models.store import InstalledModel, ModelStore

__all__ = [
    "ArrayInfo",
    "CatalogueEntry",
    "GGUFHeader",
    "InstalledModel",
    "ModelStore",
    "PlacementPlan",
    "PlacementRequest",
    "Progress",
    "TensorInfo",
    "check_gguf",
    "load_catalogue",
    "model_shape",
    "parse_source",
    "plan_placement",
    "pull",
    "smaller",
]
