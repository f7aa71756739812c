from .advantage import advantage as advantage
from .advantage import extract_gradients as extract_gradients
from .calibration import calibration as calibration
from .confounds import entropy_agreement as entropy_agreement
from .confounds import entropy_beyond_controls as entropy_beyond_controls
from .domains import domain_restriction as domain_restriction
from .extract import Activations as Activations
from .extract import extract as extract
from .first_order import first_order as first_order
from .glossary import AXES as AXES
from .manifold import value_manifold as value_manifold
from .orthogonality import key_orthogonality as key_orthogonality
from .responsibilities import responsibilities as responsibilities
from .result import ProbeError as ProbeError
from .result import Result as Result
from .settling import settling as settling
from .sharpening import query_key_sharpening as query_key_sharpening

__all__ = [
    "AXES",
    "Activations",
    "ProbeError",
    "Result",
    "advantage",
    "calibration",
    "domain_restriction",
    "entropy_agreement",
    "entropy_beyond_controls",
    "extract",
    "extract_gradients",
    "first_order",
    "key_orthogonality",
    "query_key_sharpening",
    "responsibilities",
    "settling",
    "value_manifold",
]
