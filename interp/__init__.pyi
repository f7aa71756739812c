from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import push_checkpoint as push_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .compare import compare as compare
from .diagnose import Diagnosis as Diagnosis
from .diagnose import diagnose as diagnose
from .errors import InterpError as InterpError
from .models.base import ModelConfig as ModelConfig
from .models.base import build_model as build_model
from .models.base import preset as preset
from .pretrained import PretrainedModel as PretrainedModel
from .pretrained import load_pretrained as load_pretrained
from .recipe import TrainConfig as TrainConfig
from .training import train as train
from .trajectory import snapshot_models as snapshot_models
from .trajectory import step_response as step_response

__all__ = [
    "Diagnosis",
    "InterpError",
    "ModelConfig",
    "PretrainedModel",
    "TrainConfig",
    "build_model",
    "compare",
    "diagnose",
    "load_checkpoint",
    "load_pretrained",
    "preset",
    "push_checkpoint",
    "save_checkpoint",
    "snapshot_models",
    "step_response",
    "train",
]
