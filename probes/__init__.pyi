from .calibration import calibration as calibration
from .extract import Activations as Activations
from .extract import extract as extract
from .glossary import AXES as AXES
from .manifold import value_manifold as value_manifold
from .orthogonality import key_orthogonality as key_orthogonality
from .result import ProbeError as ProbeError
from .result import Result as Result
from .sharpening import query_key_sharpening as query_key_sharpening

__all__ = [
    "AXES",
    "Activations",
    "ProbeError",
    "Result",
    "calibration",
    "extract",
    "key_orthogonality",
    "query_key_sharpening",
    "value_manifold",
]
