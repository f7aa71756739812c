from .ablation import head_ablation as head_ablation
from .ablation import head_removal as head_removal
from .ablation import layer_ablation as layer_ablation
from .advantage import advantage as advantage
from .advantage import extract_gradients as extract_gradients
from .calibration import calibration as calibration
from .causal import steering as steering
from .causal import subspace_ablation as subspace_ablation
from .causal import subspace_swap as subspace_swap
from .confounds import entropy_agreement as entropy_agreement
from .confounds import entropy_beyond_controls as entropy_beyond_controls
from .domains import domain_restriction as domain_restriction
from .extract import Activations as Activations
from .extract import extract as extract
from .first_order import first_order as first_order
from .glossary import AXES as AXES
from .interventions import Edit as Edit
from .interventions import Subject as Subject
from .manifold import value_manifold as value_manifold
from .orthogonality import key_orthogonality as key_orthogonality
from .responsibilities import responsibilities as responsibilities
from .result import ProbeError as ProbeError
from .result import Result as Result
from .settling import settling as settling
from .sharpening import query_key_sharpening as query_key_sharpening
from .simplex import belief_geometry as belief_geometry
from .subspaces import decoding_axis as decoding_axis
from .subspaces import encoding_subspace as encoding_subspace
from .subspaces import principal_subspace as principal_subspace

__all__ = [
    "AXES",
    "Activations",
    "Edit",
    "ProbeError",
    "Result",
    "Subject",
    "advantage",
    "belief_geometry",
    "calibration",
    "decoding_axis",
    "domain_restriction",
    "encoding_subspace",
    "entropy_agreement",
    "entropy_beyond_controls",
    "extract",
    "extract_gradients",
    "first_order",
    "head_ablation",
    "head_removal",
    "key_orthogonality",
    "layer_ablation",
    "principal_subspace",
    "query_key_sharpening",
    "responsibilities",
    "settling",
    "steering",
    "subspace_ablation",
    "subspace_swap",
    "value_manifold",
]
