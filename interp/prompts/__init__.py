"""Prompts for language models, most with an exact posterior: what the wind tunnels are for models trained here."""

from .base import PromptBatch, PromptError, Prompts
from .dice import Dice
from .natural import Natural
from .sula import Sula
from .words import WordBijection

__all__ = ["Dice", "Natural", "PromptBatch", "PromptError", "Prompts", "Sula", "WordBijection"]
