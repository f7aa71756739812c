from .base import Batch as Batch
from .base import Task as Task
from .base import TaskError as TaskError
from .base import get_task as get_task
from .base import task_names as task_names
from .bijection import Bijection as Bijection

__all__ = ["Batch", "Bijection", "Task", "TaskError", "get_task", "task_names"]
