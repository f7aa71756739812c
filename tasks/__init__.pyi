from .base import Batch as Batch
from .base import Task as Task
from .base import TaskError as TaskError
from .base import get_task as get_task
from .base import task_names as task_names
from .bijection import Bijection as Bijection
from .hmm import HMM as HMM
from .markov import Markov as Markov
from .process import RRXOR as RRXOR
from .process import Mess3 as Mess3
from .recall import Recall as Recall
from .recurrence import Recurrence as Recurrence
from .regression import Regression as Regression

__all__ = [
    "HMM",
    "RRXOR",
    "Batch",
    "Bijection",
    "Markov",
    "Mess3",
    "Recall",
    "Recurrence",
    "Regression",
    "Task",
    "TaskError",
    "get_task",
    "task_names",
]
